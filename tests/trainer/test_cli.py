"""The command line as a shell sees it: what it prints, where, and with which exit code."""

import json
import os
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from populora_api import PopulationRun
from populora_trainer.cli import COMMANDS
from populora_trainer.commands.run import command as run_command
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.removal import foreign_in

TINY = Path(__file__).with_name("tiny.yaml")
POPULORA = "from populora_trainer.cli import main; main()"


def populora(*arguments: str, code: str = POPULORA, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        timeout=300,
    )


def in_one_process(calls: list[list[str]]) -> list[tuple[int, str, str]]:
    """Return (exit code, output, errors) of several calls in one process, as every start costs a second."""
    code = (
        "import contextlib, io, json, sys\n"
        "from populora_trainer.cli import main\n"
        "results = []\n"
        f"for call in {calls!r}:\n"
        "    out, err, sys.argv = io.StringIO(), io.StringIO(), ['populora', *call]\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "        try:\n"
        "            main()\n"
        "        except SystemExit as end:\n"
        "            results.append((end.code, out.getvalue(), err.getvalue()))\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "print(json.dumps(results))\n"
    )
    done = populora(code=code)
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)]


def test_help_lists_all_commands_in_the_order_of_use_without_torch() -> None:
    ((code, output, errors),) = in_one_process([["--help"]])
    assert (code, errors) == (0, "")
    listed = re.findall(r"^  ([a-z]+)  +\S", output.partition("Commands:")[2], re.MULTILINE)
    assert (
        listed
        == list(COMMANDS)
        == [
            *("run", "status", "report", "operators", "evolve", "sandbox", "sidecar", "base", "storage", "controller"),
            *("validate", "crd"),
        ]
    )


def test_every_command_explains_itself_without_torch() -> None:
    calls = [[command, "--help"] for command in COMMANDS] + [["sandbox", "check", "--help"], ["-h"]]
    for call, (code, output, errors) in zip(calls, in_one_process(calls), strict=True):
        assert (code, errors) == (0, ""), call
        assert output.startswith("Usage: "), call
        assert " ".join(call[:-1]) in output.splitlines()[0], call


def test_usage_errors_say_what_is_wrong_and_exit_with_2() -> None:
    (unknown, option, missing, none) = in_one_process([["trane"], ["run", "--fast"], ["run"], []])
    assert unknown[0] == option[0] == missing[0] == none[0] == 2
    assert "No such command 'trane'" in unknown[2]
    assert "No such option" in option[2]
    assert "Missing argument 'MANIFEST'" in missing[2]
    assert "Commands:" in none[2]


def test_the_version_is_the_packages() -> None:
    ((code, output, _),) = in_one_process([["--version"]])
    assert (code, output) == (0, f"populora, version {version('populora-operator')}\n")


def test_a_wrong_manifest_is_one_sentence_a_problem_and_exit_code_42_before_torch_is_loaded(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(TINY.read_text().replace("rank: 8", "rank: 9").replace("steps: 2", "steps: 0"))
    output = str(tmp_path / "run")
    wrong, missing, cluster, unknown = in_one_process(
        [
            ["run", str(bad), "-o", output],
            ["run", str(tmp_path / "none.yaml"), "-o", output],
            ["run", str(TINY), "-o", output, "--set", "inference.engine=VLLM", "--set", "baseModel.uri=s3://bucket/x"],
            ["run", str(TINY), "-o", output, "--set", "training.stepz=3"],
        ]
    )
    assert [result[0] for result in (wrong, missing, cluster, unknown)] == [42] * 4
    assert [result[1] for result in (wrong, missing, cluster, unknown)] == [""] * 4
    assert re.fullmatch(
        rf"Error: {bad}:\d+: spec\.adapter\.rank: 9 is not allowed: .*\n{bad}:\d+: spec\.training\.steps: 0 is .*\n",
        wrong[2],
    )
    assert missing[2] == f"Error: {tmp_path / 'none.yaml'}: cannot be read: No such file or directory\n"
    assert "spec.inference.engine: VLLM needs the address of vLLM servers, which `populora run --serving" in cluster[2]
    assert "spec.baseModel.uri: s3://bucket/x needs an object store" in cluster[2]
    assert "training.stepz" in unknown[2]
    assert not Path(output).exists()


def test_an_address_of_vllm_that_is_none_or_that_nobody_would_ask_is_a_sentence_before_torch_is_loaded(
    tmp_path: Path,
) -> None:
    run = ["run", str(TINY), "-o", str(tmp_path / "run")]
    idle, wrong = in_one_process(
        [[*run, "--serving", "vllm"], [*run, "--set", "inference.engine=VLLM", "--serving", "https://vllm"]]
    )
    assert (idle[0], wrong[0]) == (1, 1)
    assert idle[2].startswith("Error: --serving vllm: spec.inference.engine is Transformers, which samples in this ")
    assert wrong[2].startswith("Error: the address of vLLM is 'https://vllm': http://HOST:PORT, HOST:PORT and HOST ")
    assert not (tmp_path / "run").exists()


def test_an_error_is_one_sentence_and_debug_adds_where_it_came_from(tmp_path: Path) -> None:
    cases = tmp_path / "cases.jsonl"
    cases.write_text("[]\n")
    plain = populora("sandbox", "check", str(cases))
    assert (plain.returncode, plain.stdout) == (1, "")
    assert plain.stderr == f"Error: {cases}, line 1: a case is a JSON object, this is list\n"
    debug = populora("--debug", "sandbox", "check", str(cases))
    assert debug.returncode == 1
    assert "Traceback (most recent call last)" in debug.stderr
    assert debug.stderr.endswith(f"CaseError: {cases}, line 1: a case is a JSON object, this is list\n")


def test_what_nobody_foresaw_is_a_sentence_too() -> None:
    failing = (
        "import populora_trainer.commands.crd as crd\n"
        "def fail(): raise KeyError('gone')\n"
        "crd.custom_resource_definition = fail\n"
    )
    done = populora("crd", code=failing + POPULORA)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: KeyError: 'gone' (`populora --debug ...` shows the traceback)\n"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", POPULORA, "crd"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=300) == 1


