"""The controller is killed at every write of a run's whole life; the end is that of the life without a death."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fake_cluster import FakeCluster, Killed
from fake_world import World, manifest

from populora_operator import names
from populora_operator.cluster.kinds import JOB, POD, RUN, Kind
from populora_operator.cluster.port import Object

CHUNKS = 8


def live(world: World) -> dict[str, Any]:
    """Take a run through everything that can happen to it, and return what a person sees at each turn."""
    seen: dict[str, Any] = {}

    def look(turn: str) -> None:
        status = world.status()
        kept = {name: status.get(name) for name in ("phase", "reason", "step", "steps", "attempts", "evaluatedStep")}
        conditions = {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}
        children = sorted((kind, name) for kind, _, name in world.cluster.objects if kind not in ("Pod", "Event"))
        seen[turn] = (kept, conditions, status.get("evaluation"), children)

    def trainer() -> str:
        world.until(lambda: world.phase() == "Running")
        (pod,) = world.pods("trainer")
        return str(pod["metadata"]["name"])

    trainers = world.trainers
    world.create(
        manifest(
            deletionPolicy="Delete",
            retries=2,
            evaluation={"suites": ["humaneval_plus"], "everySteps": 4},
            training={"steps": 10},
        )
    )
    trainers["run"].hold_at = 2
    world.until(lambda: world.status().get("step") == 2)
    look("running")
    world.end(trainer(), code=1, message="Traceback\nValueError: boom")
    world.until(lambda: world.status().get("attempts") == 2)
    trainers["run"].hold_at = 5
    trainer()
    world.until(lambda: world.status().get("step") == 5 and world.status().get("evaluatedStep") == 4)
    look("second attempt")
    world.end(trainer(), code=137, disrupted=True)
    trainers["run"].hold_at = 6
    world.until(lambda: world.status().get("step") == 6 and world.phase() == "Running")
    look("after a disruption")
    world.cluster.edit(RUN, "run", lambda item: item["spec"].update(suspend=True))
    world.until(lambda: world.phase() == "Suspended")
    look("suspended")
    world.cluster.edit(RUN, "run", lambda item: item["spec"].update(suspend=False))
    trainer()
    world.cluster.edit(RUN, "run", lambda item: item["spec"]["training"].update(steps=12))
    trainers["run"].steps = 12
    trainers["run"].hold_at = None
    world.until(lambda: world.phase() == "Completed")
    world.settle()
    for _ in range(4):
        world.tick()
    look("completed")
    world.cluster.remove(RUN, "ns", "run")
    world.until(lambda: not world.cluster.has(RUN, "run"))
    for _ in range(6):
        world.tick()
    seen["gone"] = sorted((kind, name) for kind, _, name in world.cluster.objects if kind != "Event")
    seen["starts of attempts"] = _starts(world)
    return seen


def _starts(world: World) -> dict[str, int]:
    """Count how often each attempt's first pod was made; the disrupted one and the suspended one came twice more."""
    return dict(Counter(name for name in world.made))  # type: ignore[attr-defined]


class _Watched(World):
    """A world that sees whether two trainers are ever alive."""

    def __post_init__(self) -> None:
        self.made: list[str] = []
        super().__post_init__()

    def _hear(self, what: str, kind: Kind, item: Object) -> None:
        super()._hear(what, kind, item)
        if kind is POD and item["metadata"]["labels"][names.COMPONENT_LABEL] == "trainer":
            if what == "ADDED":
                self.made.append(item["metadata"]["labels"][names.JOB_LABEL])
            alive = self.pods("trainer")
            assert len(alive) <= 1, f"two trainers at once: {[pod['metadata']['name'] for pod in alive]}"
        if kind is JOB and what == "ADDED":
            unfinished = [
                job["metadata"]["name"]
                for job in self.cluster.of(JOB)
                if names.attempt_of("run", job["metadata"]["name"]) and not (job.get("status") or {}).get("conditions")
            ]
            assert len(unfinished) <= 1, f"two trainers at once: {unfinished}"


def killed_at(number: int, *, before: bool) -> Callable[[int], None]:
    """Return what kills the controller around one write, once."""
    left = [number]

    def strike(write: int) -> None:
        if left and write == number:
            left.clear()
            raise Killed

    return strike


@pytest.fixture(scope="module")
def undisturbed() -> tuple[dict[str, Any], int]:
    world = _Watched()
    seen = live(world)
    return seen, len(world.cluster.writes)


def test_the_whole_life_has_every_kind_of_write(undisturbed: tuple[dict[str, Any], int]) -> None:
    seen, writes = undisturbed
    assert writes > 60
    assert seen["gone"] == []
    assert seen["completed"][0]["attempts"] == 2
    assert seen["completed"][0]["evaluatedStep"] == 12
    assert {score["step"] for score in seen["completed"][2]} >= {4, 12}


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_controller_killed_at_any_write_ends_as_one_that_lived(
    chunk: int, before: bool, undisturbed: tuple[dict[str, Any], int]
) -> None:
    expected, writes = undisturbed
    for number in range(chunk, writes, CHUNKS):
        strike = killed_at(number, before=before)
        cluster = FakeCluster(before=strike) if before else FakeCluster(after=strike)
        world = _Watched(cluster)
        seen = live(world)
        assert world.deaths == 1
        for turn, facts in expected.items():
            assert seen[turn] == facts, f"killed {'before' if before else 'after'} write {number}: {turn}"
