"""Watches: children by label, so that other pods of the cluster cost nothing; none is ever silently dead."""

import abc
import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from populora_operator import names
from populora_operator.cluster.kinds import NAMESPACE, Kind
from populora_operator.cluster.port import (
    Cluster,
    ClusterError,
    ForbiddenError,
    GoneError,
    NotFoundError,
    Object,
    UnavailableError,
    WatchEvent,
)
from populora_operator.health import Health
from populora_operator.queue import Key
from populora_operator.store import Store

logger = logging.getLogger(__name__)

WATCH_SECONDS = 50
"""The server ends a watch after this time, so that a silent connection is either quiet or dead for a minute at most."""

FIRST_PAUSE_SECONDS = 0.5
LAST_PAUSE_SECONDS = 15.0


class Watch(abc.ABC):
    """A watch that is opened again whenever it ends, fails or falls silent.

    Attributes:
        source: what is watched, in words.
        namespace: where; None means everywhere.
        version: resource version to go on from, empty where that is not known.
        answered: set once the server has said what there is, or that this is not to be known.
    """

    def __init__(self, cluster: Cluster, kind: Kind, namespace: str | None, selector: str, health: Health):
        self._cluster, self._kind, self._selector = cluster, kind, selector
        self._health = health
        self._failures = 0
        self.namespace = namespace
        self.version = ""
        self.answered = asyncio.Event()
        self.source = kind.plural if namespace is None else f"{kind.plural} in {namespace}"

    @abc.abstractmethod
    async def begin(self) -> None:
        """Learn what there is, and a version to go on from; a watch without one tells of everything first."""

    @abc.abstractmethod
    def take(self, event: WatchEvent) -> None:
        """Take in what has happened to an object."""

    async def run(self) -> None:
        """Watch for ever."""
        self._health.alive(self.source)
        try:
            while True:
                try:
                    if not self.version:
                        await self.begin()
                    await self._watch()
                    self._failures = 0
                except ClusterError as error:
                    await self._after(error)
        finally:
            self._health.forget(self.source)

    async def _watch(self) -> None:
        events = self._cluster.watch(self._kind, self.namespace, self._selector, self.version, WATCH_SECONDS)
        started = asyncio.get_running_loop().time()
        async with contextlib.aclosing(events):
            async for event in events:
                self._failures = 0
                self._health.alive(self.source)
                self.version = event.object["metadata"]["resourceVersion"]
                if event.type != "BOOKMARK":
                    self.take(event)
        # The server has ended the watch, which is a sign of life as well, unless it does so all the time.
        if asyncio.get_running_loop().time() - started < 1.0:
            raise UnavailableError("the server ended it at once")
        self._health.alive(self.source)

    async def _after(self, error: ClusterError) -> None:
        """Wait, and begin anew where the resource version is of no more use."""
        if isinstance(error, GoneError | NotFoundError) or error.code not in (0, 429, 500, 502, 503, 504):
            self.version = ""
        if isinstance(error, ForbiddenError):
            # The server is well, and a restart would change nothing: the namespace is gone, or rights are missing.
            self._health.alive(self.source)
            self.answered.set()
        if isinstance(error, GoneError):
            logger.info("watch of %s: listing again: %s", self.source, error)
            return
        pause = min(LAST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 10))
        pause = max(error.retry_after or 0.0, pause * random.uniform(0.5, 1.0))
        self._failures += 1
        logger.warning("watch of %s: again in %.1f s: %s", self.source, pause, error)
        await asyncio.sleep(pause)


class ChildWatch(Watch):
    """Keeps the store equal to the cluster for one kind in one namespace (None: in all)."""

    def __init__(
        self,
        cluster: Cluster,
        kind: Kind,
        namespace: str | None,
        store: Store,
        health: Health,
        enqueue: Callable[[Key], None],
    ):
        super().__init__(cluster, kind, namespace, names.RUN_LABEL, health)
        self._store, self._enqueue = store, enqueue
        self.listed = False

    async def begin(self) -> None:
        """List everything page by page, and watch from there."""
        items: list[Object] = []
        more = ""
        while True:
            page = await self._cluster.list(self._kind, self.namespace, self._selector, more=more)
            self._health.alive(self.source)
            items += page.items
            more = page.more
            if not more:
                break
        for key in self._store.replace(self._kind, self.namespace, items):
            self._enqueue(key)
        self.version = page.resource_version
        self.listed = True
        self.answered.set()

    def take(self, event: WatchEvent) -> None:
        """Put an object into the store, or take it out, and wake the runs that it tells something new of."""
        if (loser := self._store.move(self._kind, event.object)) is not None:
            self._enqueue(loser)
        change = self._store.drop if event.type == "DELETED" else self._store.put
        if (key := change(self._kind, event.object)) is not None:
            self._enqueue(key)


class NamespaceWatch(Watch):
    """Knows which namespaces are being deleted: one of them, or (None) all.

    The server waits a few seconds before it empties a namespace. In that time a run that waits for a clean-up can be
    let go of with the rights that a Role in the namespace gives; afterwards the Role may be the first to go.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str | None,
        leaving: set[str],
        health: Health,
        on_leaving: Callable[[str], None],
    ):
        super().__init__(cluster, NAMESPACE, namespace, "", health)
        self._leaving, self._on_leaving = leaving, on_leaving

    async def begin(self) -> None:
        """Leave it to the watch to tell of every namespace that there is: that needs one permission less."""

    def take(self, event: WatchEvent) -> None:
        """Note whether a namespace is being deleted."""
        metadata = event.object["metadata"]
        name = metadata["name"]
        if event.type == "DELETED" or not metadata.get("deletionTimestamp"):
            self._leaving.discard(name)
        elif name not in self._leaving:
            self._leaving.add(name)
            self._on_leaving(name)
