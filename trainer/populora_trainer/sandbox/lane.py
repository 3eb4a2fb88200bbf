"""The decider's handle on one zygote: starts it, hands it a run, collects how the run ended."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from populora_trainer.errors import SandboxError
from populora_trainer.sandbox.zygote import DONE, GO, LENGTH

_PACKAGE = Path(__file__).parent
# The package's own __init__ would load what a zygote must not carry, so bare packages stand in for it.
_BOOTSTRAP = f"""
import sys, types
for name, path in (("populora_trainer", {str(_PACKAGE.parent)!r}), ("populora_trainer.sandbox", {str(_PACKAGE)!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from populora_trainer.sandbox import zygote
zygote.start()
"""
_PASSED_ON = ("LD_LIBRARY_PATH", "PYTHONHOME")
# Linux's default pipe; a longer record has to be read while the program still writes.
PIPE_BYTES = 65_536


class Lane:
    """One zygote with its control socket, job file and result pipe; at most one run at a time."""

    def __init__(self, hash_seed: int, memory_mib: int, *, varied: bool) -> None:
        """Start the process; `finish_start` then waits until it is ready.

        Args:
            hash_seed: of its interpreter.
            memory_mib: address space of a program, in MiB.
            varied: whether it makes the runs after the first; see variation.py.

        Raises:
            OSError: the process cannot be started.
        """
        self.control, theirs = socket.socketpair()
        self.result_fd, result_write = os.pipe()
        os.set_blocking(self.result_fd, False)
        self._job_fd = _anonymous_file()
        self._received = bytearray()
        passed = (theirs.fileno(), self._job_fd, result_write)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-B", "-X", "utf8", "-W", "ignore", "-c", _BOOTSTRAP]
                + [str(number) for number in (*passed, memory_mib, int(varied))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=passed,
                cwd="/",
                env={"PYTHONHASHSEED": str(hash_seed)}
                | {name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                start_new_session=True,  # an interrupt typed at the terminal is for the trainer to handle
            )
        except OSError:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(result_write)

    def finish_start(self, timeout: float = 60.0) -> Mapping[str, str | None]:
        """Wait until the zygote is ready; return why each layer is missing, None where it is there.

        Raises:
            SandboxError: the process ended or did not get ready in time.
        """
        self.control.settimeout(timeout)
        try:
            (size,) = LENGTH.unpack(self._receive(LENGTH.size))
            layers: dict[str, str | None] = json.loads(self._receive(size))
        except (OSError, ValueError) as error:
            raise SandboxError(f"a verifier worker did not start: {error or 'no report'}") from error
        if "start" in layers:
            raise SandboxError(f"a verifier worker did not start: {layers['start']}")
        self.control.setblocking(False)
        return layers

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.control.recv(size - len(data))
            if not part:
                raise OSError(f"it ended with status {self.process.wait()}")
            data += part
        return data

    def start(self, run: int, job: bytes, timeout: float) -> None:
        """Hand over a run.

        Raises:
            OSError: the zygote is gone.
        """
        self._received.clear()
        os.pwrite(self._job_fd, job, 0)
        self.control.send(GO.pack(run, len(job), timeout))

    def collect(self, max_bytes: int) -> bool:
        """Read what the program has written so far; False when it is more than any honest result."""
        with contextlib.suppress(BlockingIOError):
            while len(self._received) <= max_bytes:
                part = os.read(self.result_fd, PIPE_BYTES)
                if not part:
                    break
                self._received += part
        return len(self._received) <= max_bytes

    def done(self, max_bytes: int) -> tuple[int, bool, int, float, bytes] | None:
        """Return run, whether it was late, wait status, processor seconds and record; None when the zygote is gone."""
        try:
            message = self.control.recv(DONE.size)
        except OSError:
            return None
        if len(message) != DONE.size:
            return None
        run, late, status, seconds = DONE.unpack(message)
        self.collect(max_bytes)
        record = bytes(self._received)
        # Whatever a program wrote beyond the limit must not be read as the next one's.
        with contextlib.suppress(BlockingIOError):
            while os.read(self.result_fd, PIPE_BYTES):
                pass
        return run, late, status, seconds, record

    def kill(self) -> None:
        """End the zygote and its program, and wait until both are gone."""
        self.process.kill()
        self.process.wait()
        # The pipe closes when the last process that holds it, the program, has ended.
        with contextlib.suppress(BlockingIOError):
            while select.select([self.result_fd], [], [], 5.0)[0] and os.read(self.result_fd, PIPE_BYTES):
                pass
        self._close()

    def _close(self) -> None:
        self.control.close()
        os.close(self._job_fd)
        os.close(self.result_fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("job")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
