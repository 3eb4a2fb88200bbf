"""The outside of the controller: options, permissions, metrics, probes, the trainer's answers, the list of reasons."""

import ast
import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner
from fake_world import World, manifest
from prometheus_client import generate_latest

import populora_operator
from populora_api.reasons import REASONS
from populora_operator import app, command, names, permissions
from populora_operator.cluster import kinds
from populora_operator.cluster.kinds import CHILDREN, POD, RUN
from populora_operator.logs import JsonFormatter
from populora_operator.metrics import FAMILIES, Metrics
from populora_operator.observed import Pod, child
from populora_operator.progress import Reader, read_scores
from populora_operator.servers import serve
from populora_operator.settings import Settings

SOURCE = Path(populora_operator.__file__).parent


def settings_of(monkeypatch: pytest.MonkeyPatch, *words: str, **environment: str) -> Settings:
    seen: list[Settings] = []
    monkeypatch.setattr(app, "run", lambda settings: seen.append(settings) or 0)
    env = {f"POPULORA_CONTROLLER_{name}": value for name, value in environment.items()}
    result = CliRunner().invoke(command.command, list(words), env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_options_have_the_documented_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "POD_NAMESPACE", tmp_path / "none")
    settings = settings_of(monkeypatch)
    assert settings.namespaces == ()
    assert (settings.lease.namespace, settings.lease.name, settings.lease.duration) == (
        "default",
        "populora-controller",
        15,
    )
    assert (settings.lease.renew_deadline, settings.lease.retry_period) == (10, 2)
    assert (settings.metrics_port, settings.health_port, settings.workers) == (8080, 8081, 8)
    assert (settings.resync_seconds, settings.status_poll_seconds) == (600, 5)
    assert settings.lease.identity != settings_of(monkeypatch).lease.identity


def test_the_lease_is_in_the_pods_own_namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("populora-system\n")
    monkeypatch.setattr(command, "POD_NAMESPACE", tmp_path / "namespace")
    assert settings_of(monkeypatch).lease.namespace == "populora-system"


def test_every_option_has_its_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in command.command.params:
        assert option.envvar, option.name
        flag = max(option.opts, key=len).removeprefix("--").replace("-", "_").upper()
        assert option.envvar == f"POPULORA_CONTROLLER_{flag}"
    settings = settings_of(
        monkeypatch, NAMESPACE="b a", WORKERS="3", IMAGE_PULL_SECRET="x y", TRAINER_IMAGE="mine:1", LEASE_SECONDS="30"
    )
    assert settings.namespaces == ("a", "b")
    assert settings.workers == 3
    assert settings.images.pull_secrets == ("x", "y")
    assert settings.images.trainer == "mine:1"
    assert settings.lease.renew_deadline == 20


@pytest.mark.parametrize("words", [["--workers", "0"], ["--lease-seconds", "1"], ["--log-format", "xml"]])
def test_a_wrong_option_is_refused_by_name(words: list[str]) -> None:
    result = CliRunner().invoke(command.command, words)
    assert result.exit_code == 2
    assert words[0] in result.output


def test_permissions_cover_exactly_the_kinds_that_are_used() -> None:
    granted = {(rule.api_group, resource): set(rule.verbs) for rule in permissions.RULES for resource in rule.resources}
    for kind in CHILDREN:
        assert granted[kind.group, kind.plural] == {"list", "watch", "create", "patch", "delete"}
    assert granted["", "pods"] == {"list", "watch"}
    assert granted[RUN.group, f"{RUN.plural}/status"] == {"patch"}
    assert not any("*" in verb for verbs in granted.values() for verb in verbs)
    assert "secrets" not in {resource for _, resource in granted}
    known = {(kind.group, kind.plural) for kind in vars(kinds).values() if isinstance(kind, kinds.Kind)}
    assert {(group, resource.partition("/")[0]) for group, resource in granted} == known
    rules = [*permissions.role_rules("runs"), *permissions.role_rules("lease")]
    assert len(rules) == len(permissions.RULES)


