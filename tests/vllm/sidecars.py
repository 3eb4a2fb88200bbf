"""Runs the command `populora sidecar` beside a server, and waits for what it says."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adapters import ask
from server import free_port

PATIENCE = 400  # seconds; a machine with two cores may be busy


@dataclass
class SidecarProcess:
    """A running sidecar.

    Attributes:
        url: its address.
        process: of the command.
        log: what it prints.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def status(self) -> dict:
        """Return the answer of `/status`."""
        return ask(f"{self.url}/status")

    def ready(self) -> bool:
        """Whether `/readyz` answers 200."""
        return self.answers("/readyz")

    def answers(self, path: str) -> bool:
        """Whether a path answers 200."""
        try:
            ask(f"{self.url}{path}")
        except OSError:  # 503, or it does not listen yet
            return False
        return True

    def until_serves(self, sha256: str) -> None:
        """Wait until a publication is served, as the trainer does."""
        ask(f"{self.url}/refresh", {})
        until(lambda: self.status()["publication"] == sha256, lambda: f"the publication is served: {self.status()}")

    def until_ready(self, patience: float = PATIENCE) -> None:
        """Wait for readiness."""
        until(self.ready, lambda: f"the sidecar is ready; it printed {self.log.read_text()[-2000:]}", patience)


@contextmanager
def sidecar_process(
    run: str, vllm: str, folder: Path, *, environment: dict[str, str] | None = None
) -> Iterator[SidecarProcess]:
    """Run the command until the context ends.

    Args:
        run: as on the command line.
        vllm: address of the server.
        folder: for adapters.
        environment: variables beside those of this process.
    """
    port = free_port()
    log = folder.with_name(f"{folder.name}.log")
    command = [sys.executable, "-m", "populora_trainer.cli", "sidecar", run, f"--listen=127.0.0.1:{port}"]
    command += [f"--vllm={vllm}", f"--folder={folder}"]
    with open(log, "ab") as printed:
        process = subprocess.Popen(
            command, env={**os.environ, **(environment or {})}, stdout=printed, stderr=subprocess.STDOUT
        )
    try:
        sidecar = SidecarProcess(f"http://127.0.0.1:{port}", process, log)
        until(lambda: process.poll() is not None or sidecar.answers("/healthz"), lambda: "the sidecar listens")
        yield sidecar
        assert process.poll() is None, f"the sidecar has ended:\n{log.read_text()[-4000:]}"
    finally:
        process.terminate()
        process.wait(30)


def until(reached: Callable[[], object], what: Callable[[], str], patience: float = PATIENCE) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + patience
    while not reached():
        assert time.monotonic() < deadline, f"not within {patience} s: {what()}"
        time.sleep(0.02)
