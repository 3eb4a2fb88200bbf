"""Starts a real `vllm serve` on loopback, as the controller starts it in a pod without a GPU."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from environment import vllm_command

from populora_api import parse_manifest
from populora_operator.builders.context import Context
from populora_operator.builders.serving import vllm_arguments
from populora_trainer.nano.registry import builtin_folder

START_SECONDS = 900  # on a busy machine of two cores; 40 s where it is idle
MANIFEST = """
apiVersion: populora.dev/v1alpha1
kind: PopulationRun
metadata: {name: served}
spec:
  baseModel: {uri: "builtin://nano", dtype: float32}
  population: {teachers: 2, students: 2}
  adapter: {rank: 8, alpha: 16}
  training: {maxPromptTokens: 384, maxResponseTokens: 128}
  inference: {engine: VLLM, gpusPerReplica: 0, replicas: 1}
  storage: {uri: "file:///run"}
"""


def controller_arguments(manifest: str = MANIFEST) -> list[str]:
    """Return the arguments that the controller gives vLLM for a run, the embedded base at its place in the package."""
    run = parse_manifest(manifest.encode(), "run.yaml")
    model = f"--model={builtin_folder(run.spec.base_model.uri)}"
    given = vllm_arguments(Context(run, "ns", "uid"))
    return [model if one.startswith("--model=") else one for one in given if not one.startswith("--port=")]


@dataclass
class VllmServer:
    """A server that can be stopped and started again at the same address.

    Attributes:
        folder: for its caches and its log.
        arguments: of `vllm serve`, without the port.
        port: where it listens on 127.0.0.1.
        environment: variables beside those that every server of the tests has.
        process: the running one; None while it is stopped.
    """

    folder: Path
    arguments: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """The file with what it prints."""
        return self.folder / "vllm.log"

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it, without waiting until it answers."""
        assert self.process is None
        variables = {
            **os.environ,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(self.folder / "cache"),
            **self.environment,
        }
        # Of the tests' own processes. Without bytecode, each of a server's three processes compiles all of torch again.
        for name in ("OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"):
            variables.pop(name, None)
        command = [str(vllm_command()), "serve", "--host=127.0.0.1", f"--port={self.port}", *self.arguments]
        with open(self.log, "ab") as log:
            # A session of its own, so that Ctrl-C reaches the tests first, which then stop it.
            self.process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        """Wait until it is healthy."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.25)
        raise RuntimeError(f"vLLM does not serve; the end of {self.log}:\n{self.log.read_text()[-4000:]}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it and the processes of its engine, as the end of a container does."""
        if self.process is None:
            return
        group = self.process.pid
        self.process.send_signal(number)
        try:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        finally:
            # The group is the session that this server was started in, and nobody else's.
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def vllm_server(
    folder: Path,
    *,
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[VllmServer]:
    """Serve until the context ends.

    Args:
        folder: for its caches and its log.
        arguments: of `vllm serve`; by default those of the controller for MANIFEST.
        environment: variables beside the usual ones.
    """
    server = VllmServer(folder, controller_arguments() if arguments is None else arguments, free_port())
    server.environment = environment or {}
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.stop()


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
