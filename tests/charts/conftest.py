"""The chart as Helm renders it, and a control plane to install it on."""

import contextlib
import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
# Modules of this folder and of the test control plane are imported by name (tests/cluster/README.md).
for folder in (HERE, HERE.parent / "cluster"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from build import CONTROL_PLANE, BuildError, binaries, binary  # noqa: E402
from chart import CHART, Helm, Manifests, Object  # noqa: E402
from client import Api, ApiError  # noqa: E402
from control_plane import ControlPlane, control_plane  # noqa: E402
from kubelet import Kubelet  # noqa: E402

_unbuilt: list[str] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what is missing before the first test, outside any test's time limit and where progress is seen."""
    ours = [item for item in session.items if item.path.is_relative_to(HERE)]
    if session.config.option.collectonly or not ours:
        return
    needs_plane = any("plane" in getattr(item, "fixturenames", ()) for item in ours)
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        try:
            binaries(("helm", *CONTROL_PLANE) if needs_plane else ("helm",))
        except BuildError as error:
            _unbuilt.append(str(error))


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm without a cluster."""
    if _unbuilt:
        pytest.fail(_unbuilt[0], pytrace=False)
    return Helm(binary("helm"), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def chart_values() -> Object:
    """Return what values.yaml says."""
    loaded: Object = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


@pytest.fixture(scope="session")
def schema() -> Object:
    """Return what values.schema.json says."""
    loaded: Object = json.loads((CHART / "values.schema.json").read_text())
    return loaded


@pytest.fixture(scope="session")
def defaults(helm: Helm) -> Manifests:
    """Return what is rendered without any value."""
    return helm.render()


@pytest.fixture(scope="session")
def plane(helm: Helm, request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """A control plane without the definition of PopulationRun: the chart installs it."""
    with control_plane(keep=lambda: request.session.testsfailed > 0) as plane:
        yield plane


@pytest.fixture(scope="session")
def api(plane: ControlPlane) -> Api:
    """A client with every right."""
    return Api(plane.url, plane.token, plane.ca)


@pytest.fixture(scope="session")
def cluster_helm(helm: Helm, plane: ControlPlane) -> Helm:
    """Helm as the control plane's administrator."""
    return Helm(helm.binary, helm.home, plane.kubeconfig)


@pytest.fixture
def kubelet(api: Api) -> Iterator[Kubelet]:
    """A node whose pods are played: every one starts and is ready, those of `helm test` succeed."""
    with Kubelet(api) as kubelet:
        kubelet.on_start("test", kubelet.succeed)
        yield kubelet
    assert kubelet.errors == []


@pytest.fixture
def namespaces(api: Api, cluster_helm: Helm) -> Iterator[list[str]]:
    """Three fresh namespaces that enforce Pod Security `restricted`; at the end all that Helm installed goes."""
    names = [f"c-{uuid.uuid4().hex[:8]}" for _ in range(3)]
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
    for name in names:
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    yield names
    for release in json.loads(cluster_helm("list", "--all-namespaces", "--output", "json")):
        cluster_helm("uninstall", release["name"], "--namespace", release["namespace"])
    with contextlib.suppress(ApiError):
        for run in api.list("PopulationRun", None):
            place = run["metadata"]["namespace"]
            api.patch("PopulationRun", run["metadata"]["name"], {"metadata": {"finalizers": None}}, place)
    api.delete("CustomResourceDefinition", "populationruns.populora.dev")
    for name in names:
        api.delete("Namespace", name)
