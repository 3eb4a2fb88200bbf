"""A Kubernetes cluster of one real node, whose kubelet runs real pods, in namespaces of its own. Needs root.

python tests/e2e/node.py     bring one up, say how to use it, stop it on Ctrl-C
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

for _folder in (Path(__file__).parent, Path(__file__).parents[1] / "cluster"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from agents import NODE, coredns, kube_proxy, kubelet
from archives import write_busybox_archive
from build import CONTROL_PLANE, BuildError, Say, binaries, say_on_stderr
from client import Api, condition, eventually
from control_plane import ControlPlane, ControlPlaneError
from isolation import CGROUPS, isolated_folder, run_isolated
from network import ADDRESS, make_bridge, write_plugin_configuration
from preflight import missing
from runtime import Containerd

BINARIES = (*CONTROL_PLANE, "kubelet", "kube-proxy", "coredns")
"""What is built before the node's namespaces are entered, as they have no way out."""

# The kubelet sets these, which are the whole machine's.
_KERNEL_SETTINGS = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")


class Node:
    """A running cluster.

    Attributes:
        folder: of all files.
        plane: its control plane.
        api: a client with every right.
        containerd: its container runtime.
    """

    def __init__(self, folder: Path, plane: ControlPlane, containerd: Containerd) -> None:
        self.folder, self.plane, self.containerd = folder, plane, containerd
        self.api = Api(plane.url, plane.token, plane.ca)

    def kubectl(self, *words: str, stdin: str | None = None, timeout: float = 120) -> str:
        """Run kubectl as administrator and return what it printed.

        Raises:
            AssertionError: it failed.
        """
        command = [str(self.plane.paths["kubectl"]), f"--kubeconfig={self.plane.kubeconfig}", *words]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise AssertionError(f"kubectl {' '.join(words)} ended with {done.returncode}: {done.stderr}{done.stdout}")
        return done.stdout


@contextlib.contextmanager
def running_node(say: Say = say_on_stderr) -> Iterator[Node]:
    """Bring the cluster up in the isolated folder, and take it down at the end.

    Raises:
        ControlPlaneError: a part of it does not start.
        RuntimeError: this process is not isolated.
    """
    folder = isolated_folder()
    if folder is None:
        raise RuntimeError("the node lives in namespaces of its own: enter them by isolation.py")
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_kernel_settings_restored())
        make_bridge()
        plane = ControlPlane(folder, say, address=ADDRESS)
        plane.start()
        stack.callback(plane.stop)
        containerd = Containerd(folder, write_plugin_configuration(folder / "plugins"))
        containerd.start()
        stack.callback(containerd.stop)
        write_busybox_archive(folder / "busybox.tar")
        containerd.load(folder / "busybox.tar")
        _make_cgroup(folder.name)
        node = Node(folder, plane, containerd)
        for process in (
            coredns(folder, plane.kubeconfig),
            kube_proxy(folder, plane.kubeconfig),
            kubelet(folder, plane.kubeconfig, containerd.socket),
        ):
            process.start()
            stack.callback(process.stop)
        process.until(lambda: _ready(node.api), "the node is Ready")
        say(f"The node is ready after {time.monotonic() - started:.0f} s")
        stack.callback(_delete_pods, node.api)
        yield node


def _ready(api: Api) -> bool:
    return condition(api.find("Node", NODE), "Ready")


def _delete_pods(api: Api) -> None:
    """Delete every pod without grace while the kubelet can still unmount what they hold."""
    for kind in ("PopulationRun", "Deployment", "Job"):
        with contextlib.suppress(Exception):
            for item in api.list(kind, None):
                place = item["metadata"]["namespace"]
                if item["metadata"].get("finalizers"):
                    api.patch(kind, item["metadata"]["name"], {"metadata": {"finalizers": None}}, place)
                api.delete(kind, item["metadata"]["name"], place)
    with contextlib.suppress(AssertionError):
        eventually(lambda: not _pods_after_deleting(api), "every pod is gone", seconds=30, every=0.5)


def _pods_after_deleting(api: Api) -> list[str]:
    pods = [pod["metadata"] for pod in api.list("Pod", None)]
    for pod in pods:
        api.delete("Pod", pod["name"], pod["namespace"], grace=0)
    return [pod["name"] for pod in pods]


def _make_cgroup(name: str) -> None:
    """Make the control group above all pods, in every hierarchy that there is."""
    unified = (CGROUPS / "cgroup.controllers").exists()
    for top in {top.resolve() for top in ([CGROUPS] if unified else CGROUPS.iterdir()) if top.is_dir()}:
        group = top / name
        group.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            # Of cgroup v1: a new group has neither processors nor memory until it is told.
            if (group / setting).exists() and not (group / setting).read_text().strip():
                (group / setting).write_text((top / setting).read_text())
        if (group / "cpu.shares").exists():
            # Else all pods together would get as much of a busy machine as one process that is in no group.
            (group / "cpu.shares").write_text("8192")


@contextlib.contextmanager
def _kernel_settings_restored() -> Iterator[None]:
    paths = [Path("/proc/sys", name) for name in _KERNEL_SETTINGS]
    before = {path: path.read_text() for path in paths}
    try:
        yield
    finally:
        for path, value in before.items():
            path.write_text(value)


def _write_entrance(node: Node) -> Path:
    """Write a command that enters the namespaces from outside, for a shell or one command, and return its path."""
    path = node.folder / "enter"
    path.write_text(
        f"""#!/bin/sh
# Runs a shell, or the command that is given, inside the node's namespaces, where kubectl finds the cluster.
for process in $(pgrep -f "{node.folder}/containerd.toml"); do
    exec nsenter --target "$process" --net --mount --pid \\
        env KUBECONFIG={node.plane.kubeconfig} PATH="{node.plane.paths["kubectl"].parent}:$PATH" "${{@:-bash}}"
done
echo "The node of {node.folder} does not run." >&2
exit 1
"""
    )
    path.chmod(0o755)
    return path


def main() -> None:
    """Bring a node up and wait for Ctrl-C or SIGTERM."""
    if isolated_folder() is None:
        try:
            if problems := missing():
                sys.exit("\n".join(problems))
            binaries(BINARIES)
        except BuildError as error:
            sys.exit(str(error))
        sys.exit(run_isolated([sys.executable, __file__]))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        with running_node() as node:
            entrance = _write_entrance(node)
            print(node.plane.kubeconfig, flush=True)
            say_on_stderr(f"`{entrance} kubectl get pods -A` runs a command inside; Ctrl-C stops")
            stop.wait()
    except ControlPlaneError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
