"""A release whose controller runs as a process of the test. Imported by name."""

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from chart import CHART, Helm, Manifests, Object
from client import Api, eventually
from control_plane import ControlPlane


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Released:
    """A release whose controller's container runs as a process here."""

    def __init__(self, helm: Helm, api: Api, plane: ControlPlane, namespace: str, values: Object, folder: Path) -> None:
        self.api, self.plane, self.namespace, self.folder = api, plane, namespace, folder
        ports = {"metricsPort": free_port(), "healthPort": free_port()}
        self.values: Object = {**values, "controller": {**values.get("controller", {}), **ports}}
        helm(
            *("install", "populora", str(CHART), "--namespace", namespace, "--wait", "--timeout", "3m"),
            values=self.values,
        )
        rendered = helm("get", "manifest", "populora", "--namespace", namespace)
        self.manifests = Manifests([document for document in yaml.safe_load_all(rendered) if document])
        hooks = helm("get", "hooks", "populora", "--namespace", namespace)
        (self.test_pod,) = [document for document in yaml.safe_load_all(hooks) if document]

    @property
    def container(self) -> Object:
        """The container as the API server has it."""
        deployment = self.api.get("Deployment", "populora", self.namespace)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        return dict(container)

    def url(self, port: str, path: str) -> str:
        numbers = {item["name"]: item["containerPort"] for item in self.container["ports"]}
        return f"http://127.0.0.1:{numbers[port]}{path}"

    def answers(self, probe: str) -> bool:
        """Ask as a kubelet does for one of the container's probes."""
        ask = self.container[probe]["httpGet"]
        try:
            with urllib.request.urlopen(self.url(ask["port"], ask["path"]), timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the container's process as its ServiceAccount; only the way to the API server is added."""
        with controller_process(self.api, self.plane, self.namespace, self.folder, own_ports=True) as process:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                eventually(lambda probe=probe: self.answers(probe), f"the {probe} succeeds", otherwise=self.log)
            yield
            assert process.poll() is None, self.log()

    def log(self) -> str:
        return (self.folder / "controller.log").read_text(errors="replace")[-4000:]


@contextmanager
def controller_process(
    api: Api, plane: ControlPlane, namespace: str, folder: Path, *, own_ports: bool = False
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run what the Deployment's container runs, with its arguments, environment and ServiceAccount.

    Args:
        api: the administrator's client.
        plane: the cluster; the way to it is all that is added to the environment.
        namespace: of the release.
        folder: for kubeconfig and log.
        own_ports: the rendered ports are free on this machine; else others take their place.
    """
    spec = api.get("Deployment", "populora", namespace)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    kubeconfig = plane.write_kubeconfig(folder / "kubeconfig", api.token(spec["serviceAccountName"], namespace))
    environment = {item["name"]: item["value"] for item in container["env"]}
    environment |= {"PATH": os.environ["PATH"], "POPULORA_CONTROLLER_KUBECONFIG": str(kubeconfig)}
    (program,) = container["command"]
    command = [str(Path(sys.executable).parent / program), *container["args"]]
    if not own_ports:
        command += ["--metrics-port=0", "--health-port=0"]
    with open(folder / "controller.log", "ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)
