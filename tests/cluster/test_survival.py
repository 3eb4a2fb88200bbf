"""Whatever happens to the controller, its API server, its network or its children, a run ends as it should."""

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from client import Api, Object, condition, conditions, eventually
from control_plane import ControlPlane
from controller import ACCOUNT, Controller, Process, grant, grant_everywhere, user_of
from forks import ForkServer
from kubelet import Kubelet
from population_run import Run, merged, read_manifest
from proxy import Proxy, Request

NANO = merged(read_manifest("nano-4x4"), {"metadata": {"name": "run"}, "spec": {"training": {"steps": 8}}})
NAME = "run"
TIMES = re.compile(rb'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z?|"(activeSeconds|estimatedSecondsRemaining)": ?\d+')


@pytest.fixture
def proxy(plane: ControlPlane) -> Iterator[Proxy]:
    with Proxy(plane) as proxy:
        yield proxy


@pytest.fixture
def controller(plane, api, namespace, proxy, forks) -> Iterator[Controller]:
    """A controller of the test's namespace, with the rights of a namespaced install, behind the proxy."""
    token = grant(api, namespace)
    with Controller(plane, namespace, token=token, url=proxy.url, forks=forks) as controller:
        yield controller.ready()


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.stop()


@contextlib.contextmanager
def kept_alive(controller: Controller) -> Iterator[list[Process]]:
    """Start a controller's process again whenever it has ended, as a Deployment does; yields those that have ended."""
    over = threading.Event()
    ended: list[Process] = []

    def restart() -> None:
        while not over.wait(0.05):
            if not controller.alive and not over.is_set():
                before = controller.process
                controller.start()
                assert before is not None
                ended.append(before)

    thread = threading.Thread(target=restart, daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        over.set()
        thread.join()


# Killed at every write


def essence(child: Object) -> Any:
    """Return what of a child must be the same in every history: what was asked for, not what servers assigned."""
    metadata = child["metadata"]
    owners = [(owner["kind"], owner["name"], owner.get("controller")) for owner in metadata.get("ownerReferences", [])]
    spec = dict(child.get("spec") or {})
    for assigned in ("clusterIP", "clusterIPs", "selector"):
        spec.pop(assigned, None)
    if child["kind"] == "Job":
        spec["template"] = {**spec["template"], "metadata": None}
    labels = {key: value for key, value in metadata.get("labels", {}).items() if "controller-uid" not in key}
    return owners, labels, spec, child.get("data")


def story(run: Run) -> Object:
    """Return everything of a run that must not depend on the controller's fate."""
    status = dict(run.status())
    for measured in ("estimatedSecondsRemaining", "activeSeconds"):
        status.pop(measured, None)
    status["conditions"] = {
        kind: (item["status"], item["reason"]) for kind, item in conditions({"status": status}).items()
    }
    own = {name: child for name, child in run.children().items() if child["kind"] not in ("Pod", "ReplicaSet")}
    return {
        "status": status,
        "children": {name: essence(child) for name, child in own.items()},
        "pods": len(run.pods()),
        "finalizers": run.live()["metadata"].get("finalizers"),
    }


def live_a_life(api: Api, kubelet: Kubelet, namespace: str, expected: list[Object] | None = None) -> list[Object]:
    """Take a run through start, suspension, resumption, completion and clean-up; return its story at each station.

    A story is told when nothing changes any more or, where it is known what is expected, when it has come to that: a
    controller that is killed all the time takes longer. After ten minutes it is told as it stands.
    """
    training = kubelet.training(NAME)
    training.limit = 4
    run = Run.create(api, namespace, NANO, deletionPolicy="Delete")
    stations: list[Object] = []

    def settled(phase: str, pods: bool, step: int) -> None:
        """Wait until nothing is left to do, however long restarts take."""

        def reached() -> bool:
            status = run.status()
            done = status.get("phase") == phase and status.get("step") == step and bool(run.pods()) == pods
            if phase == "Running":
                done = (
                    done
                    and condition({"status": status}, "SandboxesReady")
                    and condition({"status": status}, "TrainersReady")
                )
            return done

        began = time.monotonic()
        eventually(reached, f"the run is settled as {phase}", seconds=700, otherwise=run.explain)
        # The busier the machine, the longer the way here, and the longer a pause that is not yet the end.
        quiet = max(3.0, (time.monotonic() - began) / 2)
        told, since, deadline = story(run), time.monotonic(), time.monotonic() + 600
        while time.monotonic() < deadline:
            if expected is not None and not list(_differences(told, expected[len(stations)])):
                break
            if expected is None and time.monotonic() - since > quiet:
                break
            time.sleep(0.3)
            now = story(run)
            if now != told:
                told, since = now, time.monotonic()
        stations.append(told)

    settled("Running", True, 4)
    run.suspend()
    settled("Suspended", False, 4)
    training.limit = None
    run.resume()
    settled("Completed", False, 8)
    stations.append({"trainer": training.first_steps})
    run.delete()
    run.until_gone(seconds=700)
    stations.append({"cleanups": kubelet.ended("cleanup")})
    return stations


def write_of(request: Request) -> tuple[str, str, str]:
    """Tell one write from another, whenever it is made: events by their reason, as each has a name of its own."""
    if request.of_event:
        path = request.path.partition("/events")[0] + "/events"
        return request.method, path, str(json.loads(request.body or b"{}").get("reason"))
    return request.method, request.path, hashlib.sha256(TIMES.sub(b"", request.body)).hexdigest()


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("moment", ["before the server sees it", "before the answer is known"])
def test_a_controller_killed_at_every_write_leaves_what_an_undisturbed_one_leaves(
    plane, api, kubelet, namespace, forks, moment
):
    with other_namespace(api) as quiet, Kubelet(api, quiet) as played, Proxy(plane) as proxy:
        token = grant(api, quiet)
        with Controller(plane, quiet, token=token, url=proxy.url, identity="quiet", forks=forks) as undisturbed:
            undisturbed.ready()
            expected = live_a_life(api, played, quiet)
        least = {write_of(request)[:2] for request in proxy.writes if not request.of_event}
    assert len(least) > 15

    _, since = plane.audit(plane.audit_log.stat().st_size)
    with Proxy(plane) as proxy:
        token = grant(api, namespace)
        killer = Controller(plane, namespace, token=token, url=proxy.url, identity="killed", forks=forks)
        killed: set[tuple[str, str, str]] = set()
        dead: set[Process] = set()

        def kill(request: Request) -> None:
            if request.writes and not request.of_lease and write_of(request) not in killed:
                killed.add(write_of(request))
                process = killer.process
                assert process is not None
                # One that has two writes under way is dead already at the second, which is lost as well.
                dead.add(process)
                process.kill()
                raise ConnectionAbortedError

        if moment == "before the server sees it":
            proxy.before = kill
        else:
            proxy.after = kill
        with killer, kept_alive(killer) as ended:
            wanted = [_moved(station, quiet, namespace) for station in expected]
            found = live_a_life(api, kubelet, namespace, wanted)
            # An event that is written after the last change is one more write to be killed at.
            eventually(lambda: killer.alive and set(ended) == dead, "all who were killed, and no others, were replaced")
            assert len(ended) == len(dead)
        quiet_paths = {(method, path.replace(quiet, namespace)) for method, path in least}
        missed = quiet_paths - {write[:2] for write in killed}
        assert missed <= deletions_by_others(plane, namespace, since), "every write was killed at, or nothing was left"
    for station, quietly in zip(found, wanted, strict=True):
        assert list(_differences(station, quietly)) == []


def deletions_by_others(plane: ControlPlane, namespace: str, since: int) -> set[tuple[str, str]]:
    """Return what of a namespace somebody else has deleted, as the garbage collector does where it is quicker."""
    requests, _ = plane.audit(since)
    return {
        ("DELETE", request["requestURI"].partition("?")[0])
        for request in requests
        if request["verb"] == "delete"
        and request["objectRef"].get("namespace") == namespace
        and request["user"]["username"] != user_of(namespace)
    }


def _differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Say where two stories differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from _differences(one.get(key), other.get(key), f"{path}.{key}")
    elif one != other:
        yield f"{path}: {one!r} instead of {other!r}"


def _moved(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key: _moved(item, old, new) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, old, new) for item in value)
    return value.replace(old, new) if isinstance(value, str) else value


