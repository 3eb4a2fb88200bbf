"""The controller started with exactly the rendered arguments, environment and ServiceAccount permissions."""

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from chart import Helm, Object
from client import Api, ApiError, eventually
from control_plane import ControlPlane
from kubelet import Kubelet
from population_run import Run, read_manifest
from release import Released

pytestmark = pytest.mark.slow


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
