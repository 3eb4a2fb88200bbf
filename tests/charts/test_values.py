"""What values.yaml and values.schema.json say, and what they refuse."""

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from chart import CHART, Helm, HelmError, Object, leaves, setting


def nodes(schema: Any, path: str = "values") -> Iterator[tuple[str, Any]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from nodes(schema[name], f"{path}.{name}")


FREE = {
    "values.global",
    "values.affinity.nodeAffinity",
    "values.affinity.podAffinity",
    "values.affinity.podAntiAffinity",
    "values.networkPolicy.metricsFrom.items.namespaceSelector.matchExpressions.items",
    "values.networkPolicy.metricsFrom.items.podSelector.matchExpressions.items",
}
"""Objects whose fields are the API server's to check."""


def test_the_schema_closes_every_object(schema: Object) -> None:
    jsonschema.Draft7Validator.check_schema(schema)
    open_objects = {
        path for path, node in nodes(schema) if node.get("type") == "object" and "additionalProperties" not in node
    }
    assert open_objects == FREE


def test_every_value_is_described_in_both_files(schema: Object, chart_values: Object) -> None:
    undescribed = [
        path
        for path, node in nodes(schema)
        if not node.get("description") and not path.endswith("additionalProperties")
    ]
    assert not undescribed
    text = (CHART / "values.yaml").read_text().splitlines()
    for path, _ in leaves(chart_values, schema):
        name = path.split(".")[-1]
        places = [number for number, line in enumerate(text) if re.match(rf" *{name}:", line)]
        assert places, path
        assert any(text[number - 1].lstrip().startswith("#") for number in places), f"{path} has no comment above it"


def test_the_schema_knows_exactly_the_values_that_there_are(schema: Object, chart_values: Object) -> None:
    def known(node: Object, values: Object, path: str = "") -> Iterator[str]:
        for name, child in node["properties"].items():
            if name not in values:
                yield path + name
            elif isinstance(values[name], dict) and values[name] and child.get("properties"):
                yield from known(child, values[name], f"{path}{name}.")

    assert set(known(schema, chart_values)) == {"global"}
    jsonschema.validate(chart_values, schema)


BAD: list[tuple[str, Any, str]] = [
    ("replica", 2, "'replica' not allowed"),
    ("controller.worker", 8, "'worker' not allowed"),
    ("image.registry", "example", "'registry' not allowed"),
    ("monitoring.serviceMonitor.enable", True, "'enable' not allowed"),
    ("replicas", "two", "got string, want integer"),
    ("replicas", -1, "minimum"),
    ("controller.workers", 0, "minimum"),
    ("controller.workers", 2.5, "want integer"),
    ("controller.logFormat", "xml", "'json', 'text'"),
    ("controller.logLevel", "INFO", "'debug', 'info', 'warning', 'error'"),
    ("controller.namespaces", "team-a", "got string, want array"),
    ("controller.namespaces", ["Team_A"], "pattern"),
    ("controller.namespaces", ["a", "a"], "items at 0 and 1 are equal"),
    ("controller.metricsPort", 80, "minimum"),
    ("controller.extraEnv", {"A B": "x"}, "A B"),
    ("controller.extraEnv", {"A": 1}, "want string"),
    ("image.digest", "sha256:abc", "pattern"),
    ("image.pullPolicy", "Sometimes", "'Always', 'IfNotPresent', 'Never'"),
    ("workloads.trainerImage", "populora/trainer 1", "pattern"),
    ("securityContext.runAsUser", 0, "minimum"),
    ("resources.limits.memory", "lots", "pattern"),
    ("resources.claims", [], "'claims' not allowed"),
    ("tolerations", [{"keys": "gpu"}], "'keys' not allowed"),
    ("networkPolicy.apiServerCIDRs", ["10.0.0.1"], "pattern"),
    ("networkPolicy.metricsFrom", [{"pods": {}}], "'pods' not allowed"),
    ("podDisruptionBudget.maxUnavailable", 0, "minimum"),
    ("topologySpread.whenUnsatisfiable", "Never", "'ScheduleAnyway', 'DoNotSchedule'"),
    ("monitoring.prometheusRule.disabled", ["NoSuchAlert"], "one of"),
    ("monitoring.prometheusRule.stalledAfter", "two hours", "pattern"),
    ("monitoring.podMonitor.interval", 30, "want string"),
]


@pytest.mark.parametrize(("path", "value", "says"), BAD, ids=[f"{path}={value}" for path, value, _ in BAD])
def test_a_wrong_value_is_refused_with_its_place_and_what_is_allowed(
    helm: Helm, path: str, value: Any, says: str
) -> None:
    with pytest.raises(HelmError) as refusal:
        helm.render(setting(path, value))
    message = str(refusal.value)
    assert says in message
    parent = path.rpartition(".")[0]
    assert (
        f"/{(path if 'not allowed' not in says or isinstance(value, list) else parent).replace('.', '/')}".rstrip("/")
        in message
    )


def test_helm_lint_finds_nothing(helm: Helm) -> None:
    assert "[ERROR]" not in (said := helm("lint", "--strict", str(CHART))), said
    assert "[WARNING]" not in said


def test_the_versions_are_those_of_the_package() -> None:
    from importlib.metadata import version

    import yaml

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version("populora-operator")
