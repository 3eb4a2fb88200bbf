"""The status as a function of what is observed: written only when changed, times kept, small."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fake_world import manifest
from hypothesis import given
from hypothesis import strategies as st

from populora_api import Status
from populora_api.reasons import REASONS
from populora_operator.builders.context import Context
from populora_operator.cluster.kinds import DEPLOYMENT, JOB, POD, Kind
from populora_operator.cluster.port import Object
from populora_operator.events import turns
from populora_operator.failures import Failure
from populora_operator.lifecycle import Stage, decide
from populora_operator.observed import Child, Observed, child
from populora_operator.progress import Progress
from populora_operator.status import Heartbeat, Situation, are_equal, compute, plain
from populora_operator.subject import Subject, read

START = datetime(2026, 1, 1, tzinfo=UTC)
PHASES = ["Pending", "Provisioning", "Running", "Suspended", "Evaluating", "Completed", "Failed"]


def subject(status: Object | None = None, **spec: Any) -> Subject:
    item = manifest(**spec)
    item["metadata"] |= {"uid": "u", "resourceVersion": "1", "generation": 3}
    return read({**item, "status": status or {}})


def situation(
    of: Subject, observed: Observed, *, at: datetime = START, heartbeat: Heartbeat | None = None, **more: Any
) -> Situation:
    context = Context(of.run, "ns", "u") if of.run is not None else None
    beat = heartbeat or Heartbeat()
    step = beat.progress.step if beat.progress is not None else None
    decision = decide(of, context, observed, step, at)
    return Situation(of, context, decision, observed, beat, more.get("obstacle"), more.get("waits"), at)


def children(*items: tuple[Kind, Object]) -> Observed:
    made: dict[tuple[str, str], Child] = {}
    for kind, item in items:
        made[kind.kind, item["metadata"]["name"]] = child(kind, item)
    return Observed(made)


def job(**status: Any) -> tuple[Kind, Object]:
    owner = {"uid": "u", "controller": True}
    digest = Context(_run(subject()), "ns", "u").training_digest
    metadata = {
        "name": "run-trainer-1",
        "uid": "j",
        "ownerReferences": [owner],
        "annotations": {"populora.dev/training-digest": digest},
    }
    return JOB, {"metadata": metadata, "spec": {}, "status": status}


def pod(name: str, component: str, *, ready: bool = True, owner: str = "j") -> tuple[Kind, Object]:
    labels = {"populora.dev/run": "run", "app.kubernetes.io/component": component}
    if component == "trainer":
        labels |= {"batch.kubernetes.io/job-name": "run-trainer-1", "batch.kubernetes.io/job-completion-index": "0"}
    metadata = {"name": name, "uid": name, "labels": labels, "ownerReferences": [{"uid": owner, "controller": True}]}
    conditions = [{"type": "Ready", "status": "True"}] if ready else []
    return POD, {"metadata": metadata, "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": conditions}}


def _run(of: Subject) -> Any:
    assert of.run is not None
    return of.run


RUNNING = children(job(active=1), pod("p", "trainer"))

_statuses = st.fixed_dictionaries(
    {},
    optional={
        "attempts": st.integers(1, 5),
        "step": st.integers(0, 10),
        "activeSeconds": st.integers(0, 1000),
        "evaluatedStep": st.integers(0, 10),
        "phase": st.sampled_from(PHASES),
    },
)
_progress = st.none() | st.builds(
    lambda step, left: Progress.model_validate(
        {
            "step": step,
            "steps": 10,
            "estimatedSecondsRemaining": left,
            "members": [{"name": "t0", "role": "teacher", "mu": 1.0, "sigma": 2.0, "lcb": -5.0}],
        }
    ),
    st.integers(0, 12),
    st.none() | st.floats(0, 1e6),
)
_observed = st.lists(
    st.sampled_from(
        [
            job(active=1),
            job(conditions=[{"type": "Complete", "status": "True"}]),
            job(conditions=[{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "m"}]),
            pod("p", "trainer"),
            pod("p", "trainer", ready=False),
            pod("s", "sandbox"),
            (DEPLOYMENT, {"metadata": {"name": "run-sandbox", "uid": "d"}, "spec": {"replicas": 2}, "status": {}}),
            (
                DEPLOYMENT,
                {
                    "metadata": {"name": "run-sandbox", "uid": "d", "generation": 1},
                    "spec": {"replicas": 2},
                    "status": {"readyReplicas": 2, "replicas": 2, "observedGeneration": 1},
                },
            ),
        ]
    ),
    max_size=4,
).map(lambda items: children(*items))
_specs = st.fixed_dictionaries(
    {},
    optional={
        "suspend": st.booleans(),
        "activeDeadlineSeconds": st.sampled_from([1, 10_000]),
        "retries": st.integers(0, 3),
        "evaluation": st.just({"suites": ["mbpp_plus"], "everySteps": 3}),
        "inference": st.just({"engine": "Transformers"}),
        "trainer": st.just({"podTemplate": {"spec": {"hostNetwork": True}}}),
        "tasks": st.just({"problemsPerMatchup": 7}),
    },
)
_obstacles = st.none() | st.just(Failure("QuotaExceeded", "exceeded quota"))
_times = st.timedeltas(timedelta(0), timedelta(days=2))


@given(_statuses, _observed, _progress, _specs, _obstacles, _times)
def test_nothing_is_written_where_nothing_has_changed(
    status: Object,
    observed: Observed,
    progress: Progress | None,
    spec: Object,
    obstacle: Failure | None,
    first: timedelta,
) -> None:
    of = subject(status, **spec)
    beat = Heartbeat(progress, listening=True)
    written = compute(situation(of, observed, at=START + first, heartbeat=beat, obstacle=obstacle))
    again = subject(json.loads(json.dumps(plain(written))), **spec)
    assert are_equal(again.status, written), "the API server gives back what was written"
    # The same observation a little later says the same; another decision may follow from what was recorded, once.
    second = compute(situation(again, observed, at=START + first, heartbeat=beat, obstacle=obstacle))
    third_subject = subject(json.loads(json.dumps(plain(second))), **spec)
    third = compute(situation(third_subject, observed, at=START + first, heartbeat=beat, obstacle=obstacle))
    fourth = compute(
        situation(
            subject(json.loads(json.dumps(plain(third))), **spec),
            observed,
            at=START + first,
            heartbeat=beat,
            obstacle=obstacle,
        )
    )
    assert are_equal(third, fourth) or third.attempts != fourth.attempts


@given(_statuses, _observed, _progress, _specs, _obstacles, _times)
def test_every_reason_is_a_documented_one_of_its_condition(
    status: Object,
    observed: Observed,
    progress: Progress | None,
    spec: Object,
    obstacle: Failure | None,
    at: timedelta,
) -> None:
    of = subject(status, **spec)
    beat = Heartbeat(progress, listening=True)
    written = compute(situation(of, observed, at=START + at, heartbeat=beat, obstacle=obstacle))
    assert len(written.conditions or ()) == 8
    for condition in written.conditions or ():
        assert condition.type in REASONS[condition.reason].places, condition
        assert condition.message, condition
        assert condition.observed_generation == 3
    assert written.phase is not None
    assert written.reason is not None
    for note in turns(of.status, written):
        assert "Event" in REASONS[note.reason].places or note.reason in REASONS


@given(_statuses, _observed, _observed, _specs, st.timedeltas(timedelta(seconds=1), timedelta(days=1)))
def test_a_conditions_time_changes_exactly_with_its_value(
    status: Object, before: Observed, after: Observed, spec: Object, passed: timedelta
) -> None:
    first = compute(situation(subject(status, **spec), before))
    later = subject(json.loads(json.dumps(plain(first))), **spec)
    second = compute(situation(later, after, at=START + passed))
    old = {condition.type: condition for condition in first.conditions or ()}
    for condition in second.conditions or ():
        known = old[condition.type]
        if condition.status == known.status:
            assert condition.last_transition_time == known.last_transition_time
        else:
            assert condition.last_transition_time == (START + passed).replace(microsecond=0)


def test_a_new_run_has_all_conditions_and_a_phase() -> None:
    status = compute(situation(subject(), children()))
    assert status.phase == "Pending"
    assert status.attempts == 1
    assert status.steps == 10
    assert status.gpus == 8


def test_a_trainer_at_work_is_running_and_tells_its_members() -> None:
    progress = Progress.model_validate(
        {
            "step": 4,
            "steps": 10,
            "estimatedSecondsRemaining": 60.0,
            "members": [{"name": "t0", "role": "teacher", "mu": 1, "sigma": 2, "lcb": -5, "digest": "ab"}],
            "best": {"teacher": "t0", "student": None},
            "solveRate": 0.25,
            "coverage": 0.5,
        }
    )
    status = compute(situation(subject(), RUNNING, heartbeat=Heartbeat(progress, listening=True)))
    assert status.phase == "Running"
    assert status.reason == "Training"
    assert (status.step, status.progress_percent, status.estimated_seconds_remaining) == (4, 40.0, 60)
    assert status.members is not None
    assert status.members[0].adapter_uri == "s3://bucket/run/adapters/ab"
    assert status.best is not None
    assert status.best.teacher == "t0"


def test_members_are_kept_where_an_answer_leaves_them_out() -> None:
    member = {"name": "t0", "role": "teacher", "generation": 1, "mu": 1, "sigma": 2, "lcb": -5, "digest": "ab"}
    answer = {"step": 9, "steps": 10, "members": [member], "solveRate": 0.25}
    first = compute(situation(subject(), RUNNING, heartbeat=Heartbeat(Progress.model_validate(answer))))
    # What a trainer leaves behind is cut short where a termination message would be.
    short = Progress.model_validate({**answer, "step": 10, "members": [], "solveRate": 0.5})
    complete = children(job(conditions=[{"type": "Complete", "status": "True"}]))
    last = compute(situation(subject(plain(first)), complete, heartbeat=Heartbeat(short)))
    assert (last.phase, last.step, last.solve_rate) == ("Completed", 10, 0.5)
    assert last.members == first.members
    assert last.members is not None


def test_a_changed_estimate_alone_is_not_worth_a_write() -> None:
    def told(left: float) -> Heartbeat:
        members = [{"name": "t0", "role": "teacher", "mu": 1, "sigma": 2, "lcb": -5}]
        answer = {"step": 4, "steps": 10, "estimatedSecondsRemaining": left, "members": members}
        return Heartbeat(Progress.model_validate(answer), listening=True)

    first = compute(situation(subject(), RUNNING, heartbeat=told(60)))
    later = subject(json.loads(json.dumps(plain(first))))
    assert are_equal(compute(situation(later, RUNNING, heartbeat=told(48))), first)


@pytest.mark.parametrize(
    ("heartbeat", "reason"),
    [
        (Heartbeat(None, True, timedelta(seconds=30)), "Training"),
        (Heartbeat(None, True, timedelta(seconds=90)), "TrainerUnreachable"),
        (Heartbeat(Progress(step=3, steps=10), True, still=timedelta(minutes=9)), "Training"),
        (Heartbeat(Progress(step=3, steps=10), True, still=timedelta(minutes=11)), "Stalled"),
        (
            Heartbeat(
                Progress(step=3, steps=10, estimated_seconds_remaining=7 * 600), True, still=timedelta(minutes=50)
            ),
            "Training",
        ),
    ],
)
def test_silence_and_standstill_are_told_apart(heartbeat: Heartbeat, reason: str) -> None:
    status = compute(situation(subject(), RUNNING, heartbeat=heartbeat))
    progressing = next(item for item in status.conditions or () if item.type == "Progressing")
    assert progressing.reason == reason


def test_the_largest_population_stays_under_64_kib() -> None:
    digest = "a" * 64
    members = [
        {"name": f"{'m' * 58}{number:04}", "role": "student", "generation": 1_000_000, "mu": 25.123456789012345}
        | {"sigma": 8.123456789012345, "lcb": 0.123456789012345, "digest": digest}
        for number in range(128)
    ]
    progress = Progress.model_validate({"step": 999_999, "steps": 1_000_000, "members": members})
    scores = [
        {"suite": "livecodebench", "member": "m" * 63, "step": 1_000_000, "score": 0.123456789, "problems": 1000}
    ] * 64
    of = subject({"evaluation": scores}, storage={"uri": "s3://bucket/" + "x" * 150})
    full = compute(situation(of, RUNNING, heartbeat=Heartbeat(progress, listening=True), waits="w" * 400))
    assert full.members is not None
    assert len(full.members) == 128
    assert len(json.dumps(plain(full))) < 64 * 1024


def test_conditions_in_another_order_say_the_same() -> None:
    status = compute(situation(subject(), RUNNING))
    assert status.conditions is not None
    assert are_equal(status, status.model_copy(update={"conditions": status.conditions[::-1]}))
    assert not are_equal(status, status.model_copy(update={"step": 9}))


def test_time_without_suspension_is_counted_over_pauses() -> None:
    of = subject()
    first = compute(situation(of, children()))
    paused = subject(plain(first), suspend=True)
    second = compute(situation(paused, children(), at=START + timedelta(seconds=100)))
    assert second.phase == "Suspended"
    assert second.active_seconds == 100
    resumed = subject(plain(second))
    third = compute(situation(resumed, children(), at=START + timedelta(seconds=5000)))
    late = subject(plain(third), activeDeadlineSeconds=150)
    decision = situation(late, children(), at=START + timedelta(seconds=5049)).decision
    assert decision.stage is Stage.TRAINING
    decision = situation(late, children(), at=START + timedelta(seconds=5050)).decision
    assert decision.stage is Stage.FAILED
    assert decision.failure is not None
    assert decision.failure.reason == "DeadlineExceeded"


def test_a_status_that_somebody_has_made_unreadable_is_written_anew() -> None:
    of = subject({"phase": "Dancing", "conditions": "none"})
    assert of.status == Status()
    assert compute(situation(of, RUNNING)).phase == "Running"


def test_the_number_of_an_attempt_is_found_when_the_status_is_lost() -> None:
    kind, item = job(active=1)
    item = {**item, "metadata": {**item["metadata"], "name": "run-trainer-3"}}
    assert compute(situation(subject(), children((kind, item)))).attempts == 3


@pytest.mark.parametrize(
    ("told", "status", "reason", "message"),
    [
        ({"synced": 2}, "True", "Synced", "Every vLLM pod serves what the trainer has published."),
        ({"synced": 1, "waiting": True, "syncSeconds": 3}, "True", "Synced", "Every vLLM pod serves what"),
        (
            {"synced": 1, "waiting": True, "syncSeconds": 40, "message": "10.0.0.2: t0-s000004-1a2b3c4d not loaded"},
            "False",
            "Syncing",
            "1 of 2 vLLM pods serve the adapters of step 4. 10.0.0.2: t0-s000004-1a2b3c4d not loaded",
        ),
        ({"synced": 1, "syncSeconds": 3}, "False", "Syncing", "1 of 2 vLLM pods serve the adapters of step 4."),
        (None, "True", "Synced", "Every vLLM pod serves what"),
    ],
)
def test_adapters_are_synced_where_the_trainer_has_seen_every_pod_serve_them(
    told: dict[str, Any] | None, status: str, reason: str, message: str
) -> None:
    serving = {
        "metadata": {
            "name": "run-serving",
            "uid": "d",
            "generation": 1,
            "ownerReferences": [{"uid": "u", "controller": True}],
        },
        "spec": {"replicas": 2},
        "status": {"readyReplicas": 2, "replicas": 2, "observedGeneration": 1},
    }
    observed = children(job(active=1), pod("p", "trainer"), (DEPLOYMENT, serving))
    answer: dict[str, Any] = {"step": 4, "steps": 10}
    if told is not None:
        answer["serving"] = {"publishedStep": 4, "replicas": 2, **told}
    beat = Heartbeat(Progress.model_validate(answer), listening=True)
    of = subject(inference={"engine": "VLLM", "replicas": 2})
    found = compute(situation(of, observed, heartbeat=beat))
    assert found.conditions is not None
    (condition,) = [one for one in found.conditions if one.type == "AdaptersSynced"]
    assert (condition.status, condition.reason) == (status, reason)
    assert condition.message.startswith(message)
