"""A node's processes start as torchrun starts them, and what they end with is what it ends with."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from crew import free_port

from populora_trainer.errors import RanksError
from populora_trainer.ranks.launcher import exit_code, parse_endpoint

LAUNCH = """
import sys
from populora_trainer.ranks.launcher import launch
def say(sentence):
    print(sentence, flush=True)
options = eval(sys.argv[1])
sys.exit(launch(["-c", sys.argv[2]], say=say, **options))
"""


def start(program: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, repr(options), program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(program: str, **options: object) -> tuple[int, str]:
    process = start(program, **options)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([1, 42], 42),
        ([-15, 42], 42),
        ([143, -15], 143),
        ([130, -2], 130),
        ([-9, 1], 137),
        ([-15, 1], 1),
        ([143, 3], 3),
    ],
)
def test_a_node_ends_with_the_code_that_explains_most(codes, expected):
    assert exit_code(codes) == expected


@pytest.mark.parametrize("text", ["", "host", "host:", ":29400", "host:0", "host:70000", "host:x"])
def test_an_endpoint_that_is_none_is_refused(text):
    with pytest.raises(RanksError, match=r"^--rendezvous .*: expected HOST:PORT with a port from 1 to 65535$"):
        parse_endpoint(text)


def test_an_endpoint_is_split():
    assert parse_endpoint("run-trainer-1-0.run-trainer:29400") == ("run-trainer-1-0.run-trainer", 29400)
    assert parse_endpoint("[::1]:29400") == ("::1", 29400)


def test_two_nodes_of_two_ranks_know_their_places(tmp_path):
    program = f"""
import os, pathlib
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))
"""
    port = free_port()
    nodes = [start(program, ranks=2, nodes=2, node=node, host="127.0.0.1", port=port) for node in (1, 0)]
    for node in nodes:
        output, _ = node.communicate(timeout=300)
        assert (node.returncode, output) == (0, "")
    places = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert places == [f"0 4 0 2 {port}", f"1 4 1 2 {port}", f"2 4 0 2 {port}", f"3 4 1 2 {port}"]


def test_a_refused_manifest_and_a_killed_process_are_told_apart():
    code, output = run("import os, sys; sys.exit(42 * (os.environ['RANK'] == '0'))", ranks=2)
    assert (code, output) == (42, "")
    code, output = run(
        "import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(300)", ranks=2
    )
    assert (code, output) == (137, "Rank 1 was ended by SIGKILL\n")


def test_a_signal_is_passed_on_and_the_processes_take_their_time(tmp_path):
    program = f"""
import os, pathlib, signal, sys, time
def stop(number, frame):
    time.sleep(1)
    pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).write_text("done")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(300)
"""
    process = start(program, ranks=2)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert (process.returncode, output) == (143, "")
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["0", "1"]


def test_a_signal_ends_the_wait_for_other_nodes():
    process = start("", ranks=1, nodes=2, node=1, host="job-0.nowhere.invalid", port=29400)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Waiting for node 0 at job-0.nowhere.invalid:29400")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143, output
    assert "Traceback" not in output
