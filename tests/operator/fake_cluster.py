"""An API server in memory: server-side apply, preconditions, generations, finalizers, and what watches would say.

It is strict where the real one is, and simpler: lists are atomic except owners, finalizers and conditions.
"""

import itertools
import marshal
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from populora_operator.cluster.kinds import JOB, POD_MONITOR, Kind
from populora_operator.cluster.port import (
    AlreadyExistsError,
    ClusterError,
    ConflictError,
    InvalidError,
    NamespaceTerminatingError,
    NotFoundError,
    Object,
    Page,
    Propagation,
    WatchEvent,
)

Where = tuple[str, str, str]  # kind, namespace, name

COUNTED = {"Deployment", "Job", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "PopulationRun", "Pod"}
"""Kinds whose metadata.generation counts changes of spec."""

_SETS = {("metadata", "ownerReferences"): "uid", ("metadata", "finalizers"): None, ("status", "conditions"): "type"}


class Killed(BaseException):
    """The controller's process is killed here."""


@dataclass
class FakeCluster:
    """An API server. `writes` counts requests that write; `before` and `after` are called around each of them."""

    objects: dict[Where, Object] = field(default_factory=dict)
    writes: list[tuple[str, str, str]] = field(default_factory=list)
    reads: list[tuple[str, str]] = field(default_factory=list)
    before: Callable[[int], None] = lambda number: None
    after: Callable[[int], None] = lambda number: None
    refuse: Callable[[str, Kind, Object], ClusterError | None] = lambda verb, kind, item: None
    on_event: Callable[[str, Kind, Object], None] = lambda kind_of, kind, item: None
    kinds: set[str] = field(default_factory=set)
    terminating: bool = False

    def __post_init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self._versions = itertools.count(100)
        self._uids = itertools.count(1)
        self._applied: dict[Where, dict[str, set[tuple[str, ...]]]] = {}

    # The protocol

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        self.reads.append(("get", kind.plural))
        return clone(self._at(kind, namespace, name))

    async def list(
        self, kind: Kind, namespace: str | None, selector: str = "", *, fields: str = "", more: str = ""
    ) -> Page:
        self.reads.append(("list", kind.plural))
        found = []
        for (of, where, _), item in self.objects.items():
            labels = item["metadata"].get("labels") or {}
            if of == kind.kind and namespace in (None, where) and (not selector or selector in labels):
                wanted = dict(pair.split("=") for pair in fields.split(",")) if fields else {}
                if all(str(_path(item, path)) == value for path, value in wanted.items()):
                    found.append(clone(item))
        return Page(found, str(next(self._versions)), "")

    async def watch(
        self, kind: Kind, namespace: str | None, selector: str, resource_version: str, seconds: int
    ) -> AsyncGenerator[WatchEvent, None]:
        raise NotImplementedError
        yield

    async def apply(
        self, kind: Kind, item: Object, *, manager: str, create: bool = False, subresource: str | None = None
    ) -> Object:
        metadata = item["metadata"]
        return self._write("apply", kind, item, lambda: self._apply(kind, item, metadata, manager, create, subresource))

    async def create(self, kind: Kind, item: Object) -> Object:
        if self._where(kind, item) in self.objects:
            raise AlreadyExistsError("exists", code=409)
        return self._write("create", kind, item, lambda: self.put(kind, item))

    async def replace(self, kind: Kind, item: Object) -> Object:
        live = self._at(kind, item["metadata"]["namespace"], item["metadata"]["name"])
        if (version := item["metadata"].get("resourceVersion")) and version != live["metadata"]["resourceVersion"]:
            raise ConflictError("modified", code=409)
        return self._write("update", kind, item, lambda: self.put(kind, item))

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str | None = None, propagation: Propagation = "Background"
    ) -> None:
        live = self.objects.get((kind.kind, namespace, name))
        if live is not None and uid is not None and live["metadata"]["uid"] != uid:
            raise ConflictError("another uid", code=409)
        item = live or {"metadata": {"namespace": namespace, "name": name}}

        def act() -> Object:
            if live is not None:
                self.remove(kind, namespace, name, foreground=propagation == "Foreground")
            return {}

        self._write("delete", kind, item, act)

    async def serves(self, kind: Kind) -> bool:
        return kind is not POD_MONITOR or "PodMonitor" in self.kinds

    # What tests and played controllers do

    def put(self, kind: Kind, item: Object, *, status: bool = True) -> Object:
        """Create or replace an object as an administrator would."""
        where = self._where(kind, item)
        live = self.objects.get(where)
        new = clone(item)
        new.setdefault("apiVersion", kind.api_version)
        new.setdefault("kind", kind.kind)
        if live is not None and not status:
            new["status"] = live.get("status")
        return self._store(kind, where, live, new)

    def edit(self, kind: Kind, name: str, change: Callable[[Object], None], namespace: str = "ns") -> Object:
        """Change an object in place."""
        item = clone(self._at(kind, namespace, name))
        change(item)
        return self.put(kind, item)

    def remove(self, kind: Kind, namespace: str, name: str, *, foreground: bool = False) -> None:
        """Delete an object; one with finalizers, or deleted in the foreground, only begins to go."""
        where = (kind.kind, namespace, name)
        live = self.objects.get(where)
        if live is None:
            return
        if live["metadata"].get("finalizers") or foreground:
            if live["metadata"].get("deletionTimestamp") is None:
                new = clone(live)
                new["metadata"]["deletionTimestamp"] = stamp(self.now)
                self._store(kind, where, live, new)
            return
        self._drop(kind, where)

    def of(self, kind: Kind) -> Sequence[Object]:
        """Return the objects of a kind by name."""
        return [self.objects[where] for where in sorted(self.objects) if where[0] == kind.kind]

    def one(self, kind: Kind, name: str, namespace: str = "ns") -> Object:
        """Return an object."""
        return self._at(kind, namespace, name)

    def has(self, kind: Kind, name: str, namespace: str = "ns") -> bool:
        """Whether an object exists."""
        return (kind.kind, namespace, name) in self.objects

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(seconds=seconds)

    # Inside

    def _write(self, verb: str, kind: Kind, item: Object, act: Callable[[], Object]) -> Object:
        number = len(self.writes)
        self.before(number)
        self.writes.append((verb, kind.kind, item["metadata"]["name"]))
        if (error := self.refuse(verb, kind, item)) is not None:
            raise error
        result = clone(act())
        self.after(number)
        return result

    def _apply(
        self, kind: Kind, item: Object, metadata: Object, manager: str, create: bool, subresource: str | None
    ) -> Object:
        where = self._where(kind, item)
        live = self.objects.get(where)
        if live is None:
            if metadata.get("uid") or subresource:
                raise (NotFoundError if subresource else ConflictError)("no such object", code=404)
            if self.terminating:
                raise NamespaceTerminatingError("the namespace is being terminated", code=403)
        elif create:
            raise AlreadyExistsError("exists", code=409)
        elif metadata.get("uid") and metadata["uid"] != live["metadata"]["uid"]:
            raise ConflictError("another uid", code=409)
        elif metadata.get("resourceVersion") and metadata["resourceVersion"] != live["metadata"]["resourceVersion"]:
            raise ConflictError("modified", code=409)
        part = {"status": item.get("status")} if subresource == "status" else _without(item, "status")
        part = clone(part)
        for name in ("uid", "resourceVersion"):
            part.get("metadata", {}).pop(name, None)
        new = clone(live) if live is not None else {"apiVersion": kind.api_version, "kind": kind.kind}
        managers = self._applied.setdefault(where, {})
        leaves = set(_leaves(part))
        for leaf in managers.get(manager + (subresource or ""), set()) - leaves:
            if not any(leaf in others for name, others in managers.items() if name != manager + (subresource or "")):
                _delete(new, leaf)
        managers[manager + (subresource or "")] = leaves
        for leaf in leaves:
            _set(new, leaf, part)
        if kind is JOB and live is not None and new["spec"]["template"] != live["spec"]["template"]:
            raise InvalidError("spec.template: field is immutable", code=422)
        return self._store(kind, where, live, new)

    def _store(self, kind: Kind, where: Where, live: Object | None, new: Object) -> Object:
        metadata = new["metadata"]
        if live is None:
            metadata["uid"] = f"uid-{next(self._uids)}"
            metadata["creationTimestamp"] = stamp(self.now)
            if kind.kind in COUNTED:
                metadata["generation"] = 1
        else:
            for name in ("uid", "creationTimestamp", "generation", "deletionTimestamp"):
                if name in live["metadata"]:
                    metadata.setdefault(name, live["metadata"][name])
            if kind.kind in COUNTED and new.get("spec") != live.get("spec"):
                metadata["generation"] = live["metadata"]["generation"] + 1
            metadata["resourceVersion"] = live["metadata"]["resourceVersion"]
            if new == live:
                return live
        metadata["resourceVersion"] = str(next(self._versions))
        self.objects[where] = new
        held = bool(live is not None and live["metadata"].get("finalizers"))
        if held and metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
            self._drop(kind, where)
            return new
        self.on_event("ADDED" if live is None else "MODIFIED", kind, clone(new))
        return new

    def _drop(self, kind: Kind, where: Where) -> None:
        gone = self.objects.pop(where)
        self._applied.pop(where, None)
        self.on_event("DELETED", kind, clone(gone))

    def finish(self, kind: Kind, item: Object) -> None:
        """Take an object away that was deleted in the foreground, once its dependants are gone."""
        self._drop(kind, self._where(kind, item))

    def _at(self, kind: Kind, namespace: str, name: str) -> Object:
        try:
            return self.objects[kind.kind, namespace, name]
        except KeyError:
            raise NotFoundError(f"{kind.plural} {name} not found", code=404) from None

    def _where(self, kind: Kind, item: Object) -> Where:
        return kind.kind, item["metadata"]["namespace"], item["metadata"]["name"]