@contextlib.contextmanager
def other_namespace(api: Api) -> Iterator[str]:
    name = f"t-{uuid.uuid4().hex[:8]}"
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    try:
        yield name
    finally:
        api.delete("Namespace", name)


# The API server and the way to it


@pytest.mark.slow
@pytest.mark.faults
def test_an_api_server_that_is_killed_and_comes_back_costs_time_only(plane, api, kubelet, namespace, controller):
    training = kubelet.training(NAME)
    training.limit = 3
    run = Run.create(api, namespace, NANO)
    run.until_step(3)
    process = controller.process
    plane.restart_api_server(how=signal.SIGKILL, away_seconds=3)
    training.limit = None
    run.until("Completed")
    assert training.starts == 1
    assert run.status()["attempts"] == 1
    assert controller.alive
    assert controller.process is process


@pytest.mark.slow
@pytest.mark.faults
def test_watches_that_fall_silent_are_opened_again(api, kubelet, namespace, controller, proxy):
    kubelet.training(NAME).limit = 2
    run = Run.create(api, namespace, NANO)
    run.until_step(2)
    proxy.deafen()
    run.suspend()
    run.until("Suspended")
    assert controller.alive


@pytest.mark.slow
@pytest.mark.faults
def test_liveness_tells_that_nothing_is_heard_from_the_api_server_and_what_is_not_restarted_recovers_by_itself(
    api, kubelet, namespace, controller, proxy
):
    process = controller.process
    assert controller.probe("healthz") == 200
    proxy.black_hole.set()
    eventually(lambda: controller.probe("healthz") not in (200, None), "liveness tells", every=1)
    # What was asked meanwhile is never answered: connections are given up, not waited for.
    proxy.black_hole.clear()
    run = Run.create(api, namespace, NANO)
    run.until("Completed")
    eventually(lambda: controller.probe("healthz") == 200, "every watch is well again", every=1)
    assert controller.alive
    assert controller.process is process


