"""The children of all runs as the watches tell them."""

from collections import OrderedDict
from collections.abc import Iterable

from populora_operator import names
from populora_operator.cluster.kinds import Kind
from populora_operator.cluster.port import Object
from populora_operator.observed import Child, Observed, child
from populora_operator.queue import Key

_REMEMBERED = 4096


class Store:
    """Small values of children by run. Not a cache to read objects from: objects are not kept."""

    def __init__(self) -> None:
        self._runs: dict[Key, dict[tuple[str, str], Child]] = {}
        self._homes: dict[tuple[str, str, str], Key] = {}  # run by namespace, kind and name
        self._gone: OrderedDict[str, str] = OrderedDict()  # version by uid, so that a late answer revives nothing

    def observed(self, key: Key) -> Observed:
        """Return the children of a run as they are known now; later changes do not show in it."""
        return Observed(dict(self._runs.get(key, {})))

    def runs(self) -> set[Key]:
        """Return the runs that have children."""
        return set(self._runs)

    def put(self, kind: Kind, item: Object) -> Key | None:
        """Take an object as it is now in, and return its run if anything about it is new.

        An object of an older version than the known one is left out: answers to requests and watch events cross.
        """
        key = _key(item)
        if key is None:
            return None
        new = child(kind, item)
        if new.uid in self._gone and not _is_newer(new.version, self._gone[new.uid]):
            return None
        known = self._runs.setdefault(key, {})
        old = known.get((new.kind, new.name))
        if old is not None and old.uid == new.uid and not _is_newer(new.version, old.version):
            return None
        known[new.kind, new.name] = new
        self._homes[key[0], new.kind, new.name] = key
        return key

    def move(self, kind: Kind, item: Object) -> Key | None:
        """Return the run that has lost an object, because somebody has given it the label of another run."""
        metadata = item["metadata"]
        home = self._homes.get((metadata["namespace"], kind.kind, metadata["name"]))
        if home is None or home == _key(item):
            return None
        self._forget(home, (kind.kind, metadata["name"]))
        return home

    def drop(self, kind: Kind, item: Object) -> Key | None:
        """Forget an object that is gone, or has lost its label, and return its run if it was known."""
        key = _key(item)
        if key is None:
            return None
        self._gone[item["metadata"]["uid"]] = item["metadata"].get("resourceVersion", "")
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        known = self._runs.get(key, {})
        where = (kind.kind, item["metadata"]["name"])
        if where not in known or known[where].uid != item["metadata"]["uid"]:
            return None
        self._forget(key, where)
        return key

    def replace(self, kind: Kind, namespace: str | None, items: Iterable[Object]) -> set[Key]:
        """Take a complete list in, forget what is not in it, and return the runs for which anything is new."""
        changed: set[Key] = set()
        listed: set[tuple[Key, str]] = set()
        for item in items:
            key = _key(item)
            if key is None:
                continue
            listed.add((key, item["metadata"]["name"]))
            if self.put(kind, item) is not None:
                changed.add(key)
        for key, known in list(self._runs.items()):
            if namespace is not None and key[0] != namespace:
                continue
            for where in [w for w in known if w[0] == kind.kind and (key, w[1]) not in listed]:
                self._forget(key, where)
                changed.add(key)
        return changed

    def _forget(self, key: Key, where: tuple[str, str]) -> None:
        known = self._runs.get(key, {})
        known.pop(where, None)
        if not known:
            self._runs.pop(key, None)
        if self._homes.get((key[0], *where)) == key:
            del self._homes[key[0], *where]


def _key(item: Object) -> Key | None:
    metadata = item["metadata"]
    run = (metadata.get("labels") or {}).get(names.RUN_LABEL)
    return None if run is None else (metadata["namespace"], run)


def _is_newer(version: str, than: str) -> bool:
    """Compare resource versions, which are increasing integers in every API server; other texts differ or not."""
    if version.isdigit() and than.isdigit():
        return int(version) > int(than)
    return version != than
