"""One vLLM server a session for all tests that can share it."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Helpers that are no tests stand beside them, and the S3 server with the tests of the storage.
for folder in (HERE, HERE.parent / "trainer" / "storage"):
    sys.path.insert(0, str(folder))

from adapters import ask, served  # noqa: E402
from environment import InstallError, vllm_command  # noqa: E402
from server import VllmServer, vllm_server  # noqa: E402

_missing: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these tests, as all need vLLM itself, and give them the time that its start takes on a busy machine."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.faults)
            item.add_marker(pytest.mark.timeout(1200))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Install vLLM before the first test, outside any test's time limit and where progress is seen."""
    if session.config.option.collectonly or not any(item.path.is_relative_to(HERE) for item in session.items):
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        try:
            vllm_command()
        except InstallError as error:
            _missing.append(str(error))


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    if _missing:
        pytest.fail(_missing[0], pytrace=False)
    with vllm_server(tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture
def vllm(_shared: VllmServer) -> VllmServer:
    """A healthy server of builtin://nano in float32, for 4 members of rank 8, without adapters; a test may stop it."""
    if not _shared.running:
        _shared.stop()
        _shared.start()
    _shared.wait()
    for name in served(_shared.url):
        ask(f"{_shared.url}/v1/unload_lora_adapter", {"lora_name": name})
    return _shared
