"""containerd with a root, a socket and images of its own. Imported by name."""

import json
import subprocess
from pathlib import Path
from typing import Any

from archives import PAUSE_IMAGE
from control_plane import Process
from isolation import IMAGES_FOLDER
from network import PLUGINS

NAMESPACE = "k8s.io"
"""containerd's namespace for what the kubelet makes."""


class Containerd:
    """One containerd.

    Attributes:
        socket: of its API.
    """

    def __init__(self, folder: Path, plugin_configuration: Path) -> None:
        self.folder = folder
        self.socket = folder / "containerd.sock"
        configuration = folder / "containerd.toml"
        configuration.write_text(_configuration(folder, self.socket, plugin_configuration))
        self._process = Process("containerd", ["containerd", "--config", str(configuration)], folder)

    def start(self) -> None:
        """Start and return when the API answers.

        Raises:
            ControlPlaneError: it does not start.
        """
        self._process.start()
        self._process.until(lambda: self._answers("version"), "version")

    def stop(self) -> None:
        """Stop the daemon; containers that are left go with the namespaces."""
        self._process.stop()

    def load(self, archive: Path) -> None:
        """Load the images of an OCI archive."""
        self.ctr("images", "import", str(archive))

    def images(self) -> set[str]:
        """Return the names of the images."""
        return set(self.ctr("images", "list", "--quiet").split())

    def process_of(self, container: str) -> int:
        """Return the process id, as seen here, of a container's first process."""
        for line in self.ctr("tasks", "list").splitlines()[1:]:
            name, number, _ = line.split()
            if name == container:
                return int(number)
        raise KeyError(f"no container {container} runs")

    def describe(self, container: str) -> dict[str, Any]:
        """Return a container with its OCI runtime specification."""
        described: dict[str, Any] = json.loads(self.ctr("containers", "info", container))
        return described

    def ctr(self, *words: str) -> str:
        """Run containerd's own client.

        Raises:
            RuntimeError: with what it said.
        """
        done = subprocess.run(self._command(*words), capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"ctr {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _answers(self, *words: str) -> bool:
        return subprocess.run(self._command(*words), capture_output=True, timeout=30).returncode == 0

    def _command(self, *words: str) -> list[str]:
        return ["ctr", "--address", str(self.socket), "--namespace", NAMESPACE, *words]


def _configuration(folder: Path, socket: Path, plugin_configuration: Path) -> str:
    return f"""\
version = 2
root = "{folder}/{IMAGES_FOLDER}"
state = "/run/containerd"

[grpc]
address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
# Else no pod starts where the machine has given up the right to lower a process's OOM score (CAP_SYS_RESOURCE).
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{PLUGINS}"
conf_dir = "{plugin_configuration}"
"""
