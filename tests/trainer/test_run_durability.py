"""`populora run` killed, interrupted, starved of disk, damaged and run twice: it ends as if nothing had happened."""

import json
import os
import re
import shlex
import signal
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from run_client import PATIENCE_SECONDS, Process, Server, running_server

from populora_trainer.storage.checkpoint import intact, newest_manifest, read_manifest
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.logs import read_log

HERE = Path(__file__).parent
SMALL = (
    "population.students=1",
    "tasks.seedProblems=5",
    "training.rolloutsPerProblem=2",
    "evaluation.heldOut.problems=1",
)
STEPS = 2

pytestmark = pytest.mark.slow


def arguments(folder: Path, *more: str, steps: int = STEPS) -> list[str]:
    settings = [word for one in (*SMALL, f"training.steps={steps}") for word in ("--set", one)]
    return ["run", str(HERE / "tiny.yaml"), "--output", str(folder), *settings, *more]


def train(server: Server, folder: Path, *more: str, steps: int = STEPS, **faults: object) -> tuple[int, Process]:
    """Run to the end; returns the exit code, -9 where it was killed."""
    process = server.start(arguments(folder, *more, steps=steps), **faults)
    return process.wait(), process


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("processes")) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory) -> tuple[Path, Process]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    code, process = train(server, folder)
    assert code == 0, process.output()
    # Every step changes every kind of object, so a step that is lost or done twice shows.
    manifests = [read_manifest(LocalStore(folder), step) for step in range(STEPS + 1)]
    for before, after in pairwise(manifests):
        assert before.optimizer != after.optimizer
        assert before.buffer != after.buffer
        assert not set(before.adapters) & set(after.adapters)
    return folder, process


def latest(folder: Path) -> dict:
    return json.loads((folder / "LATEST").read_text())


def check_finished(folder: Path, undisturbed: Path) -> None:
    """The run ended as the undisturbed one: same checkpoint, same log lines, nothing left lying about."""
    assert latest(folder) == latest(undisturbed)
    store = LocalStore(folder, create=False)
    assert intact(store, STEPS)
    assert [record["step"] for record in read_log(store, "metrics")] == [*range(STEPS + 1)]
    for log in ("problems", "matchups", "evolution"):
        assert (folder / f"{log}.jsonl").read_bytes() == (undisturbed / f"{log}.jsonl").read_bytes(), log
    assert not list(folder.rglob(".tmp-*"))


def test_two_runs_of_one_manifest_are_equal_wherever_they_are(server, undisturbed, tmp_path):
    code, _ = train(server, tmp_path / "elsewhere")
    assert code == 0
    check_finished(tmp_path / "elsewhere", undisturbed[0])


def test_a_run_killed_at_every_boundary_of_its_phases_ends_as_if_it_was_not(server, undisturbed, tmp_path):
    folder = tmp_path / "run"
    boundaries = undisturbed[1].phases()
    assert {phase.partition(",")[0] for _, phase in boundaries} == {
        *("evolution", "matchmaking", "sync", "propose", "solve", "evaluate", "update", "checkpoint"),
        *("seed problems", "held-out evaluation"),
    }
    for step, phase in boundaries:
        code, process = train(server, folder, step=max(step, 1), kill_at=(step, phase))
        assert (code, process.phases()[-1]) == (-9, (step, phase)), process.output()
        # What the wreck shows is the last committed step, whole. Before the first commit there is nothing.
        newest = newest_manifest(LocalStore(folder, create=False))
        if newest is None:
            assert (step, phase.partition(",")[0]) in ((1, "seed problems"), (1, "held-out evaluation"))
        else:
            assert newest.step == step - 1
    code, process = train(server, folder)
    assert code == 0, process.output()
    assert f"Continuing {folder} after step {STEPS - 1} of {STEPS}" in process.output()
    check_finished(folder, undisturbed[0])


