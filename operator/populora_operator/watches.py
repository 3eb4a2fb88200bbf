"""Watches of children: by label, so that other pods of the cluster cost nothing, and never silently dead."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from populora_operator import names
from populora_operator.cluster.kinds import Kind
from populora_operator.cluster.port import Cluster, ClusterError, GoneError, NotFoundError, Object, UnavailableError
from populora_operator.health import Health
from populora_operator.queue import Key
from populora_operator.store import Store

logger = logging.getLogger(__name__)

WATCH_SECONDS = 50
"""The server ends a watch after this time, so that a silent connection is either quiet or dead for a minute at most."""

FIRST_PAUSE_SECONDS = 0.5
LAST_PAUSE_SECONDS = 15.0


class ChildWatch:
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
        self._cluster, self._kind, self._namespace = cluster, kind, namespace
        self._store, self._health, self._enqueue = store, health, enqueue
        self._version = ""
        self._failures = 0
        self.source = kind.plural if namespace is None else f"{kind.plural} in {namespace}"
        self.listed = asyncio.Event()

    async def run(self) -> None:
        """Watch for ever."""
        self._health.alive(self.source)
        try:
            while True:
                try:
                    if not self._version:
                        await self._list()
                    await self._watch()
                    self._failures = 0
                except ClusterError as error:
                    await self._after(error)
        finally:
            self._health.forget(self.source)

    async def _list(self) -> None:
        items: list[Object] = []
        more = ""
        while True:
            page = await self._cluster.list(self._kind, self._namespace, names.RUN_LABEL, more=more)
            self._health.alive(self.source)
            items += page.items
            more = page.more
            if not more:
                break
        for key in self._store.replace(self._kind, self._namespace, items):
            self._enqueue(key)
        self._version = page.resource_version
        self.listed.set()

    async def _watch(self) -> None:
        events = self._cluster.watch(self._kind, self._namespace, names.RUN_LABEL, self._version, WATCH_SECONDS)
        started = asyncio.get_running_loop().time()
        async with contextlib.aclosing(events):
            async for event in events:
                self._failures = 0
                self._health.alive(self.source)
                self._version = event.object["metadata"]["resourceVersion"]
                if event.type == "BOOKMARK":
                    continue
                if (loser := self._store.move(self._kind, event.object)) is not None:
                    self._enqueue(loser)
                change = self._store.drop if event.type == "DELETED" else self._store.put
                if (key := change(self._kind, event.object)) is not None:
                    self._enqueue(key)
        # The server has ended the watch, which is a sign of life as well, unless it does so all the time.
        if asyncio.get_running_loop().time() - started < 1.0:
            raise UnavailableError("the server ended it at once")
        self._health.alive(self.source)

    async def _after(self, error: ClusterError) -> None:
        """Wait, and list again where the resource version is of no more use."""
        if isinstance(error, GoneError | NotFoundError) or error.code not in (0, 429, 500, 502, 503, 504):
            self._version = ""
        if isinstance(error, GoneError):
            logger.info("watch of %s: listing again: %s", self.source, error)
            return
        pause = min(LAST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 10))
        pause = max(error.retry_after or 0.0, pause * random.uniform(0.5, 1.0))
        self._failures += 1
        logger.warning("watch of %s: again in %.1f s: %s", self.source, pause, error)
        await asyncio.sleep(pause)
