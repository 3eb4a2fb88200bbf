"""What `populora run` says to a world that cannot be, and how it starts the ranks of one that can."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from crew import torchrun_variables

from populora_trainer.commands.run import command
from populora_trainer.errors import PopuloraError, RanksError
from populora_trainer.ranks import launcher

TINY = Path(__file__).parent.parent / "tiny.yaml"


@pytest.fixture
def launched(monkeypatch) -> list[tuple[list[str], dict]]:
    """Return what would have been launched; it ends with 143."""
    calls: list[tuple[list[str], dict]] = []

    def launch(arguments: list[str], **options: object) -> int:
        options.pop("say")
        calls.append((arguments, options))
        return 143

    monkeypatch.setattr(launcher, "launch", launch)
    return calls


def invoke(tmp_path: Path, *more: str, env: dict[str, str] | None = None, **options):
    return CliRunner().invoke(command, [str(TINY), "--output", str(tmp_path / "run"), *more], env=env, **options)


def test_ranks_run_the_same_command_and_their_code_is_its_own(launched, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["populora", "run", str(TINY), "--ranks", "8"])
    assert invoke(tmp_path, "--ranks", "8").exit_code == 143
    ((arguments, options),) = launched
    assert arguments == ["-m", "populora_trainer.cli", "run", str(TINY), "--ranks", "8"]
    assert options == {"ranks": 8, "nodes": 1, "node": 0, "host": "127.0.0.1", "port": 0}


def test_a_pod_of_an_indexed_job_knows_its_number(launched, tmp_path):
    more = ("--ranks", "4", "--nodes", "3", "--rendezvous", "job-0.service:29400")
    assert invoke(tmp_path, *more, env={"JOB_COMPLETION_INDEX": "2"}).exit_code == 143
    assert launched[0][1] == {"ranks": 4, "nodes": 3, "node": 2, "host": "job-0.service", "port": 29400}


def test_one_rank_a_node_on_several_nodes_is_launched_too(launched, tmp_path):
    assert invoke(tmp_path, "--nodes", "2", "--node", "1", "--rendezvous", "other:1").exit_code == 143
    assert launched[0][1] == {"ranks": 1, "nodes": 2, "node": 1, "host": "other", "port": 1}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--nodes", "2"), "--nodes 2: --rendezvous HOST:PORT must say where machine 0 waits for the others"),
        (("--nodes", "2", "--node", "2", "--rendezvous", "a:1"), "--node 2 is not allowed with --nodes 2"),
        (("--nodes", "2", "--rendezvous", "here"), "--rendezvous 'here': expected HOST:PORT"),
        (("--ranks", "2", "--set", "training.steps=0"), "spec.training.steps"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(launched, tmp_path, more, sentence):
    result = invoke(tmp_path, *more)
    assert sentence in str(result.exception)
    assert launched == []


def test_a_manifest_that_can_be_read_once_is_refused_for_many(launched, tmp_path):
    result = CliRunner().invoke(
        command, ["-", "--output", str(tmp_path / "run"), "--ranks", "2"], input=TINY.read_text()
    )
    assert isinstance(result.exception, PopuloraError)
    assert "--ranks needs a manifest in a file, as every process reads it" in str(result.exception)
    assert launched == []


def test_a_place_that_cannot_be_is_refused(tmp_path):
    result = invoke(tmp_path, env=torchrun_variables(2, 2, 29500))
    assert isinstance(result.exception, RanksError)
    assert "RANK is 2 while WORLD_SIZE is set; allowed are 0 to 1" in str(result.exception)
    variables = torchrun_variables(1, 2, 29500) | {"MASTER_ADDR": ""}
    result = invoke(tmp_path, env=variables)
    assert "MASTER_ADDR or MASTER_PORT is missing while WORLD_SIZE is set" in str(result.exception)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("MASTER_PORT", "99999", "1 to 65535"),
        ("MASTER_PORT", "port", "1 to 65535"),
        ("POPULORA_RANK_TIMEOUT_SECONDS", "soon", "0.1 to 86400"),
        ("POPULORA_RANK_TIMEOUT_SECONDS", "nan", "0.1 to 86400"),
    ],
)
def test_a_variable_that_is_no_number_is_named(tmp_path, name, value, allowed):
    result = invoke(tmp_path, env=torchrun_variables(1, 2, 29500) | {name: value})
    assert isinstance(result.exception, RanksError)
    assert str(result.exception) == f"{name} is {value}; allowed are {allowed}"


@pytest.mark.parametrize("option", [("--node", "1"), ("--rendezvous", "a:1")])
def test_an_option_for_several_machines_is_refused_for_one(launched, tmp_path, option):
    result = invoke(tmp_path, *option)
    assert f"{' '.join(option)} is for several machines, and --nodes is 1" in str(result.exception)
    assert invoke(tmp_path, *option, "--ranks", "2").exception is not None
    assert launched == []


@pytest.mark.parametrize("grace", ["nan", "-1", "soon"])
def test_a_grace_that_is_no_time_is_refused(tmp_path, grace):
    result = invoke(tmp_path, "--grace", grace)
    assert result.exit_code == 2
    assert "Invalid value for '--grace'" in result.output


@pytest.mark.parametrize("address", ["http://[::1", "http://a:99999", "sandbox:8080", "http://me:it@a"])
def test_a_sandbox_that_is_no_address_is_refused_before_anything_starts(launched, tmp_path, address):
    result = invoke(tmp_path, "--sandbox", address, "--ranks", "2")
    assert f"the sandbox service {address!r} is not an address: http://HOST[:PORT] is allowed" in str(result.exception)
    assert launched == []