@pytest.mark.parametrize("command", list(COMMANDS))
def test_the_list_of_commands_says_what_each_does(command: str) -> None:
    assert re.fullmatch(r"[A-Z][^.]*\.", COMMANDS[command])


def test_places_that_cannot_be_had_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    held = tmp_path / "held"
    run = ["run", str(TINY), "-o"]
    with LocalStore(held).lock(), socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken, blocked, nowhere, used = in_one_process(
            [
                [*run, str(tmp_path / "run"), "--listen", f"127.0.0.1:{port}"],
                [*run, str(tmp_path / "file" / "run")],
                [*run, str(tmp_path / "run"), "--leave-status", str(tmp_path / "none" / "log")],
                [*run, str(held)],
            ]
        )
    assert [result[0] for result in (taken, blocked, nowhere, used)] == [1] * 4
    assert taken[2].startswith(f"Error: --listen 127.0.0.1:{port}: cannot serve there (")
    assert blocked[2] == f"Error: {tmp_path}/file/run can't hold the run: {tmp_path}/file is no folder\n"
    assert nowhere[2] == (
        f"Error: --leave-status {tmp_path}/none/log: cannot be written: {tmp_path}/none does not exist\n"
    )
    assert re.fullmatch(rf"Error: {held} is in use by process \d+ on .*\n", used[2])
    assert not (tmp_path / "run").exists()


def test_a_folder_of_other_files_is_refused_and_one_that_looks_like_a_run_is_not(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "guide.md").write_text("text")
    ((code, _, errors),) = in_one_process([["run", str(TINY), "-o", str(tmp_path / "docs")]])
    assert (code, [path.name for path in (tmp_path / "docs").iterdir()]) == (1, ["guide.md"])
    assert errors.startswith(f"Error: {tmp_path}/docs can't hold the run: it has guide.md in it, which is no part of")
    (tmp_path / "volume" / "lost+found").mkdir(parents=True)
    (tmp_path / "volume" / "base.json").write_text("{}")
    assert foreign_in(tmp_path / "volume") == []


def test_a_folder_given_twice_is_refused_and_a_path_that_cannot_be_looked_up_is_one_sentence(tmp_path: Path) -> None:
    twice, unknown = in_one_process(
        [
            ["run", str(TINY), "-o", str(tmp_path / "a"), "--set", f"storage.uri=file://{tmp_path}/b"],
            ["status", str(tmp_path / ("x" * 300))],
        ]
    )
    assert twice[0] == 1
    assert f"--output {tmp_path}/a: this run goes to spec.storage.uri file://{tmp_path}/b; leave" in twice[2]
    assert unknown[0] == 1
    assert unknown[2].startswith("Error: ")
    assert "File name too long" in unknown[2]
    assert "Traceback" not in unknown[2]
    assert not list(tmp_path.iterdir())


def test_a_run_takes_its_manifest_from_a_pipe_and_says_how_to_go_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[object, str]] = []

    def train(run: object, again: str, *others: object) -> int:
        seen.append((run, again))
        return 2

    monkeypatch.setattr("populora_trainer.progress.train_in_terminal", train)
    folder = tmp_path / "run"
    words = ["-", "-o", str(folder), "--set", "training.steps=3"]
    result = CliRunner().invoke(run_command, words, input=TINY.read_text())
    assert result.exit_code == 130
    assert result.output == "Loading torch and builtin://nano ...\n"
    ((run, again),) = seen
    assert isinstance(run, PopulationRun)
    assert run.spec.training.steps == 3
    assert again == f"populora run {folder}/run.yaml --output {folder}"
    read, write = os.pipe()
    os.write(write, TINY.read_bytes())
    os.close(write)
    assert CliRunner().invoke(run_command, [f"/dev/fd/{read}", "-o", str(folder)]).exit_code == 130
    os.close(read)
    assert seen[1][1] == again
    words = ["-", "--set", f"storage.uri=file://{folder}"]
    assert CliRunner().invoke(run_command, words, input=TINY.read_text()).exit_code == 130
    assert seen[2][1] == again
    # In a file, the manifest and the override are there the next time as well.
    assert CliRunner().invoke(run_command, [str(TINY), *words[1:]]).exit_code == 130
    assert seen[3][1] == f"populora run {TINY} --set storage.uri=file://{folder}"
