"""One real node a session, with an S3 server, the chart, and a namespace for runs that enforces `restricted`."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Modules of these folders are imported by name (README.md beside this file).
for folder in (HERE, *(HERE.parent / name for name in ("cluster", "charts", "images", "vllm"))):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from client import Object
from figures import Figures
from installation import NAMESPACE, Installation, install, prepare_namespace
from isolation import isolated_folder
from node import Node, running_node
from object_storage import ObjectStorage, object_storage
from vllm_pods import offer_vllm


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave these tests out unless they run isolated; who names them is told how."""
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    if isolated_folder() is not None:
        for item in ours:
            # A run on a busy machine takes its time; what waits for it has a patience of its own.
            item.add_marker(pytest.mark.timeout(3600))
        return
    if ours and any(HERE.name in str(argument) for argument in config.args):
        raise pytest.UsageError("tests/e2e runs in namespaces of its own: say `make e2e` (as root)")
    config.hook.pytest_deselected(items=ours)
    items[:] = [item for item in items if item not in ours]


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """The node; where a test has failed, its files stay."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            print(f"\n{line}", file=sys.stderr, flush=True)

    with running_node(say) as node:
        yield node
        if request.session.testsfailed:
            (node.folder / "kept").touch()


@pytest.fixture(scope="session")
def storage(node: Node) -> Iterator[ObjectStorage]:
    """The S3 server."""
    with object_storage(node) as storage:
        yield storage


@pytest.fixture(scope="session")
def installation(node: Node) -> Installation:
    """The chart, with its controller running from its image."""
    return install(node)


@pytest.fixture(scope="session")
def namespace(node: Node, storage: ObjectStorage, installation: Installation) -> str:
    """The namespace of all runs."""
    prepare_namespace(node)
    return NAMESPACE


@pytest.fixture(scope="session")
def inference(node: Node, namespace: str) -> Object:
    """What a run says to be sampled by vLLM."""
    return offer_vllm(node)


_FIGURES = pytest.StashKey[Figures]()


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Figures:
    """What was measured on the way; it is told at the end."""
    return pytestconfig.stash.setdefault(_FIGURES, Figures())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Tell what was measured, and where the logs of a session with failures are."""
    for line in config.stash.get(_FIGURES, Figures()).lines():
        terminalreporter.write_line(line)
    folder = isolated_folder()
    if exitstatus and folder is not None and (folder / "kept").exists():
        terminalreporter.write_line(f"Logs of the node and of its pods are kept in {folder} until the next run")
