"""The chart as Helm renders it."""

import json
import sys
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
# Modules of this folder and of the test control plane are imported by name (tests/cluster/README.md).
for folder in (HERE, HERE.parent / "cluster"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from build import binary  # noqa: E402
from chart import CHART, Helm, Manifests, Object  # noqa: E402


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(binary("helm"), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def chart_values() -> Object:
    loaded: Object = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


@pytest.fixture(scope="session")
def schema() -> Object:
    loaded: Object = json.loads((CHART / "values.schema.json").read_text())
    return loaded


@pytest.fixture(scope="session")
def defaults(helm: Helm) -> Manifests:
    """What is rendered without any value."""
    return helm.render()
