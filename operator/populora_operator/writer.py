"""Carries changes to the API server, and says what stood in the way."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from populora_operator.cluster.kinds import DEPLOYMENT, JOB, Kind
from populora_operator.cluster.port import (
    AlreadyExistsError,
    Cluster,
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NamespaceTerminatingError,
    Object,
    QuotaExceededError,
)
from populora_operator.failures import Failure
from populora_operator.memory import RunMemory
from populora_operator.names import ADOPTION_MANAGER, CHILDREN_MANAGER
from populora_operator.observed import child
from populora_operator.plan import Change
from populora_operator.store import Store
from populora_operator.subject import Subject

logger = logging.getLogger(__name__)

_MESSAGE_LENGTH = 700
_PODS = (DEPLOYMENT, JOB)


@dataclass(frozen=True)
class Outcome:
    """How it went.

    Attributes:
        done: changes that were made.
        obstacle: why the API server refuses a child, None where it does not.
        terminating: the namespace is being deleted, so that nothing can be made in it.
        conflict: something changed meanwhile, so that another pass is needed at once.
    """

    done: tuple[Change, ...] = ()
    obstacle: Failure | None = None
    terminating: bool = False
    conflict: bool = False


class Writer:
    """Makes changes one after the other; where a child is refused, no pods are made, and all others are."""

    def __init__(self, cluster: Cluster, store: Store):
        self._cluster, self._store = cluster, store

    async def carry_out(self, changes: Sequence[Change], subject: Subject, memory: RunMemory) -> Outcome:
        """Make changes.

        Raises:
            ClusterError: the API server cannot be reached, or this replica does not lead; the rest is left undone.
        """
        done: list[Change] = []
        obstacle: Failure | None = None
        conflict = False
        for change in changes:
            if obstacle is not None and change.action == "create" and change.kind in _PODS:
                # No pod without what it rests on: its configuration, its identity, and above all its isolation.
                continue
            try:
                await self._make(change, subject, memory)
                done.append(change)
            except NamespaceTerminatingError as error:
                logger.info("%s/%s: %s", subject.namespace, subject.name, error)
                return Outcome(tuple(done), obstacle, terminating=True)
            except NameTakenError as error:
                obstacle = obstacle or Failure("NameTaken", str(error))
            except ConflictError as error:
                logger.debug("%s/%s: %s", subject.namespace, subject.name, error)
                conflict = True
            except (ForbiddenError, InvalidError) as error:
                obstacle = obstacle or _refusal(change, error)
        return Outcome(tuple(done), obstacle, conflict=conflict)

    async def _make(self, change: Change, subject: Subject, memory: RunMemory) -> None:
        if change.action == "delete":
            memory.applied.pop(change.where, None)
            await self._cluster.delete(
                change.kind, subject.namespace, change.where[1], uid=change.uid, propagation=change.propagation
            )
            return
        assert change.wanted is not None
        manifest = change.wanted.build()
        if change.action == "create":
            try:
                made = await self._cluster.apply(change.kind, manifest, manager=CHILDREN_MANAGER, create=True)
            except AlreadyExistsError:
                made = await self._recover(change, manifest, subject, memory)
        else:
            made = await self._repair(change.kind, manifest, str(change.uid))
        self._store.put(change.kind, made)
        memory.note_applied(child(change.kind, made), change.wanted.digest)

    async def _recover(self, change: Change, manifest: Object, subject: Subject, memory: RunMemory) -> Object:
        """Repair a child of ours that is not known as one any more, because its labels or its owner were taken away.

        Raises:
            NameTakenError: it is not ours.
        """
        kind, name = change.kind, change.where[1]
        page = await self._cluster.list(kind, subject.namespace, fields=f"metadata.name={name}")
        for item in page.items:
            metadata = item["metadata"]
            owners = [owner.get("uid") for owner in metadata.get("ownerReferences") or () if owner.get("controller")]
            applied = memory.applied.get(change.where)
            made = applied is not None and applied.uid == metadata["uid"]
            if subject.uid in owners or (not owners and (made or (kind is not JOB and _is_ours(metadata)))):
                give_back = self._adopt if kind is JOB else self._repair
                return await give_back(kind, manifest, metadata["uid"])
            raise NameTakenError(f"The {kind.kind} {name} exists and belongs to something else.")
        raise ConflictError(f"the {kind.kind} {name} came and went")

    async def _repair(self, kind: Kind, manifest: Object, uid: str) -> Object:
        repaired = {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}
        return await self._cluster.apply(kind, repaired, manager=CHILDREN_MANAGER)

    async def _adopt(self, kind: Kind, manifest: Object, uid: str) -> Object:
        """Give a Job its labels and its owner back. Its template stays: it cannot change, and a new one may differ."""
        given = ("name", "namespace", "labels", "ownerReferences")
        metadata = {key: manifest["metadata"][key] for key in given if key in manifest["metadata"]}
        item = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {**metadata, "uid": uid}}
        return await self._cluster.apply(kind, item, manager=ADOPTION_MANAGER)


def _is_ours(metadata: Object) -> bool:
    """Whether the server has noted that this controller applied the object; nobody else applies under its name."""
    managers = metadata.get("managedFields") or ()
    return any(entry.get("manager") == CHILDREN_MANAGER and entry.get("operation") == "Apply" for entry in managers)


class NameTakenError(ClusterError):
    """An object of the name exists and is not the run's."""


def _refusal(change: Change, error: ClusterError) -> Failure:
    if isinstance(error, QuotaExceededError):
        reason = "QuotaExceeded"
    else:
        reason = "Forbidden" if isinstance(error, ForbiddenError) else "InvalidChild"
    message = " ".join(str(error).split())[:_MESSAGE_LENGTH]
    return Failure(reason, f"{change.where[0]} {change.where[1]}: {message}")
