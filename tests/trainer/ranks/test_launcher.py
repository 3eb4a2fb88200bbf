"""A node's processes start as torchrun starts them, and what they end with is what it ends with."""

import os
import signal
import tempfile
import time

import pytest
from crew import free_port

from populora_trainer.errors import RanksError
from populora_trainer.ranks.launcher import exit_code, launch, parse_endpoint

PATIENCE_SECONDS = 300


class Node:
    """A launcher in a forked child, whose output and that of its processes goes to a file."""

    def __init__(self, program: str, **options: object) -> None:
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        self.pid = os.fork()
        if not self.pid:
            code = 70
            try:
                for stream in (1, 2):
                    os.dup2(self._out.fileno(), stream)
                code = launch(["-c", program], say=lambda sentence: os.write(1, f"{sentence}\n".encode()), **options)
            finally:
                os._exit(code)

    def output(self) -> str:
        return os.pread(self._out.fileno(), 1 << 16, 0).decode()

    def until_said(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.output():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        _, status = os.waitpid(self.pid, 0)
        output = self.output()
        self._out.close()
        return os.waitstatus_to_exitcode(status), output


def run(program: str, **options: object) -> tuple[int, str]:
    return Node(program, **options).end()


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
    nodes = [Node(program, ranks=2, nodes=2, node=node, host="127.0.0.1", port=port) for node in (1, 0)]
    for node in nodes:
        assert node.end() == (0, "")
    places = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert places == [f"0 4 0 2 {port}", f"1 4 1 2 {port}", f"2 4 0 2 {port}", f"3 4 1 2 {port}"]


def test_ranks_of_one_machine_can_be_reached_from_no_other():
    program = (
        "import os\n"
        "if os.environ['RANK'] == '0':\n"
        "    port = format(int(os.environ['MASTER_PORT']), '04X')\n"
        "    rows = [line.split() for name in ('tcp', 'tcp6') for line in open('/proc/net/' + name)]\n"
        "    print(*(row[1] for row in rows if row[3] == '0A' and row[1].endswith(':' + port)))\n"
        "    print(os.environ['GLOO_SOCKET_IFNAME'])\n"
    )
    code, output = run(program, ranks=2)
    where, interface = output.split()
    assert (code, where.partition(":")[0], interface) == (0, "0100007F", "lo")  # 127.0.0.1 in the kernel's order


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
os.write(1, b"ready\\n")
time.sleep(300)
"""
    node = Node(program, ranks=2)
    node.until_said("ready\nready\n")
    os.kill(node.pid, signal.SIGTERM)
    assert node.end() == (143, "ready\nready\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_signal_ends_the_wait_for_other_nodes():
    node = Node("", ranks=1, nodes=2, node=1, host="job-0.nowhere.invalid", port=29400)
    node.until_said("Waiting for node 0 at job-0.nowhere.invalid:29400")
    os.kill(node.pid, signal.SIGTERM)
    code, output = node.end()
    assert code == 143, output
    assert "Traceback" not in output