@pytest.mark.faults
@pytest.mark.parametrize("code", [409, 429, 500])
def test_requests_that_are_refused_now_and_then_are_made_again(api, kubelet, namespace, controller, proxy, code):
    generator = random.Random(code)
    refused = [0]

    def refuse(request: Request) -> int | None:
        if request.of_lease or generator.random() > 0.2:
            return None
        refused[0] += 1
        return code

    proxy.refuse = refuse
    run = Run.create(api, namespace, NANO)
    run.until("Completed")
    assert refused[0] > 5
    assert kubelet.training(NAME).starts == 1
    assert run.status()["attempts"] == 1


# Other people's hands

EDITS: dict[str, tuple[str, str, Any]] = {
    "replicas": ("Deployment", "run-sandbox", {"spec": {"replicas": 5}}),
    "labels": ("Service", "run-sandbox", {"metadata": {"labels": {"populora.dev/run": "other"}}}),
    "selector": ("Service", "run-trainer", {"spec": {"selector": {"populora.dev/run": "other"}}}),
    "manifest": ("ConfigMap", "run-config", {"data": {"run.yaml": "nothing"}}),
    "token": ("ServiceAccount", "run-sandbox", {"automountServiceAccountToken": True}),
    "isolation": ("NetworkPolicy", "run-default-deny", {"spec": {"policyTypes": ["Ingress"]}}),
}


def test_children_that_are_edited_by_hand_are_put_right(api, kubelet, namespace, controller):
    kubelet.training(NAME).limit = 2
    run = Run.create(api, namespace, NANO)
    run.until_step(2)
    before = {case: essence(api.get(kind, name, namespace)) for case, (kind, name, _) in EDITS.items()}
    for kind, name, change in EDITS.values():
        api.patch(kind, name, change, namespace)
    for case, (kind, name, _) in EDITS.items():
        eventually(
            lambda kind=kind, name=name, case=case: essence(api.get(kind, name, namespace)) == before[case],
            f"{case} is as before",
            otherwise=lambda kind=kind, name=name: str(essence(api.get(kind, name, namespace))),
        )
    kubelet.training(NAME).limit = None
    run.until("Completed")


