"""Which children a run should have, and what to write so that it has them. Pure: equal inputs give equal plans."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from hashlib import sha256

from populora_operator import names
from populora_operator.builders.accounts import service_account
from populora_operator.builders.cleanup import cleanup_job
from populora_operator.builders.config import config_map
from populora_operator.builders.context import Context, Manifest
from populora_operator.builders.evaluation import evaluation_job
from populora_operator.builders.monitoring import pod_monitor
from populora_operator.builders.policies import default_deny, sandbox_policy, serving_policy, trainer_policy
from populora_operator.builders.sandbox import sandbox_deployment, sandbox_service
from populora_operator.builders.serving import disruption_budget, serving_deployment, serving_service
from populora_operator.builders.trainer import trainer_job, trainer_service
from populora_operator.cluster.kinds import BY_NAME, CHILDREN, CONFIG_MAP, JOB, NETWORK_POLICY, POD, Kind
from populora_operator.cluster.port import Propagation
from populora_operator.lifecycle import CLEANUP_TRIES, Decision, Stage, live_pods
from populora_operator.observed import Child, Job, Observed, Pod
from populora_operator.subject import FOREGROUND, Subject

Where = tuple[str, str]
"""Kind and name of a child."""


@dataclass(frozen=True, eq=False, slots=True)
class Wanted:
    """A child that should exist.

    Attributes:
        kind: its kind.
        name: its name.
        digest: of the fields that it should have.
        once: it is made and then left alone, like a Job, whose spec cannot change.
        owned: it belongs to the run.
        build: returns those fields. They are not kept: the manifests of 500 runs would fill memory.
    """

    kind: Kind
    name: str
    digest: str
    once: bool
    owned: bool
    build: Callable[[], Manifest]

    @property
    def where(self) -> Where:
        """Kind and name."""
        return self.kind.kind, self.name


@dataclass(frozen=True, eq=False)
class Desired:
    """The children that a run should have.

    Attributes:
        wanted: those to be made or kept as they should be.
        kept: those that may be there and are neither made nor changed.
        everything: children that are in neither of the two are to go; False where nothing is to be touched.
        waits: why a child is not made yet, None where nothing waits.
    """

    wanted: tuple[Wanted, ...] = ()
    kept: frozenset[Where] = frozenset()
    everything: bool = True
    waits: str | None = None


@dataclass(frozen=True)
class Applied:
    """How a child looked when it was last applied.

    Attributes:
        digest: of what was applied.
        uid: of the child.
        state: of the child.
    """

    digest: str
    uid: str
    state: str


@dataclass(frozen=True, eq=False)
class Change:
    """Something to write.

    Attributes:
        action: `create` fails where the name is taken, `apply` repairs, `delete` deletes the child with this uid.
        where: kind and name.
        wanted: what to create or apply.
        uid: of the child to delete or to repair.
        propagation: of a deletion: in the foreground the child stays visible until its own children are gone.
    """

    action: str
    where: Where
    wanted: Wanted | None = None
    uid: str | None = None
    propagation: Propagation = "Background"

    @property
    def kind(self) -> Kind:
        """Kind of the child."""
        return BY_NAME[self.where[0]]


def wanted(build: Callable[[], Manifest], *, once: bool = False) -> Wanted:
    """Return what a builder builds as something that should exist."""
    manifest = build()
    metadata = manifest["metadata"]
    digest = sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    return Wanted(
        BY_NAME[manifest["kind"]], metadata["name"], digest, once, owned="ownerReferences" in metadata, build=build
    )


def desired(
    subject: Subject, context: Context | None, decision: Decision, observed: Observed, now: datetime
) -> Desired:
    """Return the children that a run should have at a time."""
    match decision.stage:
        case Stage.INVALID | Stage.BLOCKED | Stage.GONE:
            return Desired(everything=False)
        case Stage.DELETING:
            return _deleting(subject, context, observed)
        case Stage.COMPLETED | Stage.FAILED:
            config = [wanted(partial(config_map, context))] if context is not None else []
            return Desired(tuple(config), _finished_jobs(observed) | {(CONFIG_MAP.kind, names.config(subject.name))})
    assert context is not None
    if decision.stage is Stage.SUSPENDED:
        serving = observed.deployment(names.serving(subject.name)) is not None
        # A trainer that finishes its step samples and verifies to its end.
        replicas = None if live_pods(observed, "trainer") else 0
        return Desired(_standing(context, replicas=replicas, serving=serving), _finished_jobs(observed))
    if decision.stage is Stage.EVALUATING:
        assert decision.evaluate is not None
        evaluation = wanted(partial(evaluation_job, context, decision.evaluate), once=True)
        return Desired((*_standing(context, serving=False), evaluation), _finished_jobs(observed))
    return _training(subject, context, decision, observed, now)


def changes(target: Desired, subject: Subject, observed: Observed, applied: Mapping[Where, Applied]) -> list[Change]:
    """Return what to write so that the children become as desired: deletions first, which free resources.

    Args:
        target: what is desired.
        subject: the run.
        observed: its children.
        applied: how they looked when they were last applied.
    """
    if not target.everything:
        return []
    found = _deletions(target, subject, observed)
    for item in target.wanted:
        child = observed.children.get(item.where)
        if child is None:
            found.append(Change("create", item.where, item))
        elif child.owner != subject.uid and item.owned:
            # It is somebody else's, or an earlier run's and will be collected: creating it tells which.
            found.append(Change("create", item.where, item))
        elif (
            not child.deleting
            and not item.once
            and applied.get(item.where) != Applied(item.digest, child.uid, child.state)
        ):
            found.append(Change("apply", item.where, item, child.uid))
    return found


def _deletions(target: Desired, subject: Subject, observed: Observed) -> list[Change]:
    keep = target.kept | {item.where for item in target.wanted}
    found = []
    for child in observed.owned(subject.uid):
        where = (child.kind, child.name)
        if child.kind == POD.kind or child.deleting or where in keep:
            continue
        # A Job stays visible until its pods are gone, so that no two trainers ever run.
        propagation: Propagation = "Foreground" if child.kind == JOB.kind else "Background"
        found.append(Change("delete", where, uid=child.uid, propagation=propagation))
    return sorted(found, key=lambda change: change.where)


def _standing(context: Context, *, replicas: int | None = None, serving: bool = True) -> tuple[Wanted, ...]:
    """Return everything but Jobs, in the order in which it is made."""
    key = ("standing", replicas, serving)
    known: tuple[Wanted, ...] | None = context.memo.get(key)
    if known is not None:
        return known
    builders: list[Callable[[], Manifest]] = [
        partial(config_map, context),
        partial(service_account, context, "trainer"),
        partial(service_account, context, "sandbox"),
        partial(default_deny, context),
        partial(trainer_policy, context),
        partial(sandbox_policy, context),
        partial(sandbox_service, context),
        partial(trainer_service, context),
        partial(sandbox_deployment, context, replicas=replicas),
    ]
    if context.serves and serving:
        builders += [
            partial(service_account, context, "serving"),
            partial(serving_policy, context),
            partial(serving_service, context),
            partial(disruption_budget, context),
            partial(serving_deployment, context, replicas=replicas),
        ]
    if context.spec.monitoring.pod_monitor and context.facts.pod_monitors:
        builders.append(partial(pod_monitor, context))
    order = {kind: number for number, kind in enumerate(CHILDREN)}
    made = tuple(sorted((wanted(build) for build in builders), key=lambda item: order[item.kind]))
    context.memo[key] = made
    return made


def _training(subject: Subject, context: Context, decision: Decision, observed: Observed, now: datetime) -> Desired:
    jobs: list[Wanted] = []
    kept = _last_attempts(subject, decision, observed)
    waits = None
    name = names.trainer_job(subject.name, decision.attempt)
    job = observed.job(name)
    pods = live_pods(observed, "trainer")
    own = job is not None and job.owner == subject.uid
    if decision.restart or (job is not None and own and job.deleting):
        kept -= {(JOB.kind, name)}
        waits = _waits_for(pods)
    elif own:
        kept |= {(JOB.kind, name)}
    elif pods and not (job is not None and job.owner is None):
        waits = _waits_for(pods)
    elif decision.not_before is None or now >= decision.not_before:
        build = partial(trainer_job, context, decision.attempt, avoid=decision.avoids(now))
        jobs.append(wanted(build, once=True))
    if decision.evaluate is not None:
        jobs.append(wanted(partial(evaluation_job, context, decision.evaluate), once=True))
    return Desired((*_standing(context), *jobs), kept, waits=waits)


def _waits_for(pods: Sequence[Pod]) -> str | None:
    """Say which pods must end before another trainer starts: two of them must never write to one storage."""
    if not pods:
        return None
    where = f" on node {pods[0].node}" if pods[0].node else ""
    return f"The trainer starts again when the pod {pods[0].name}{where} has ended."


def _last_attempts(subject: Subject, decision: Decision, observed: Observed) -> frozenset[Where]:
    """Return the Jobs whose pods a person may want to read: the last failed attempt and the last evaluation."""
    numbered = [(names.step_of(subject.name, job.name), job) for job in observed.jobs]
    steps = [step for step, job in numbered if step is not None and (job.finished or step == decision.evaluate)]
    found = {(JOB.kind, names.trainer_job(subject.name, decision.attempt - 1))}
    if steps:
        found.add((JOB.kind, names.evaluation_job(subject.name, max(steps))))
    return frozenset(found)


def _finished_jobs(observed: Observed) -> frozenset[Where]:
    return frozenset((job.kind, job.name) for job in observed.jobs if job.finished)


def _deleting(subject: Subject, context: Context | None, observed: Observed) -> Desired:
    """Stop everything that writes, then delete what is stored."""
    policies = frozenset((NETWORK_POLICY.kind, name) for kind, name in observed.children if kind == NETWORK_POLICY.kind)
    cleanups = [
        (number, job)
        for job in observed.jobs
        if (number := names.cleanup_number_of(subject.name, job.name)) is not None
    ]
    kept = policies | {(job.kind, job.name) for _, job in cleanups}
    if context is None:
        return Desired(kept=kept)
    writers = [job for job in observed.jobs if job.owner == subject.uid and not _is_cleanup(subject, job)]
    if writers or live_pods(observed, "trainer", "evaluation"):
        return Desired(kept=kept, waits="Pods that write to storage have not ended yet.")
    return Desired(_next_cleanup(subject, context, [(number, job) for number, job in cleanups]), kept)


def _next_cleanup(subject: Subject, context: Context, cleanups: Iterable[tuple[int, Job]]) -> tuple[Wanted, ...]:
    tries = dict(cleanups)
    last = max(tries, default=0)
    if last and tries[last].failed is None:
        return ()
    if last >= CLEANUP_TRIES:
        return ()
    owned = FOREGROUND not in subject.finalizers
    return (wanted(partial(cleanup_job, context, last + 1, owned=owned), once=True),)


def _is_cleanup(subject: Subject, job: Child) -> bool:
    return names.cleanup_number_of(subject.name, job.name) is not None
