"""What is known of a run's children: small values made from the API's objects, which are not kept.

500 runs have some ten thousand children; only what a decision rests on stays in memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from populora_operator import names
from populora_operator.cluster.kinds import DEPLOYMENT, JOB, POD, Kind
from populora_operator.cluster.port import Object


@dataclass(frozen=True, slots=True)
class Child:
    """An object that carries the label of a run.

    Attributes:
        kind: its kind.
        name: its name.
        uid: its uid.
        version: its resourceVersion.
        state: what a person could have changed: differs exactly if spec, labels or owner do.
        owner: uid of its controller, None without one.
        deleting: it is on its way out.
    """

    kind: str
    name: str
    uid: str
    version: str
    state: str
    owner: str | None
    deleting: bool


@dataclass(frozen=True, slots=True)
class Deployment(Child):
    """A Deployment.

    Attributes:
        wanted: replicas that are asked for.
        ready: pods that are ready.
        exist: pods that exist, ready or not.
        current: the status is of this generation.
        problem: why the Deployment cannot make pods, None where it can.
    """

    wanted: int
    ready: int
    exist: int
    current: bool
    problem: str | None


@dataclass(frozen=True, slots=True)
class Job(Child):
    """A Job.

    Attributes:
        suspended: spec.suspend, which Kueue sets.
        active: pods that run or wait.
        complete: it has succeeded.
        failed: reason and message of its failure, None without one.
        failed_at: when it did, in RFC 3339; None where it did not.
        failing: it has failed, and pods of it are still ending.
        digest: what the trainer was started with.
        age_from: when it began to run, in RFC 3339; None while suspended.
    """

    suspended: bool
    active: int
    complete: bool
    failed: tuple[str, str] | None
    failed_at: str | None
    failing: bool
    digest: str | None
    age_from: str | None

    @property
    def finished(self) -> bool:
        """Whether it has ended, well or not."""
        return self.complete or self.failed is not None


@dataclass(frozen=True, slots=True)
class Container:
    """A container of a pod.

    Attributes:
        name: its name.
        waiting: reason and message for not running, None where it runs or has ended.
        exit_code: of its last end, None before.
        exit_reason: the runtime's word for that end, e.g. OOMKilled.
        exit_message: its termination message or last log lines.
        restarts: how often it was started again.
    """

    name: str
    waiting: tuple[str, str] | None
    exit_code: int | None
    exit_reason: str
    exit_message: str
    restarts: int


@dataclass(frozen=True, slots=True)
class Pod(Child):
    """A pod.

    Attributes:
        component: what it is for.
        job: name of its Job, None for a Deployment's.
        index: its number in an Indexed Job.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        reason: why it failed, e.g. Evicted.
        message: the same in a sentence.
        ready: it is ready.
        ip: its address, empty before it has one.
        node: its node, empty before it has one.
        unschedulable: the scheduler's message, None where it has a node.
        disrupted: reason and message of a disruption, e.g. a preemption.
        containers: its containers, init containers first.
    """

    component: str
    job: str | None
    index: int | None
    phase: str
    reason: str
    message: str
    ready: bool
    ip: str
    node: str
    unschedulable: str | None
    disrupted: tuple[str, str] | None
    containers: tuple[Container, ...]

    @property
    def ended(self) -> bool:
        """Whether it has ended, well or not."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True)
class Observed:
    """All children that carry the label of one run.

    Attributes:
        children: by kind and name.
    """

    children: Mapping[tuple[str, str], Child]

    def find(self, kind: Kind, name: str) -> Child | None:
        """Return a child by name."""
        return self.children.get((kind.kind, name))

    def owned(self, uid: str) -> Iterator[Child]:
        """Yield the children that belong to the run's object, and not to an earlier one of its name."""
        return (child for child in self.children.values() if child.owner == uid)

    def job(self, name: str) -> Job | None:
        """Return a Job by name."""
        found = self.children.get((JOB.kind, name))
        return found if isinstance(found, Job) else None

    @property
    def jobs(self) -> list[Job]:
        """All Jobs."""
        return [child for child in self.children.values() if isinstance(child, Job)]

    def deployment(self, name: str) -> Deployment | None:
        """Return a Deployment by name."""
        found = self.children.get((DEPLOYMENT.kind, name))
        return found if isinstance(found, Deployment) else None

    def pods(self, component: str) -> list[Pod]:
        """Return the pods of a component by name."""
        found = [child for child in self.children.values() if isinstance(child, Pod) and child.component == component]
        return sorted(found, key=lambda pod: pod.name)

    def pods_of(self, job: Job) -> list[Pod]:
        """Return the pods that a Job has made, by index."""
        found = [child for child in self.children.values() if isinstance(child, Pod) and child.owner == job.uid]
        return sorted(found, key=lambda pod: (pod.index or 0, pod.name))