def test_every_reason_in_the_source_is_documented_and_every_documented_one_is_used() -> None:
    words = {
        node.value
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert [name for name in REASONS if name not in words] == []
    for path in SOURCE.rglob("*.py"):
        for found in re.findall(r'(?:Failure\(|_Verdict\(\s*"(?:True|False|Unknown)",)\s*"(\w+)"', path.read_text()):
            assert found in REASONS, f"{path.name}: {found}"
        for found in re.findall(r'Note\("\w+", "(\w+)"', path.read_text()):
            assert "Event" in REASONS[found].places or found in REASONS, f"{path.name}: {found}"


def test_series_of_a_run_go_with_the_run() -> None:
    world = World()
    world.create(manifest())
    world.until(lambda: world.status().get("step") == 3)
    metrics = Metrics()
    metrics.statuses = world.reconciler.statuses
    metrics.leading = lambda: True
    metrics.watch_ages = lambda: {"jobs": 3.0}
    metrics.request("apply", "jobs", 201, 0.1)
    text = generate_latest(metrics.registry).decode()
    assert 'populora_controller_run_step{namespace="ns",run="run"} 3.0' in text
    assert 'populora_controller_run_condition{condition="TrainersReady",namespace="ns",run="run"} 1.0' in text
    assert 'populora_controller_runs{phase="Running"} 1.0' in text
    assert 'populora_controller_watch_age_seconds{watch="jobs"} 3.0' in text
    assert "populora_controller_leader 1.0" in text
    world.cluster.remove(RUN, "ns", "run")
    world.settle()
    assert 'run="run"' not in generate_latest(metrics.registry).decode()


def test_every_family_is_described_and_exported() -> None:
    metrics = Metrics()
    exported = {family.name.removesuffix("_total") for family in metrics.registry.collect()}
    assert exported == set(FAMILIES)
    assert all(family.help.endswith(".") for family in FAMILIES.values())


def test_probes_and_metrics_are_served() -> None:
    async def story() -> None:
        problems: list[str] = []
        ready = [False]
        async with (
            serve(Metrics(), 0, 0, lambda: problems, lambda: ready[0]) as (metrics_port, health_port),
            aiohttp.ClientSession() as session,
        ):

            async def get(port: int, path: str) -> tuple[int, str]:
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    return answer.status, await answer.text()

            assert (await get(health_port, "/healthz"))[0] == 200
            assert (await get(health_port, "/readyz"))[0] == 503
            ready[0] = True
            assert (await get(health_port, "/readyz"))[0] == 200
            problems.append("jobs: nothing heard")
            assert await get(health_port, "/healthz") == (503, "jobs: nothing heard\n")
            code, text = await get(metrics_port, "/metrics")
            assert code == 200
            assert "populora_controller_queue_depth 0.0" in text

    asyncio.run(story())


def pod(ip: str = "127.0.0.1", **status: Any) -> Pod:
    metadata = {"name": "p", "uid": "p", "labels": {}}
    made = child(POD, {"metadata": metadata, "status": {"phase": "Running", "podIP": ip, **status}})
    assert isinstance(made, Pod)
    return made


@pytest.mark.parametrize(
    ("body", "code", "step"),
    [
        ('{"step": 3, "steps": 9, "phase": "Running", "something": "new"}', 200, 3),
        ('{"step": -1, "steps": 9}', 200, None),
        ('{"step": 3, "steps": 9, "solveRate": 7}', 200, None),
        ("<html>", 200, None),
        ("", 200, None),
        ('{"step": 3, "steps": 9}', 500, None),
        ('{"step": 3, "steps": 9, "x": "' + "a" * (2 << 20) + '"}', 200, None),
    ],
)
def test_a_trainers_answer_is_read_or_left_out(
    body: str, code: int, step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=body, status=code)

    async def story() -> None:
        application = web.Application()
        application.router.add_get("/status", handler)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        monkeypatch.setattr(names, "STATUS_PORT", runner.addresses[0][1])
        async with aiohttp.ClientSession() as session:
            progress = await Reader(session).read(pod())
        await runner.cleanup()
        assert (progress.step if progress is not None else None) == step

    asyncio.run(story())


def test_a_trainer_that_is_not_there_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "STATUS_PORT", 9)

    async def story() -> None:
        async with aiohttp.ClientSession() as session:
            assert await Reader(session).read(pod()) is None

    asyncio.run(story())


@pytest.mark.parametrize(
    ("message", "scores"),
    [
        ('[["mbpp_plus", "t0", 0.5, 378]]', [("mbpp_plus", "t0", 0.5, 378, 7)]),
        ("[]", []),
        ("not json", []),
        ('[["mbpp_plus", "t0", 5, 378]]', []),
        ('{"mbpp_plus": 1}', []),
        ("", []),
    ],
)
def test_scores_are_read_from_the_termination_message(message: str, scores: list[Any]) -> None:
    state = {"terminated": {"exitCode": 0, "message": message}}
    ended = pod(phase="Succeeded", containerStatuses=[{"name": "trainer", "state": state}])
    found = read_scores([ended], 7)
    assert [(row.suite, row.member, row.score, row.problems, row.step) for row in found] == scores


def test_json_log_lines_are_objects() -> None:
    record = logging.LogRecord("populora_operator.x", logging.INFO, "f", 1, "said %s", ("so",), None)
    record.run = "ns/run"
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["level"], line["run"]) == ("said so", "info", "ns/run")
