"""Controllers in forked children of one process that has imported everything, so that a start takes no seconds.

Tests that kill the controller at every write start it dozens of times.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any


class ForkServer:
    """The test's side: one process, asked over a pipe for forks of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._lock = threading.Lock()
        assert self._read() == "ready"

    def start(self, arguments: list[str], log: Path) -> "Fork":
        """Run `populora controller ARGUMENTS` in a fork."""
        return Fork(self, int(self.ask({"start": arguments, "log": str(log)})))

    def ask(self, question: dict[str, Any]) -> Any:
        """Send a question and return the answer."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return self._read()

    def stop(self) -> None:
        """End the process, and with it every fork."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks controllers has ended")
        return json.loads(line)


class Fork:
    """One controller process, with what tests need of subprocess.Popen."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 240) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _serve() -> None:
    """Import everything, then fork on demand and tell how forks have ended."""
    for module in ("populora_operator.app", "populora_operator.logs"):
        importlib.import_module(module)
    command = importlib.import_module("populora_operator.command").command
    ended: dict[int, int] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if "start" in question:
            pid = os.fork()
            if pid == 0:
                _run(command, question["start"], question["log"])
            print(json.dumps(pid), flush=True)
        else:
            with contextlib.suppress(ChildProcessError):
                while (done := os.waitpid(-1, os.WNOHANG))[0]:
                    ended[done[0]] = os.waitstatus_to_exitcode(done[1])
            print(json.dumps(ended.get(question["poll"])), flush=True)


def _run(command: Any, arguments: list[str], log: str) -> None:
    """In the fork: become a controller."""
    code = 1
    try:
        _die_with_parent()
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        command.main(args=arguments, prog_name="populora controller")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
