"""Who drives `run_server`: starts `populora` in its children, waits for what they reach, and signals them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
PATIENCE_SECONDS = 300


class Process:
    """A `populora run` that goes on in a child of the server."""

    def __init__(self, server: "Server", pid: int, out: Path, notes: Path) -> None:
        self.server, self.pid, self.out, self.notes = server, pid, out, notes

    def wait(self) -> int:
        return self.server.ask(wait=self.pid)["code"]

    def output(self) -> str:
        return self.out.read_text()

    def facts(self) -> list[dict]:
        return [json.loads(line) for line in self.notes.read_text().splitlines()] if self.notes.exists() else []

    def phases(self) -> list[tuple[int, str]]:
        return [(fact["step"], fact["phase"]) for fact in self.facts() if "phase" in fact]

    def until(self, phase: tuple[int, str]) -> None:
        self._patiently(lambda: phase in self.phases(), f"phase {phase}")

    def until_said(self, text: str) -> None:
        self._patiently(lambda: text in self.output(), text)

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started, as a terminal does."""
        os.killpg(self.pid, number)

    def _patiently(self, reached, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            assert time.monotonic() < deadline, f"no {what} in:\n{self.output()}"
            time.sleep(0.02)


class Server:
    """The process that `populora` is forked from."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder, self._count = process, folder, 0

    def ask(self, **request: object) -> dict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, argv: list[str], **faults: object) -> Process:
        self._count += 1
        out, notes = self._folder / f"{self._count}.out", self._folder / f"{self._count}.notes"
        answer = self.ask(start={"argv": argv, "out": str(out), "notes": str(notes), **faults})
        return Process(self, answer["pid"], out, notes)


@contextmanager
def running_server(folder: Path) -> Iterator[Server]:
    """Start the server, with one thread to compute with, and end it; its children's output goes to the folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(HERE / "run_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield Server(process, folder)
        assert process.stdin is not None
        process.stdin.close()
