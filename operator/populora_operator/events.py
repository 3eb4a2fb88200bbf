"""Events that a person sees in `kubectl describe`: one for each turn that a run takes."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Literal

from populora_api import Status
from populora_api.status import Condition
from populora_operator.cluster.kinds import EVENT, RUN
from populora_operator.cluster.port import Object
from populora_operator.names import CHILDREN_MANAGER
from populora_operator.subject import Subject

NOTE_LENGTH = 1000

_QUIET = frozenset({"Provisioning", "Waiting", "Ready", "Training", "Finished", "Suspended", "Suspending", "Running"})
# A failure that is tried again is told by its own reason.
_QUIET = _QUIET | {"Evaluating", "NotNeeded", "Retrying"}
_NORMAL = frozenset({"Restarting", "NodeFault", "Queued"})


@dataclass(frozen=True)
class Note:
    """Something that happened.

    Attributes:
        type: Normal, or Warning where a person may have to do something.
        reason: one of `populora_api.reasons`.
        message: a sentence for a person.
    """

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def turns(before: Status, after: Status) -> Iterator[Note]:
    """Yield what happened between two statuses of a run."""
    old = {condition.type: condition for condition in before.conditions or ()}
    for condition in after.conditions or ():
        known = old.get(condition.type)
        if known is not None and (known.status, known.reason) == (condition.status, condition.reason):
            continue
        yield from _turn(condition, known)


def _turn(condition: Condition, known: Condition | None) -> Iterator[Note]:
    match condition.type, condition.status:
        case "Completed", "True":
            yield Note("Normal", "Completed", condition.message)
        case "Failed", "True":
            yield Note("Warning", condition.reason, condition.message)
        case "Suspended", "True":
            yield Note("Normal", "Suspended", condition.message)
        case "Suspended", "False" if known is not None and known.status == "True":
            yield Note("Normal", "Resumed", "The run goes on at its last checkpoint.")
        case "Progressing", "False" if condition.reason not in _QUIET:
            kind: Literal["Normal", "Warning"] = "Normal" if condition.reason in _NORMAL else "Warning"
            yield Note(kind, condition.reason, condition.message)
        case "Progressing", "True" if condition.reason == "Evaluating":
            yield Note("Normal", "Evaluating", condition.message)


def manifest(subject: Subject, note: Note, count: int, first: datetime, identity: str) -> Object:
    """Return the Event. It is named after what it says, so that saying it again counts up and adds none.

    Args:
        subject: the run.
        note: what happened.
        count: how often, as far as this controller knows.
        first: when first.
        identity: of this replica.
    """
    said = sha256(f"{subject.uid} {note.type} {note.reason} {note.message}".encode()).hexdigest()[:16]
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"namespace": subject.namespace, "name": f"{subject.name}.{said}"},
        "involvedObject": {
            "apiVersion": RUN.api_version,
            "kind": RUN.kind,
            "namespace": subject.namespace,
            "name": subject.name,
            "uid": subject.uid,
        },
        "type": note.type,
        "reason": note.reason,
        "message": note.message[:NOTE_LENGTH],
        "count": count,
        "firstTimestamp": _time(first),
        "lastTimestamp": _time(datetime.now(UTC)),
        "reportingComponent": CHILDREN_MANAGER,
        "reportingInstance": identity[:128],
        "source": {"component": CHILDREN_MANAGER},
    }


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
