"""`populora run` on two ranks ends as on one; whichever is killed, all end, and it goes on as if nothing had been."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from crew import free_port, torchrun_variables
from run_client import PATIENCE_SECONDS, Process, Server, running_server

from populora_trainer.storage.checkpoint import intact, newest_manifest, read_checkpoint, read_manifest
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.logs import read_log

HERE = Path(__file__).parent
SMALL = (
    "baseModel.dtype=float32",
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


class Ranks:
    """Two ranks of one run, as torchrun would start them."""

    def __init__(self, server: Server, argv: list[str], *, by_rank: dict[int, dict] | None = None, **faults) -> None:
        port = free_port()
        self.processes = [
            server.start(argv, environment=torchrun_variables(rank, 2, port), **faults, **(by_rank or {}).get(rank, {}))
            for rank in range(2)
        ]

    @property
    def leader(self) -> Process:
        return self.processes[0]

    def wait(self) -> list[int]:
        return [process.wait() for process in self.processes]

    def output(self) -> str:
        return "".join(f"--- rank {rank}\n{process.output()}" for rank, process in enumerate(self.processes))


def train(server: Server, folder: Path, *more: str, **options) -> tuple[list[int], Ranks]:
    ranks = Ranks(server, arguments(folder, *more, steps=options.pop("steps", STEPS)), **options)
    return ranks.wait(), ranks


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("processes")) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory) -> tuple[Path, Ranks]:
    folder = tmp_path_factory.mktemp("two-ranks") / "run"
    codes, ranks = train(server, folder)
    assert codes == [0, 0], ranks.output()
    return folder, ranks


def latest(folder: Path) -> dict:
    return json.loads((folder / "LATEST").read_text())


def check_finished(folder: Path, undisturbed: Path) -> None:
    assert latest(folder) == latest(undisturbed)
    assert intact(LocalStore(folder, create=False), STEPS)
    for log in ("problems", "matchups", "evolution"):
        assert (folder / f"{log}.jsonl").read_bytes() == (undisturbed / f"{log}.jsonl").read_bytes(), log


def check_alike(folder: Path, single: Path) -> None:
    """All that is decided is the same; weights and losses are, but for the order of sums."""
    for log in ("problems", "matchups"):
        assert (folder / f"{log}.jsonl").read_bytes() == (single / f"{log}.jsonl").read_bytes(), log
    for ours, theirs in zip(
        read_log(LocalStore(folder), "metrics"), read_log(LocalStore(single), "metrics"), strict=True
    ):
        assert ours["ratings"] == theirs["ratings"]
        assert ours["solve_rate"] == theirs["solve_rate"]
        for name, value in theirs.get("learner", {}).items():
            found = ours["learner"][name]
            assert found == (None if value is None else pytest.approx(value, rel=1e-3, abs=1e-4)), name
    ours, theirs = (
        read_checkpoint(store, read_manifest(store, STEPS)) for store in (LocalStore(folder), LocalStore(single))
    )
    assert ours.members == theirs.members
    for one, other in zip(ours.adapters, theirs.adapters, strict=True):
        for path, pair in one.factors.items():
            for mine, its in zip(pair, other.factors[path], strict=True):
                assert (mine - its).abs().mean() < 1e-5, path
                assert torch.allclose(mine, its, atol=5e-3)


def test_two_ranks_do_what_one_process_does(server, undisturbed, tmp_path):
    single = server.start(arguments(tmp_path / "single"))
    assert single.wait() == 0, single.output()
    check_alike(undisturbed[0], tmp_path / "single")
    recorded = [json.loads((place / "environment.json").read_text()) for place in (undisturbed[0], tmp_path / "single")]
    assert [[entry["ranks"] for entry in entries] for entries in recorded] == [[2], [1]]
    # Rank 0 alone shows and writes.
    leader, follower = undisturbed[1].processes
    assert leader.output().splitlines()[-1] == f"Report: {undisturbed[0] / 'report.html'}"
    assert follower.output() == ""


def test_two_ranks_sample_what_one_process_samples(server, tmp_path):
    single = server.start(arguments(tmp_path / "single"), scripted=False)
    codes, ranks = train(server, tmp_path / "two", scripted=False)
    assert codes == [0, 0], ranks.output()
    assert single.wait() == 0, single.output()
    check_alike(tmp_path / "two", tmp_path / "single")


def test_a_world_of_one_is_a_process_alone(server, tmp_path):
    outputs = []
    for name, environment in (("alone", {}), ("world", torchrun_variables(0, 1, free_port()))):
        process = server.start(arguments(tmp_path / name, "--ranks", "1"), environment=environment)
        assert process.wait() == 0, process.output()
        outputs.append(latest(tmp_path / name))
    assert outputs[0] == outputs[1]


def test_whatever_rank_is_killed_wherever_all_end_and_the_run_goes_on(server, undisturbed, tmp_path):
    folder = tmp_path / "run"
    lost = "Error: rank 1 is gone: its process or its node ended without a word"
    before = next(iter(read_log(LocalStore(undisturbed[0]), "metrics")))
    seeding = before["seeding"]["proposals"] // 4  # rounds, of one prompt each
    assert seeding >= 2
    kills = [
        # Of the other rank, in the middle of what rank 0 waits for, and of rank 0 at what it does alone.
        (1, {"kill_at_command": ("Begin", 1)}, None),
        (1, {"kill_at_command": ("Generate", 2)}, None),
        (1, {"kill_at_command": ("Generate", seeding + 2)}, 0),
        (0, {"kill_at": (1, "evaluate")}, 0),
        (1, {"kill_at_command": ("Learn", 1)}, 0),
        (0, {"kill_at": (1, "checkpoint")}, 0),
        (1, {"kill_at_command": ("Learn", 2)}, 1),
        (1, {"kill_at_command": ("Adopt", 2)}, 1),
        (0, {"kill_at": (2, "update"), "step": 2}, 1),
        (0, {"kill_at": (2, "checkpoint"), "step": 2}, 1),
    ]
    for rank, fault, step in kills:
        codes, ranks = train(server, folder, by_rank={rank: fault})
        assert codes == ([-9, 1] if rank == 0 else [1, -9]), (fault, ranks.output())
        if rank == 1:
            assert ranks.leader.output().splitlines()[-1] == lost, (fault, ranks.output())
        assert "Traceback" not in ranks.output()
        newest = newest_manifest(LocalStore(folder, create=False))
        assert (newest and newest.step) == step, (fault, ranks.output())
    codes, ranks = train(server, folder)
    assert codes == [0, 0], ranks.output()
    check_finished(folder, undisturbed[0])


def test_a_rank_that_hangs_is_given_up(server, tmp_path):
    release = tmp_path / "release"
    environment = {"POPULORA_RANK_TIMEOUT_SECONDS": "8"}
    port = free_port()
    leader, follower = (
        server.start(
            arguments(tmp_path / "run"),
            environment=environment | torchrun_variables(rank, 2, port),
            pause_at=(1, "propose"),
            release=str(release),
        )
        for rank in range(2)
    )
    leader.until((1, "propose"))
    os.kill(follower.pid, signal.SIGSTOP)
    release.touch()
    assert leader.wait() == 1
    assert "Error: rank 1 was not heard from for 8 s: it hangs, or its node does" in leader.output()
    os.kill(follower.pid, signal.SIGKILL)
    assert follower.wait() == -9
    assert latest(tmp_path / "run")["step"] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_either_rank_stops_both_after_the_step(server, undisturbed, tmp_path, rank):
    folder, release = tmp_path / "run", tmp_path / "release"
    ranks = Ranks(server, arguments(folder), pause_at=(1, "update"), release=str(release))
    ranks.leader.until((1, "update"))
    os.kill(ranks.processes[rank].pid, signal.SIGTERM)
    ranks.leader.until_said("Stopping after this step")
    release.touch()
    assert ranks.wait() == [143, 143], ranks.output()
    assert latest(folder)["step"] == 1
    codes, ranks = train(server, folder)
    assert codes == [0, 0], ranks.output()
    check_finished(folder, undisturbed[0])


def test_a_step_that_outlasts_the_grace_is_left_at_the_last_checkpoint(server, undisturbed, tmp_path):
    folder = tmp_path / "run"
    ranks = Ranks(server, arguments(folder, "--grace", "0.5"), pause_at=(2, "solve"), release=str(tmp_path / "never"))
    ranks.leader.until((2, "solve"))
    os.kill(ranks.leader.pid, signal.SIGTERM)
    assert ranks.wait() == [143, 143], ranks.output()
    assert "The step takes longer than --grace allows; the run is left at its last checkpoint" in ranks.leader.output()
    assert latest(folder)["step"] == 1
    assert train(server, folder)[0] == [0, 0]
    check_finished(folder, undisturbed[0])


def test_a_manifest_that_does_not_fit_the_run_ends_all_with_42(server, undisturbed):
    before = latest(undisturbed[0])
    codes, ranks = train(server, undisturbed[0], "--set", "adapter.rank=16")
    assert codes == [42, 42], ranks.output()
    assert "spec.adapter.rank" in ranks.leader.output()
    assert "Traceback" not in ranks.output()
    assert latest(undisturbed[0]) == before


def test_other_ranks_are_told_why_on_their_nodes_and_answer_probes(server, tmp_path):
    folder, release, port = tmp_path / "run", tmp_path / "release", free_port()
    ports = [free_port(), free_port()]
    leader, follower = (
        server.start(
            arguments(folder, "--listen", f"127.0.0.1:{ports[rank]}"),
            environment=torchrun_variables(rank, 2, port) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            pause_at=(1, "solve"),
            release=str(release),
        )
        for rank in range(2)
    )
    leader.until((1, "solve"))
    assert [fetch(ports[rank], "/healthz") for rank in range(2)] == [(200, "ok\n")] * 2
    assert json.loads(fetch(ports[0], "/status")[1])["phase"] == "Running"
    assert fetch(ports[1], "/status")[0] == 404
    assert "populora_step" in fetch(ports[0], "/metrics")[1]
    assert fetch(ports[1], "/metrics") == (200, "")
    # Rank 0 cannot write its run: its failure is the others'.
    for path in ("problems.jsonl", "metrics.jsonl", "matchups.jsonl"):
        (folder / path).unlink(missing_ok=True)
        (folder / path).mkdir()
    release.touch()
    assert (leader.wait(), follower.wait()) == (1, 1)
    sentence = leader.output().splitlines()[-1]
    assert sentence.startswith("Error: can't write")
    assert follower.output().splitlines() == [sentence]


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_one_command_starts_all_ranks_stops_them_in_order_and_goes_on(tmp_path):
    folder = tmp_path / "run"
    more = ("--ranks", "2", "--listen", "127.0.0.1:0")

    def start(steps: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "populora_trainer.cli", *arguments(folder, *more, steps=steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    process = start(1000)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (folder / "LATEST").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 143, output
    step = latest(folder)["step"]
    assert f"Stopped after step {step} of 1000; nothing is lost" in output
    assert re.search(r"populora run \S+tiny.yaml .*--ranks 2", output)
    process = start(step + 1)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert f"Continuing {folder} after step {step} of {step + 1}" in output
    assert latest(folder)["step"] == step + 1
    assert "Traceback" not in output
