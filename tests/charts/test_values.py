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


BAD: list[tuple[str, Any, str, str]] = [
    ("replica", 2, "", "additional properties 'replica' not allowed"),
    ("replicas", "two", "/replicas", "got string, want integer"),
    ("replicas", -1, "/replicas", "minimum: got -1, want 0"),
    ("image.registry", "example", "/image", "additional properties 'registry' not allowed"),
    ("image.digest", "sha256:abc", "/image/digest", "does not match pattern"),
    ("image.pullPolicy", "Sometimes", "/image/pullPolicy", "one of 'Always', 'IfNotPresent', 'Never'"),
    ("controller.worker", 8, "/controller", "additional properties 'worker' not allowed"),
    ("controller.workers", 0, "/controller/workers", "minimum: got 0, want 1"),
    ("controller.workers", 2.5, "/controller/workers", "got number, want integer"),
    ("controller.logFormat", "xml", "/controller/logFormat", "one of 'json', 'text'"),
    ("controller.logLevel", "INFO", "/controller/logLevel", "one of 'debug', 'info', 'warning', 'error'"),
    ("controller.namespaces", "team-a", "/controller/namespaces", "got string, want array"),
    ("controller.namespaces", ["Team_A"], "/controller/namespaces/0", "does not match pattern"),
    ("controller.namespaces", ["a", "a"], "/controller/namespaces", "items at 0 and 1 are equal"),
    ("controller.metricsPort", 80, "/controller/metricsPort", "minimum: got 80, want 1,024"),
    ("controller.extraEnv", {"A B": "x"}, "/controller/extraEnv", "additional properties 'A B' not allowed"),
    ("controller.extraEnv", {"A": 1}, "/controller/extraEnv/A", "got number, want string"),
    ("workloads.trainerImage", "populora/trainer 1", "/workloads/trainerImage", "does not match pattern"),
    ("crds.install", "yes", "/crds/install", "got string, want boolean"),
    ("securityContext.runAsUser", 0, "/securityContext/runAsUser", "minimum: got 0, want 1"),
    ("resources.limits.memory", "lots", "/resources/limits/memory", "does not match pattern"),
    ("resources.claims", [], "/resources", "additional properties 'claims' not allowed"),
    ("tolerations", [{"keys": "gpu"}], "/tolerations/0", "additional properties 'keys' not allowed"),
    ("networkPolicy.apiServerCIDRs", ["10.0.0.1"], "/networkPolicy/apiServerCIDRs/0", "does not match pattern"),
    ("networkPolicy.metricsFrom", [{"pods": {}}], "/networkPolicy/metricsFrom/0", "'pods' not allowed"),
    ("podDisruptionBudget.maxUnavailable", 0, "/podDisruptionBudget/maxUnavailable", "minimum: got 0, want 1"),
    ("topologySpread.whenUnsatisfiable", "Never", "/topologySpread/whenUnsatisfiable", "one of 'ScheduleAnyway'"),
    ("monitoring.serviceMonitor.enable", True, "/monitoring/serviceMonitor", "'enable' not allowed"),
    ("monitoring.podMonitor.interval", 30, "/monitoring/podMonitor/interval", "got number, want string"),
    ("monitoring.prometheusRule.disabled", ["No"], "/monitoring/prometheusRule/disabled/0", "must be one of 'Populora"),
    ("monitoring.prometheusRule.stalledAfter", "2 h", "/monitoring/prometheusRule/stalledAfter", "pattern"),
]
"""Value and path, the place that the message names, and what it says there."""


@pytest.mark.parametrize(("path", "value", "place", "says"), BAD, ids=[f"{bad[0]}={bad[1]}" for bad in BAD])
def test_a_wrong_value_is_refused_with_its_place_and_what_is_allowed(
    helm: Helm, path: str, value: Any, place: str, says: str
) -> None:
    with pytest.raises(HelmError) as refusal:
        helm.render(setting(path, value))
    (line,) = str(refusal.value).splitlines()[2:]
    assert line.startswith(f"- at '{place}': ")
    assert says in line


def test_helm_lint_finds_nothing(helm: Helm) -> None:
    assert "[ERROR]" not in (said := helm("lint", "--strict", str(CHART))), said
    assert "[WARNING]" not in said


def test_the_versions_are_those_of_the_package() -> None:
    from importlib.metadata import version

    import yaml

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version("populora-operator")