def test_children_that_are_deleted_are_made_again(api, kubelet, namespace, controller):
    training = kubelet.training(NAME)
    training.limit = 2
    run = Run.create(api, namespace, NANO)
    run.until_step(2)
    own = {name for name, child in run.children().items() if child["kind"] not in ("Pod", "ReplicaSet", "Job")}
    old = {name: run.children()[name]["metadata"]["uid"] for name in own}
    for child in own:
        kind, _, name = child.partition("/")
        api.delete(kind, name, namespace)
    for child in own:
        kind, _, name = child.partition("/")
        eventually(
            lambda kind=kind, name=name, child=child: (
                (found := api.find(kind, name, namespace)) and found["metadata"]["uid"] != old[child]
            ),
            f"{child} exists again",
        )
    assert training.starts == 1
    api.delete("Job", run.jobs()[-1]["metadata"]["name"], namespace)
    eventually(lambda: training.starts == 2, "the trainer starts again", otherwise=run.explain)
    training.limit = None
    status = run.until("Completed")
    assert training.first_steps == [0, 2]
    assert status["attempts"] == 1


def test_children_that_have_lost_their_owner_are_given_it_back(api, kubelet, namespace, controller):
    training = kubelet.training(NAME)
    training.limit = 2
    run = Run.create(api, namespace, NANO)
    run.until_step(2)
    uid = run.live()["metadata"]["uid"]
    own = {name: child for name, child in run.children().items() if child["kind"] not in ("Pod", "ReplicaSet")}
    for name, child in own.items():
        api.patch(child["kind"], name.partition("/")[2], {"metadata": {"ownerReferences": None}}, namespace)
    for name, child in own.items():
        eventually(
            lambda name=name: (
                [
                    (owner["uid"], owner["controller"])
                    for owner in run.children()[name]["metadata"].get("ownerReferences", [])
                ]
                == [(uid, True)]
                if name in run.children()
                else None
            ),
            f"{name} belongs to the run again",
            otherwise=run.explain,
        )
        assert run.children()[name]["metadata"]["uid"] == child["metadata"]["uid"]
    training.limit = None
    assert run.until("Completed")["attempts"] == 1
    assert training.starts == 1


# Two replicas


@pytest.fixture
def pair(plane, api, namespace, forks) -> Iterator[tuple[Controller, Controller]]:
    """Two replicas of one controller; each has an account of its own, so that the audit log tells them apart."""
    first, second = (
        Controller(plane, namespace, token=grant(api, namespace, f"{ACCOUNT}-{name}"), identity=name, forks=forks)
        for name in ("first", "second")
    )
    with first:
        first.ready()
        eventually(lambda: leader(api, namespace) == "first", "the first leads")
        with second:
            yield first, second


def leader(api: Api, namespace: str) -> str | None:
    lease = api.find("Lease", "populora-controller", namespace)
    return lease["spec"].get("holderIdentity") if lease else None


def writes_of(plane: ControlPlane, namespace: str, name: str, since: int) -> list[float]:
    """Return the times at which the API server received a replica's writes, Leases apart."""
    requests, _ = plane.audit(since)
    return [
        _epoch(request["requestReceivedTimestamp"])
        for request in requests
        if request["user"]["username"] == user_of(namespace, f"{ACCOUNT}-{name}")
        and request["verb"] in ("create", "update", "patch", "delete", "deletecollection")
        and request["objectRef"]["resource"] != "leases"
    ]


