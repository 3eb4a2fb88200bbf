"""Settings of the whole suite."""

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# A busy machine is no failure: no example has a deadline, and slow generation is no finding.
settings.register_profile("populora", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("populora")

SHARING_A_SERVER = ("tests/cluster/", "tests/charts/", "tests/vllm/")
"""Folders whose tests share a control plane or a vLLM server, of which each worker would start its own."""


class FolderScheduling(LoadScopeScheduling):
    """Gives the tests of such a folder to one worker, the largest folder first, and others to whoever is free.

    The marks that pytest-xdist has for this, `xdist_group`, are of no effect with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in SHARING_A_SERVER if nodeid.startswith(folder)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FolderScheduling:
    return FolderScheduling(config, log)
