"""Settings of the whole suite."""

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# A busy machine is no failure: no example has a deadline, and slow generation is no finding.
settings.register_profile("populora", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("populora")

SHARING_A_SERVER = ("tests/cluster/", "tests/charts/", "tests/vllm/")
"""Folders whose tests share a control plane or a vLLM server, of which each worker would start its own."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest where several workers share the tests, so that they end at about the same time."""
    if not hasattr(config, "workerinput"):
        return
    slow = {_file_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (_folder_of(item.nodeid) is None, _file_of(item.nodeid) not in slow))


class FolderScheduling(LoadScopeScheduling):
    """Gives the tests of such a folder to one worker, and those of any other file to whoever is free.

    Tests of a file share its fixtures. The marks that pytest-xdist has for this, `xdist_group`, are of no effect with
    pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _folder_of(nodeid) or _file_of(nodeid)


def _folder_of(nodeid: str) -> str | None:
    return next((folder for folder in SHARING_A_SERVER if nodeid.startswith(folder)), None)


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FolderScheduling:
    config.option.loadscopereorder = False  # a file with many tests is not the one that takes longest
    return FolderScheduling(config, log)
