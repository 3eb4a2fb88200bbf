"""What the watches tell, kept small, in any order, through every kind of trouble."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from virtual_time import run

from populora_operator.cluster.kinds import CONFIG_MAP, JOB, POD
from populora_operator.cluster.port import (
    ClusterError,
    ForbiddenError,
    GoneError,
    NotFoundError,
    Object,
    Page,
    UnavailableError,
    WatchEvent,
)
from populora_operator.health import LIMIT_SECONDS, Health
from populora_operator.queue import Key
from populora_operator.store import Store
from populora_operator.watches import WATCH_SECONDS, ChildWatch, NamespaceWatch

KEY: Key = ("ns", "run")


def config(name: str = "c", *, version: int = 5, uid: str = "u", run: str | None = "run") -> Object:
    labels = {"populora.dev/run": run} if run else {}
    metadata = {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata}


def test_an_older_answer_does_not_replace_what_is_known() -> None:
    store = Store()
    assert store.put(CONFIG_MAP, config(version=7)) == KEY
    assert store.put(CONFIG_MAP, config(version=7)) is None, "the echo of our own write is no news"
    assert store.put(CONFIG_MAP, config(version=6)) is None
    child = store.observed(KEY).find(CONFIG_MAP, "c")
    assert child is not None
    assert child.version == "7"
    assert store.put(CONFIG_MAP, config(version=10)) == KEY


def test_a_late_answer_does_not_revive_what_is_gone() -> None:
    store = Store()
    store.put(CONFIG_MAP, config(version=7))
    assert store.drop(CONFIG_MAP, config(version=9)) == KEY
    assert store.put(CONFIG_MAP, config(version=8)) is None
    assert store.runs() == set()
    assert store.put(CONFIG_MAP, config(version=12)) == KEY, "it had only lost its label"
    assert store.put(CONFIG_MAP, config(version=3, uid="other")) == KEY, "another object of the name is new"


def test_an_object_with_another_runs_label_is_lost_to_its_run_until_it_has_the_right_one_again() -> None:
    store = Store()
    store.put(CONFIG_MAP, config(version=7))
    assert store.move(CONFIG_MAP, config(version=8)) is None
    stolen = config(version=8, run="other")
    assert store.move(CONFIG_MAP, stolen) == KEY
    assert store.put(CONFIG_MAP, stolen) == ("ns", "other")
    assert store.observed(KEY).find(CONFIG_MAP, "c") is None
    back = config(version=9)
    assert store.move(CONFIG_MAP, back) == ("ns", "other")
    assert store.put(CONFIG_MAP, back) == KEY
    assert store.runs() == {KEY}
    assert store.drop(CONFIG_MAP, config(version=10)) == KEY
    assert store.move(CONFIG_MAP, config(version=11, run="third")) is None, "nothing is remembered of what is gone"


def test_a_list_forgets_what_is_not_in_it_and_tells_what_is_new() -> None:
    store = Store()
    store.put(CONFIG_MAP, config("a"))
    store.put(CONFIG_MAP, config("b", run="other"))
    store.put(JOB, config("j"))
    changed = store.replace(CONFIG_MAP, None, [config("a"), config("c", run="third")])
    assert changed == {("ns", "other"), ("ns", "third")}
    assert store.observed(KEY).find(JOB, "j") is not None, "another kind is not concerned"
    assert store.runs() == {KEY, ("ns", "third")}
    assert store.replace(CONFIG_MAP, "elsewhere", []) == set(), "another namespace is not concerned"


def test_objects_without_the_label_are_nobodys() -> None:
    store = Store()
    assert store.put(CONFIG_MAP, config(run=None)) is None
    assert store.runs() == set()


def test_labels_and_owner_of_counted_kinds_are_seen_and_their_status_is_not() -> None:
    def job(**metadata: Any) -> Object:
        item = config("j", version=metadata.pop("version", 5))
        item["metadata"] |= {"generation": 2, **metadata}
        return item

    def state(item: Object) -> str:
        store = Store()
        store.put(JOB, item)
        child = store.observed(KEY).find(JOB, "j")
        assert child is not None
        return child.state

    assert state(job()) == state(job(version=9)), "status changes raise the version only"
    assert state(job()) != state(job(generation=3))
    assert state(job()) != state(job(labels={"populora.dev/run": "run", "mine": "x"}))
    assert state(job()) != state(job(ownerReferences=[{"uid": "x", "controller": True}]))


class Script:
    """A cluster whose lists and watches are written down; the last watch stays open."""

    def __init__(self, *steps: Any) -> None:
        self.steps, self.log = list(steps), []

    async def list(self, kind: Any, namespace: Any, selector: str = "", *, fields: str = "", more: str = "") -> Page:
        self.log.append(("list", more))
        assert selector == "populora.dev/run"
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        assert isinstance(step, Page)
        return step

    async def watch(
        self, kind: Any, namespace: Any, selector: str, resource_version: str, seconds: int
    ) -> AsyncGenerator[WatchEvent, None]:
        self.log.append(("watch", resource_version))
        assert seconds == WATCH_SECONDS
        step = self.steps.pop(0) if self.steps else None
        if step is None:
            await asyncio.Event().wait()
            return
        for event in step:
            if isinstance(event, Exception):
                raise event
            if isinstance(event, float):
                await asyncio.sleep(event)
            else:
                yield event


def event(kind: str, item: Object) -> WatchEvent:
    return WatchEvent(kind, item)  # type: ignore[arg-type]


def bookmark(version: int) -> WatchEvent:
    return event("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


def watched(script: Script, seconds: float = 120) -> tuple[Store, list[Key], Health]:
    store, keys = Store(), list[Key]()
    health: list[Health] = []

    async def story() -> None:
        loop = asyncio.get_running_loop()
        health.append(Health(loop.time))
        watch = ChildWatch(script, CONFIG_MAP, None, store, health[0], keys.append)  # type: ignore[arg-type]
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(seconds)
        health[0].ages()
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(story())
    return store, keys, health[0]


def test_a_list_in_pages_is_followed_by_a_watch_from_its_version() -> None:
    script = Script(
        Page([config("a")], "10", "next"),
        Page([config("b")], "11", ""),
        [event("MODIFIED", config("a", version=12)), event("DELETED", config("b", version=13)), bookmark(20), 50.0],
    )
    store, keys, _ = watched(script)
    assert script.log == [("list", ""), ("list", "next"), ("watch", "11"), ("watch", "20")]
    assert set(keys) == {KEY}
    assert len(keys) == 3
    assert store.observed(KEY).find(CONFIG_MAP, "b") is None


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        (UnavailableError("reset"), ("watch", "12")),
        (UnavailableError("bad gateway", code=502), ("watch", "12")),
        (GoneError("too old", code=410), ("list", "")),
        (NotFoundError("no such kind", code=404), ("list", "")),
        (ClusterError("denied", code=403), ("list", "")),
    ],
)
def test_after_trouble_it_goes_on_where_it_was_or_lists_again(trouble: Exception, expected: tuple[str, str]) -> None:
    script = Script(
        Page([], "10", ""), [event("ADDED", config(version=12)), 5.0, trouble], *([Page([], "30", "")] * 1), None
    )
    if expected[0] == "watch":
        del script.steps[2]
    watched(script)
    assert script.log[:3] == [("list", ""), ("watch", "10"), expected]


def test_what_is_forbidden_is_known_to_be_unknown_and_no_sign_of_a_dead_connection() -> None:
    script = Script(*[ForbiddenError("no rights in this namespace", code=403)] * 60)

    async def story() -> None:
        health = Health(asyncio.get_running_loop().time)
        watch = ChildWatch(script, CONFIG_MAP, "gone", Store(), health, lambda key: None)  # type: ignore[arg-type]
        task = asyncio.create_task(watch.run())
        await asyncio.wait_for(watch.answered.wait(), 5)
        await asyncio.sleep(3 * LIMIT_SECONDS)
        assert health.problems() == []
        assert not watch.listed
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(story())
    assert len(script.log) < 40


def test_trouble_is_answered_by_patience() -> None:
    script = Script(Page([], "10", ""), *([[UnavailableError("refused")]] * 30))
    watched(script, seconds=100)
    assert 8 <= len(script.log) <= 25, "not a storm, and not asleep"


def test_a_server_that_ends_every_watch_at_once_is_not_stormed() -> None:
    script = Script(Page([], "10", ""), *([[]] * 500))
    watched(script, seconds=100)
    assert len(script.log) < 30


def test_namespaces_that_are_being_deleted_are_known_and_told_once() -> None:
    def namespace(name: str, version: int, deleted: str | None = None) -> Object:
        return {"metadata": {"name": name, "resourceVersion": str(version), "deletionTimestamp": deleted}}

    script = Script(
        [
            event("ADDED", namespace("a", 3)),
            event("ADDED", namespace("b", 7)),
            event("MODIFIED", namespace("a", 12, "2026-01-01T00:00:00Z")),
            event("MODIFIED", namespace("a", 13, "2026-01-01T00:00:00Z")),
            event("MODIFIED", namespace("b", 14, "2026-01-01T00:00:00Z")),
            event("DELETED", namespace("b", 15, "2026-01-01T00:00:00Z")),
            bookmark(20),
            GoneError("too old", code=410),
        ],
        [event("ADDED", namespace("a", 30, "2026-01-01T00:00:00Z")), bookmark(31), 50.0],
        None,
    )
    leaving, told = set[str](), list[str]()

    async def story() -> None:
        health = Health(asyncio.get_running_loop().time)
        watch = NamespaceWatch(script, None, leaving, health, told.append)  # type: ignore[arg-type]
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(story())
    assert script.log == [("watch", ""), ("watch", ""), ("watch", "31")]
    assert leaving == {"a"}
    assert told == ["a", "b"]


def test_silence_is_noticed() -> None:
    clock = [0.0]
    health = Health(lambda: clock[0])
    health.alive("jobs")
    health.alive("pods")
    clock[0] = LIMIT_SECONDS + 1
    health.alive("pods")
    (problem,) = health.problems()
    assert problem.startswith("jobs: nothing heard")
    health.forget("jobs")
    assert health.problems() == []


def test_pods_are_kept_as_small_values() -> None:
    item = config("p")
    item["metadata"]["labels"] |= {
        "app.kubernetes.io/component": "trainer",
        "batch.kubernetes.io/job-completion-index": "1",
    }
    item["spec"] = {"nodeName": "n", "containers": [{"name": "x" * 10_000}]}
    item["status"] = {"phase": "Running", "containerStatuses": [{"name": "trainer", "restartCount": 2, "state": {}}]}
    store = Store()
    store.put(POD, item)
    (pod,) = store.observed(KEY).pods("trainer")
    assert (pod.index, pod.node, pod.phase, pod.containers[0].restarts) == (1, "n", "Running", 2)
    assert not hasattr(pod, "__dict__")
