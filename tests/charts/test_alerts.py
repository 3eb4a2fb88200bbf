"""The alerts and dashboards speak of metrics that exist, and the alerts fire when they should and only then."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from build import binary
from chart import CHART, ROOT, Helm, Object

from populora_operator.metrics import FAMILIES as CONTROLLER
from populora_trainer.diagnostics.prometheus import FAMILIES as TRAINER

HERE = Path(__file__).parent
NAME = re.compile(r"\b(populora_[a-z0-9_]+)\b")


@pytest.fixture(scope="module")
def promtool() -> str:
    """Prometheus' own checker."""
    return shutil.which("promtool") or str(binary("promtool"))


def rules(helm: Helm, values: Object | None = None) -> Object:
    """Return the spec of the PrometheusRule, which is what Prometheus calls a rule file."""
    enabled: Object = {"enabled": True, **(values or {})}
    spec: Object = helm.render({"monitoring": {"prometheusRule": enabled}}).one("PrometheusRule")["spec"]
    return spec


def alerts(spec: Object) -> dict[str, Object]:
    return {rule["alert"]: rule for group in spec["groups"] for rule in group["rules"]}


@pytest.fixture(scope="module")
def spec(helm: Helm) -> Object:
    return rules(helm)


def exposed() -> set[str]:
    """Return the names under which trainer and controller show their metrics."""
    names = set()
    for family in (*TRAINER.values(), *CONTROLLER.values()):
        endings = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}[family.kind]
        names |= {family.name + ending for ending in endings}
    return names


def test_expressions_use_metrics_that_exist(spec: Object) -> None:
    for name, rule in alerts(spec).items():
        used = set(NAME.findall(rule["expr"]))
        assert used, name
        assert used <= exposed(), name


def test_dashboards_use_metrics_that_exist() -> None:
    for path in sorted((CHART / "dashboards").glob("*.json")):
        expressions = [
            target["expr"] for panel in _panels(json.loads(path.read_text())) for target in panel.get("targets", [])
        ]
        assert expressions, path.name
        for expression in expressions:
            used = set(NAME.findall(expression))
            assert used, expression
            assert used <= exposed(), expression


def test_prometheus_takes_the_expressions_of_dashboards(promtool: str, tmp_path: Path) -> None:
    for path in sorted((CHART / "dashboards").glob("*.json")):
        targets = [target for panel in _panels(json.loads(path.read_text())) for target in panel.get("targets", [])]
        recorded = [{"record": f"panel:{index}", "expr": target["expr"]} for index, target in enumerate(targets)]
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": path.stem, "rules": recorded}]}))
        done = subprocess.run([promtool, "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def _panels(dashboard: Any) -> list[Any]:
    return [inner for panel in dashboard["panels"] for inner in (panel, *panel.get("panels", []))]


def test_every_alert_says_how_bad_it_is_and_has_a_runbook(spec: Object) -> None:
    headings = {
        line.removeprefix("### ").strip()
        for line in (ROOT / "docs" / "operations.md").read_text().splitlines()
        if line.startswith("### ")
    }
    for name, rule in alerts(spec).items():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
        assert name in headings, f"docs/operations.md has no section {name}"
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert re.fullmatch(r"[0-9]+m", rule["for"])


def test_no_runbook_is_left_of_an_alert_that_is_gone(spec: Object) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert set(re.findall(r"^### (Populora\w+)$", text, re.MULTILINE)) == set(alerts(spec))


def test_the_schema_lists_the_alerts_that_can_be_left_out(schema: Object, spec: Object) -> None:
    listed = schema["properties"]["monitoring"]["properties"]["prometheusRule"]["properties"]["disabled"]["items"][
        "enum"
    ]
    assert listed == list(alerts(spec))


def test_an_alert_can_be_left_out_labelled_and_pointed_elsewhere(helm: Helm, spec: Object) -> None:
    gone, *_ = alerts(spec)
    values = {
        "disabled": [gone],
        "alertLabels": {"team": "ml", "severity": "info"},
        "runbookUrl": "https://runbooks.example/x",
    }
    changed = alerts(rules(helm, values))
    assert set(changed) == set(alerts(spec)) - {gone}
    for name, rule in changed.items():
        assert rule["labels"] == {"team": "ml", "severity": "info"}
        assert rule["annotations"]["runbook_url"] == f"https://runbooks.example/x#{name.lower()}"


def test_how_long_a_trainer_may_take_no_step_is_a_value(helm: Helm) -> None:
    rule = alerts(rules(helm, {"stalledAfter": "90m"}))["PopuloraTrainerStalled"]
    assert "[90m]" in rule["expr"]
    assert "90m" in rule["annotations"]["description"]
    assert "$" not in rule["expr"]


def test_prometheus_takes_the_rules(promtool: str, spec: Object, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    done = subprocess.run(
        [promtool, "check", "rules", "--lint-fatal", tmp_path / "rules.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_only_then(promtool: str, spec: Object, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    cases = yaml.safe_load((HERE / "alerts.yaml").read_text())
    tested = {alert["alertname"] for test in cases["tests"] for alert in test["alert_rule_test"] if alert["exp_alerts"]}
    assert tested == set(alerts(spec)), "every alert fires in a test"
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], **cases}))
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "tests.yaml"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
