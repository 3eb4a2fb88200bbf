"""The images, built before the first test; all tests stay in one worker, as buildah's storage is one."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))

from images import TARGETS, ImageArchive, ImageError, MountedImage, build, missing, mounted  # noqa: E402

_built: dict[str, ImageArchive] = {}
_unbuilt: list[str] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what is missing before the first test, outside any test's time limit and where progress is seen."""
    if session.config.option.collectonly or not any(item.path.is_relative_to(HERE) for item in session.items):
        return
    if problems := missing():
        pytest.exit("\n".join(problems), returncode=pytest.ExitCode.USAGE_ERROR)
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        try:
            _built.update({target: build(target) for target in TARGETS})
        except ImageError as error:
            _unbuilt.append(str(error))


@pytest.fixture(scope="session")
def archives() -> dict[str, ImageArchive]:
    """The archives of all images by target."""
    if _unbuilt:
        pytest.fail(_unbuilt[0], pytrace=False)
    return _built


@pytest.fixture(scope="session")
def images(archives: dict[str, ImageArchive]) -> Iterator[dict[str, MountedImage]]:
    """All images by target, ready to run programs in."""
    with contextlib.ExitStack() as stack:
        yield {target: stack.enter_context(mounted(archive)) for target, archive in archives.items()}


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest) -> str:
    """Each target in turn."""
    name: str = request.param
    return name


@pytest.fixture
def image(images: dict[str, MountedImage], target: str) -> MountedImage:
    """The image of each target in turn."""
    return images[target]