def _epoch(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("fate", ["killed", "stopped", "paused"])
def test_a_second_replica_takes_over_and_there_are_never_two_writers(plane, api, kubelet, namespace, pair, fate):
    first, second = pair
    training = kubelet.training(NAME)
    training.limit = 2
    _, since = plane.audit(plane.audit_log.stat().st_size)
    run = Run.create(api, namespace, NANO)
    run.until_step(2)
    assert writes_of(plane, namespace, "second", since) == []
    assert first.process is not None
    if fate == "killed":
        first.kill()
    elif fate == "stopped":
        first.stop()
    else:
        os.kill(first.process.pid, signal.SIGSTOP)
    training.limit = 5
    run.until_step(5)
    # That it is so within 30 seconds is held in virtual time, by the tests of the election.
    eventually(lambda: writes_of(plane, namespace, "second", since), "the audit log tells of the second's writes")
    if fate == "paused":
        os.kill(first.process.pid, signal.SIGCONT)
        time.sleep(3)
    training.limit = None
    run.until("Completed")
    ours, theirs = (writes_of(plane, namespace, name, since) for name in ("first", "second"))
    assert max(ours) < min(theirs)
    assert training.starts == 1
    assert second.alive


# Namespaces


@pytest.fixture
def everywhere(plane, api, forks) -> Iterator[Controller]:
    """A controller of the whole cluster, whose rights do not go with a namespace."""
    with Controller(plane, None, token=grant_everywhere(api), forks=forks) as controller:
        yield controller.ready()


@pytest.mark.parametrize("policy", ["Retain", "Delete"])
def test_a_namespace_with_a_running_run_is_deleted_without_hanging(api, kubelet, namespace, everywhere, policy):
    kubelet.training(NAME).limit = 2
    run = Run.create(api, namespace, NANO, deletionPolicy=policy)
    run.until_step(2)
    api.delete("Namespace", namespace)
    eventually(lambda: api.find("Namespace", namespace) is None, "the namespace is gone")


@pytest.mark.parametrize("state", ["Running", "Completed"])
def test_a_namespace_is_deleted_though_the_controllers_rights_go_with_it(api, kubelet, namespace, controller, state):
    training = kubelet.training(NAME)
    training.limit = 2 if state == "Running" else None
    run = Run.create(api, namespace, NANO, deletionPolicy="Delete")
    run.until(state)
    assert run.live()["metadata"]["finalizers"]
    api.delete("Namespace", namespace)
    eventually(lambda: api.find("Namespace", namespace) is None, "the namespace is gone")
    assert "CleanupAbandoned" in controller.log.read_text()


def test_a_namespace_that_goes_disturbs_no_run_of_another(plane, api, kubelet, namespace, forks):
    training = kubelet.training(NAME)
    training.limit = 2
    with other_namespace(api) as leaving:
        token = grant(api, namespace, also=(leaving,))
        options = (f"--namespace={leaving}",)
        controller = Controller(plane, namespace, token=token, forks=forks, options=options).start().ready()
        run = Run.create(api, namespace, NANO)
        run.until_step(2)
        other = Run.create(api, leaving, NANO, deletionPolicy="Delete", suspend=True)
        other.until("Suspended")
        api.delete("Namespace", leaving)
        eventually(lambda: api.find("Namespace", leaving) is None, "the namespace is gone")
        training.limit = 4
        run.until_step(4)
        # Nor does it keep one from being led that knows nothing of it.
        controller.kill()
        controller.start().ready()
        training.limit = None
        run.until("Completed")
        assert controller.probe("healthz") == 200
        assert controller.stop() == 0


def test_a_namespace_without_a_controller_is_deleted_unless_a_clean_up_was_asked_for(
    api, kubelet, namespace, controller
):
    kubelet.training(NAME).limit = 2
    run = Run.create(api, namespace, NANO)
    run.until_step(2)
    controller.stop()
    api.delete("Namespace", namespace)
    eventually(lambda: api.find("Namespace", namespace) is None, "the namespace is gone")


def test_the_documented_way_out_deletes_a_run_whose_controller_is_gone(api, kubectl, kubelet, namespace, controller):
    kubelet.training(NAME).limit = 2
    run = Run.create(api, namespace, NANO, deletionPolicy="Delete")
    run.until_step(2)
    controller.stop()
    run.delete()
    assert not run.gone()
    kubectl("patch", "prun", NAME, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    run.until_gone()


def test_sigterm_ends_the_controller_in_order_and_frees_the_lease(api, namespace, controller):
    # A replica is ready when it watches; who leads is settled after that.
    eventually(lambda: leader(api, namespace) == "first" or None, "the replica leads", otherwise=controller.tail)
    assert controller.stop() == 0
    assert leader(api, namespace) in (None, "")