def test_a_run_killed_inside_its_writes_ends_as_if_it_was_not(server, undisturbed, tmp_path):
    writes = undisturbed[1].facts()[-1]["writes"]
    assert writes > 100
    kills = 0
    for attempt in range(2):
        folder = tmp_path / f"run-{attempt}"
        # Every process dies some writes later than the one before, until one lives to the end.
        for kill_at in range(2 + 5 * attempt, writes + 1, writes // 6):
            code, process = train(server, folder, kill_at_write=kill_at)
            if code == 0:
                break
            assert code == -9, process.output()
            kills += 1
        code, process = train(server, folder)
        assert code == 0, process.output()
        check_finished(folder, undisturbed[0])
    assert kills >= 4


def test_a_run_with_real_rollouts_ends_as_if_it_was_not_killed(server, tmp_path):
    assert train(server, tmp_path / "undisturbed", scripted=False)[0] == 0
    folder = tmp_path / "run"
    code, _ = train(server, folder, scripted=False, kill_at=(2, "solve"))
    assert (code, latest(folder)["step"]) == (-9, 1)
    assert train(server, folder, scripted=False)[0] == 0
    check_finished(folder, tmp_path / "undisturbed")


def test_an_interrupt_stops_after_the_step_and_says_how_to_go_on(server, undisturbed, tmp_path):
    folder, release = tmp_path / "a [/b] run", tmp_path / "release"
    process = server.start(arguments(folder, steps=1000), pause_at=(1, "propose"), release=str(release))
    process.until((1, "propose"))
    process.signal(signal.SIGINT)
    process.until_said("Stopping after this step")
    release.touch()
    assert process.wait() == 130, process.output()
    assert latest(folder)["step"] == 1
    output = process.output()
    assert "Stopped after step 1 of 1000; nothing is lost" in output
    assert "Traceback" not in output
    again = shlex.split(output.rpartition("Go on with:")[2])
    assert again == ["populora", *arguments(folder, steps=1000)]
    code, process = train(server, folder)
    assert code == 0, process.output()
    check_finished(folder, undisturbed[0])


def test_a_second_interrupt_ends_at_once_at_the_last_checkpoint(server, undisturbed, tmp_path):
    folder = tmp_path / "run"
    process = server.start(arguments(folder), pause_at=(2, "solve"), release=str(tmp_path / "never"))
    process.until((2, "solve"))
    process.signal(signal.SIGINT)
    process.until_said("Stopping after this step")
    process.signal(signal.SIGINT)
    assert process.wait() == 130, process.output()
    assert "Traceback" not in process.output()
    assert process.phases()[-1] == (2, "solve")
    assert latest(folder)["step"] == 1
    assert train(server, folder)[0] == 0
    check_finished(folder, undisturbed[0])


def test_sigterm_stops_after_the_step_as_well(server, undisturbed, tmp_path):
    folder, release = tmp_path / "run", tmp_path / "release"
    process = server.start(arguments(folder, steps=9), pause_at=(1, "update"), release=str(release))
    process.until((1, "update"))
    os.kill(process.pid, signal.SIGTERM)
    process.until_said("Stopping after this step")
    release.touch()
    assert process.wait() == 128 + signal.SIGTERM, process.output()
    assert latest(folder)["step"] == 1


def test_a_second_trainer_of_a_folder_is_turned_away_and_harms_nothing(server, undisturbed, tmp_path):
    folder, release = tmp_path / "run", tmp_path / "release"
    first = server.start(arguments(folder), pause_at=(2, "propose"), release=str(release))
    first.until((2, "propose"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, second = train(server, folder)
    assert code == 1
    assert re.search(rf"^Error: {folder} is in use by process {first.pid} on \S+$", second.output(), re.MULTILINE)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    release.touch()
    assert first.wait() == 0, first.output()
    check_finished(folder, undisturbed[0])


def test_a_full_disk_is_a_sentence_and_loses_no_committed_step(server, undisturbed, tmp_path):
    folder = tmp_path / "run"
    assert train(server, folder, steps=1)[0] == 0
    before = (folder / "LATEST").read_bytes()
    # The kernel refuses files of this size: the logs fit, the weights do not.
    code, process = train(server, folder, file_limit=40_000)
    assert code == 1
    sentence = process.output().rpartition("Error: ")[2]
    assert sentence.startswith("can't write ")
    assert "no space is left for it" in sentence
    assert "run the same command again" in sentence
    assert "Traceback" not in process.output()
    assert (folder / "LATEST").read_bytes() == before
    assert train(server, folder)[0] == 0
    assert latest(folder) == latest(undisturbed[0])
    assert [record["step"] for record in read_log(LocalStore(folder), "metrics")] == [0, 1, 2]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on(server, undisturbed, tmp_path):
    folder = tmp_path / "run"
    assert train(server, folder)[0] == 0
    store = LocalStore(folder, create=False)
    damaged = f"optimizer/{read_manifest(store, STEPS).optimizer}"
    data = bytearray(store.get(damaged))
    data[-1] ^= 1
    (folder / damaged).write_bytes(data)
    code, process = train(server, folder)
    assert code == 1
    assert f"{damaged} is damaged" in process.output()
    assert "--from-step 1" in process.output()
    assert "Traceback" not in process.output()
    code, process = train(server, folder, "--from-step", "1")
    assert code == 0, process.output()
    check_finished(folder, undisturbed[0])
    code, process = train(server, folder, "--from-step", "9")
    assert code == 1
    assert re.search(r"^Error: step 9 of .* can't be gone back to", process.output(), re.MULTILINE)


def test_metrics_and_status_are_served_while_a_run_trains(server, tmp_path):
    folder, release = tmp_path / "run", tmp_path / "release"
    process = server.start(arguments(folder, "--listen", "127.0.0.1:0"), pause_at=(2, "propose"), release=str(release))
    process.until((2, "propose"))
    url = re.search(r"Serving (http://127\.0\.0\.1:\d+)/metrics and ", process.output())
    assert url, process.output()

    def fetch(path: str) -> str:
        with urllib.request.urlopen(url[1] + path, timeout=PATIENCE_SECONDS) as answer:
            return answer.read().decode()

    status = json.loads(fetch("/status"))
    (metrics,) = (record for record in read_log(LocalStore(folder), "metrics") if record["step"] == 1)
    assert (status["phase"], status["step"], status["steps"], status["progressPercent"]) == ("Running", 1, 2, 50.0)
    assert {member["name"]: member["lcb"] for member in status["members"]} == {
        name: rating["lcb"] for name, rating in metrics["ratings"].items()
    }
    exposition = fetch("/metrics")
    assert re.search(r"^populora_step 1\.0$", exposition, re.MULTILINE)
    assert re.search(r'^populora_phase\{phase="Running"\} 1\.0$', exposition, re.MULTILINE)
    assert re.search(rf"^populora_valid_rate {metrics['valid_rate']}$", exposition, re.MULTILINE)
    assert fetch("/healthz") == "ok\n"
    release.touch()
    assert process.wait() == 0, process.output()


def test_an_address_that_is_taken_is_a_sentence(server, tmp_path):
    code, process = train(server, tmp_path / "run", "--listen", "nowhere")
    assert code == 1
    assert "Error: --listen 'nowhere': expected HOST:PORT" in process.output()


def test_what_a_run_prints_to_a_file_is_plain_lines(undisturbed):
    output = undisturbed[1].output()
    lines = output.splitlines()
    assert lines[0] == "Loading torch and builtin://nano ..."
    assert lines[1] == f"tiny: 2 teachers and 1 student on builtin://nano, in {undisturbed[0]}"
    assert "Loading weights" not in output
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", output)
    assert sum(bool(re.match(r" +[12]  ", line)) for line in lines) == STEPS
    assert lines[-1] == f"Report: {undisturbed[0] / 'report.html'}"