_MESSAGE_LENGTH = 4096


def child(kind: Kind, item: Object) -> Child:
    """Return what is kept of an object."""
    metadata = item["metadata"]
    common = (
        kind.kind,
        metadata["name"],
        metadata["uid"],
        metadata.get("resourceVersion", ""),
        _state(metadata),
        _owner(metadata),
        metadata.get("deletionTimestamp") is not None,
    )
    if kind is DEPLOYMENT:
        return _deployment(common, item)
    if kind is JOB:
        return _job(common, item)
    if kind is POD:
        return _pod(common, item)
    return Child(*common)


_Common = tuple[str, str, str, str, str, str | None, bool]


def _deployment(common: _Common, item: Object) -> Deployment:
    status = item.get("status") or {}
    wanted = (item.get("spec") or {}).get("replicas")
    return Deployment(
        *common,
        wanted=1 if wanted is None else int(wanted),
        ready=int(status.get("readyReplicas") or 0),
        exist=int(status.get("replicas") or 0),
        current=int(status.get("observedGeneration") or 0) >= int(item["metadata"].get("generation") or 0),
        problem=_condition(status, "ReplicaFailure", "True", "message"),
    )


def _job(common: _Common, item: Object) -> Job:
    status, spec = item.get("status") or {}, item.get("spec") or {}
    reason = _condition(status, "Failed", "True", "reason")
    return Job(
        *common,
        suspended=bool(spec.get("suspend")),
        active=int(status.get("active") or 0),
        complete=_condition(status, "Complete", "True", "reason") is not None,
        failed=None if reason is None else (reason, _condition(status, "Failed", "True", "message") or ""),
        failed_at=_condition(status, "Failed", "True", "lastTransitionTime"),
        failing=reason is None and _condition(status, "FailureTarget", "True", "reason") is not None,
        digest=(item["metadata"].get("annotations") or {}).get(names.DIGEST_ANNOTATION),
        age_from=status.get("startTime"),
    )


def _pod(common: _Common, item: Object) -> Pod:
    labels, status = item["metadata"].get("labels") or {}, item.get("status") or {}
    index = labels.get(names.INDEX_LABEL)
    disrupted = _condition(status, "DisruptionTarget", "True", "reason")
    unschedulable = _condition(status, "PodScheduled", "False", "message")
    if _condition(status, "PodScheduled", "False", "reason") == "SchedulingGated":
        unschedulable = None
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return Pod(
        *common,
        component=labels.get(names.COMPONENT_LABEL, ""),
        job=labels.get(names.JOB_LABEL),
        index=int(index) if index is not None and index.isdigit() else None,
        phase=status.get("phase", "Pending"),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        ready=_condition(status, "Ready", "True", "type") is not None,
        ip=status.get("podIP", ""),
        node=(item.get("spec") or {}).get("nodeName", ""),
        unschedulable=unschedulable,
        disrupted=None
        if disrupted is None
        else (disrupted, _condition(status, "DisruptionTarget", "True", "message") or ""),
        containers=tuple(_container(container) for container in containers),
    )


def _container(status: Object) -> Container:
    state = status.get("state") or {}
    waiting = state.get("waiting")
    ended = state.get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    return Container(
        name=status.get("name", ""),
        waiting=None if waiting is None else (waiting.get("reason", ""), waiting.get("message", "")),
        exit_code=ended.get("exitCode"),
        exit_reason=ended.get("reason", ""),
        exit_message=ended.get("message", "")[-_MESSAGE_LENGTH:],
        restarts=int(status.get("restartCount") or 0),
    )


def _condition(status: Mapping[str, Any], kind: str, value: str, part: str) -> str | None:
    """Return a part of a condition (empty where it has none) if the condition has the value."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == kind:
            return condition.get(part) or "" if condition.get("status") == value else None
    return None


def _state(metadata: Mapping[str, Any]) -> str:
    """Return what changes with spec, labels and owner; for kinds without generation, with anything.

    Those kinds have no status, so that nothing but a person changes them.
    """
    generation = metadata.get("generation")
    if not generation:
        return str(metadata.get("resourceVersion", ""))
    owners = [
        (reference.get("uid"), reference.get("controller")) for reference in metadata.get("ownerReferences") or ()
    ]
    about = repr((sorted((metadata.get("labels") or {}).items()), owners))
    return f"{generation}-{crc32(about.encode()):08x}"


def _owner(metadata: Mapping[str, Any]) -> str | None:
    for reference in metadata.get("ownerReferences") or ():
        if reference.get("controller"):
            return str(reference["uid"])
    return None
