"""One control plane a session, a namespace of its own for each test."""

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Helpers that are no tests stand beside them, and the table of wrong manifests with the tests of the API.
sys.path.insert(0, str(Path(__file__).parents[1] / "api"))
sys.path.insert(0, str(Path(__file__).parent))

from build import CONTROL_PLANE, BuildError, binaries
from client import Api, ApiError, Object
from control_plane import ControlPlane, control_plane
from kubelet import Kubelet

HERE = Path(__file__).parent
Kubectl = Callable[..., subprocess.CompletedProcess[str]]

_unbuilt: list[str] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what is missing before the first test, outside any test's time limit and where progress is seen."""
    if session.config.option.collectonly or not any(item.path.is_relative_to(HERE) for item in session.items):
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        try:
            binaries(CONTROL_PLANE)
        except BuildError as error:
            _unbuilt.append(str(error))


@pytest.fixture(scope="session")
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """The control plane, with the definition of PopulationRun installed."""
    if _unbuilt:
        pytest.fail(_unbuilt[0], pytrace=False)
    kept: list[str] = []
    with control_plane(keep=lambda: request.session.testsfailed > 0, say=kept.append) as plane:
        Api(plane.url, plane.token, plane.ca).install_definition()
        yield plane
    request.config.stash.setdefault(_KEPT, []).extend(kept)


_KEPT = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say where the logs of a session with failures are."""
    for line in config.stash.get(_KEPT, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def api(plane: ControlPlane) -> Api:
    """A client with every right."""
    return Api(plane.url, plane.token, plane.ca)


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    """A fresh namespace, deleted at the end with the runs in it, whatever finalizers they hold."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    for run in api.list("PopulationRun", name):
        if run["metadata"].get("finalizers"):
            with contextlib.suppress(ApiError):
                api.patch("PopulationRun", run["metadata"]["name"], {"metadata": {"finalizers": None}}, name)
    api.delete("Namespace", name)


@pytest.fixture
def kubectl(plane: ControlPlane, namespace: str) -> Kubectl:
    """Run kubectl in the test's namespace; a failure raises unless `check=False`."""

    def run(
        *words: str, stdin: str | None = None, check: bool = True, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [str(plane.paths["kubectl"]), f"--kubeconfig={plane.kubeconfig}", f"--namespace={namespace}", *words]
        variables = {**os.environ, **(environment or {})}
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, env=variables)
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(words)} ended with {done.returncode}: {done.stderr}{done.stdout}")
        return done

    return run


@pytest.fixture
def kubelet(api: Api, namespace: str) -> Iterator[Kubelet]:
    """A node whose pods of this test's namespace are played."""
    with Kubelet(api, namespace) as kubelet:
        yield kubelet
    assert kubelet.errors == []


@pytest.fixture
def manifest() -> Object:
    """The least that a run says: everything else is a default."""
    return {
        "apiVersion": "populora.dev/v1alpha1",
        "kind": "PopulationRun",
        "metadata": {"name": "minimal"},
        "spec": {"baseModel": {"uri": "builtin://nano"}, "storage": {"uri": "file:///data/minimal"}},
    }