def clone(value: Any) -> Any:
    """Return a deep copy of JSON values; `copy.deepcopy` takes most of a test's time."""
    return marshal.loads(marshal.dumps(value))


def stamp(moment: datetime) -> str:
    """Return a time as the API server writes it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _without(item: Object, name: str) -> Object:
    return {key: value for key, value in item.items() if key != name}


def _path(item: Any, path: str) -> Any:
    for part in path.split("."):
        item = item.get(part) if isinstance(item, dict) else None
    return item


def _leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of everything that is no mapping; items of sets have paths of their own."""
    if path in _SETS and isinstance(value, list):
        key = _SETS[path]
        return [(*path, f"={item[key] if key else item}") for item in value]
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
    return [path] if path else []


def _set(target: Object, leaf: tuple[str, ...], source: Any) -> None:
    for depth, part in enumerate(leaf[:-1]):
        where, inside = leaf[: depth + 1], _SETS.get(leaf[: depth + 1], "")
        source = source[part]
        if inside != "":
            items = target.setdefault(part, [])
            wanted = leaf[-1][1:]
            found = next(item for item in source if (item[inside] if inside else item) == wanted)
            old = [index for index, item in enumerate(items) if (item[inside] if inside else item) == wanted]
            if old:
                items[old[0]] = clone(found)
            else:
                items.append(clone(found))
            return
        assert where
        if not isinstance(target.get(part), dict):
            target[part] = {}
        target = target[part]
    target[leaf[-1]] = clone(source[leaf[-1]])


def _delete(target: Object, leaf: tuple[str, ...]) -> None:
    for depth, part in enumerate(leaf[:-1]):
        inside = _SETS.get(leaf[: depth + 1], "")
        if inside != "":
            wanted = leaf[-1][1:]
            target[part] = [item for item in target.get(part, []) if (item[inside] if inside else item) != wanted]
            return
        target = target.get(part) or {}
    target.pop(leaf[-1], None)
