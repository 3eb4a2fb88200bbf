"""The controller started with exactly the rendered arguments, environment and ServiceAccount permissions."""

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from chart import CHART, Helm, Manifests, Object
from client import Api, ApiError, eventually
from control_plane import ControlPlane
from kubelet import Kubelet
from runs import Run, read_manifest

pytestmark = pytest.mark.slow


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
        spec = self.api.get("Deployment", "populora", self.namespace)["spec"]["template"]["spec"]
        token = self.api.token(spec["serviceAccountName"], self.namespace)
        kubeconfig = self.plane.write_kubeconfig(self.folder / "kubeconfig", token)
        container = self.container
        environment = {item["name"]: item["value"] for item in container["env"]}
        environment |= {"PATH": os.environ["PATH"], "POPULORA_CONTROLLER_KUBECONFIG": str(kubeconfig)}
        (program,) = container["command"]
        command = [Path(sys.executable).parent / program, *container["args"]]
        with open(self.folder / "controller.log", "wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    eventually(lambda probe=probe: self.answers(probe), f"the {probe} succeeds", otherwise=self.log)
                yield
                assert process.poll() is None, self.log()
            finally:
                process.terminate()
                process.wait(30)

    def log(self) -> str:
        return (self.folder / "controller.log").read_text(errors="replace")[-4000:]


def denied(plane: ControlPlane, since: int, account: str) -> list[str]:
    """Return what the API server forbade to a ServiceAccount since a position in the audit log."""
    events, _ = plane.audit(since)
    return [
        f"{event['verb']} {event['requestURI']}"
        for event in events
        if event["user"]["username"] == account and event.get("responseStatus", {}).get("code") == 403
    ]


@pytest.mark.parametrize("some_namespaces", [False, True], ids=["all-namespaces", "one-namespace"])
def test_it_takes_a_run_to_its_end_with_what_the_chart_gives_it(
    cluster_helm: Helm,
    api: Api,
    plane: ControlPlane,
    namespaces: list[str],
    kubelet: Kubelet,
    tmp_path: Path,
    some_namespaces: bool,
) -> None:
    home, team, other = namespaces
    _, since = plane.audit()
    values: Object = {"controller": {"namespaces": [team]}} if some_namespaces else {}
    released = Released(cluster_helm, api, plane, home, values, tmp_path)
    manifest = read_manifest("nano-4x4")
    eventually(lambda: api.list("PopulationRun", None) is not None, "PopulationRuns are served", ignore=ApiError)
    with released.running():
        run = Run.create(api, team, manifest, training={"steps": 5})
        elsewhere = Run.create(api, other, manifest, training={"steps": 5})
        run.until("Completed")
        if some_namespaces:
            assert elsewhere.live().get("status") is None
            assert api.children(elsewhere.live()) == {}
        else:
            elsewhere.until("Completed")

        lease = api.get("Lease", "populora-controller", home)
        assert lease["spec"]["holderIdentity"]
        with urllib.request.urlopen(released.url("metrics", "/metrics"), timeout=5) as answer:
            text = answer.read().decode()
        assert "populora_controller_leader 1.0" in text
        assert f'populora_controller_run_step{{namespace="{team}",run="nano-4x4"}} 5.0' in text

        run.delete()
        run.until_gone()
    assert denied(plane, since, f"system:serviceaccount:{home}:populora") == []


def test_the_test_pods_program_tells_a_controller_from_none(
    cluster_helm: Helm, api: Api, plane: ControlPlane, namespaces: list[str], kubelet: Kubelet, tmp_path: Path
) -> None:
    released = Released(cluster_helm, api, plane, namespaces[0], {}, tmp_path)
    (container,) = released.test_pod["spec"]["containers"]
    flag, program, _ = [container["command"][1], *container["args"]]
    address = released.url("metrics", "/metrics")

    def ask(url: str, program: str = program) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, flag, program, url], capture_output=True, text=True, timeout=120)

    with released.running():
        good = ask(address)
        assert (good.returncode, good.stdout) == (0, "the controller answers\n"), good.stderr
        wrong = ask(released.url("health", "/healthz"))
        assert wrong.returncode == 1
        assert "it is not the controller that answers" in wrong.stderr
    gone = ask(address, program.replace("monotonic() + 60", "monotonic() + 1"))
    assert gone.returncode == 1
    assert f"no controller answers at {address}" in gone.stderr
