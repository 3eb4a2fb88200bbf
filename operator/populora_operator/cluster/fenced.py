"""A cluster that only writes while this replica leads."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from populora_operator.cluster.kinds import Kind
from populora_operator.cluster.port import (
    Cluster,
    NotLeadingError,
    Object,
    Page,
    Propagation,
    UnavailableError,
    WatchEvent,
)

T = TypeVar("T")


class FencedCluster:
    """Passes reads on, and writes as long as they are sure to end before another replica may lead.

    A write is neither begun without a valid Lease nor waited for longer than the Lease is valid, so that no two
    replicas ever write at the same time, however slow the API server answers.
    """

    def __init__(self, inner: Cluster, remaining: Callable[[], float]):
        """Wrap a cluster.

        Args:
            inner: the cluster.
            remaining: seconds for which this replica may still write.
        """
        self._inner, self._remaining = inner, remaining

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Return an object as it is now."""
        return await self._inner.get(kind, namespace, name)

    async def list(
        self, kind: Kind, namespace: str | None, selector: str = "", *, fields: str = "", more: str = ""
    ) -> Page:
        """Return a page of the objects in a namespace (None: in all) whose labels and fields match."""
        return await self._inner.list(kind, namespace, selector, fields=fields, more=more)

    def watch(
        self, kind: Kind, namespace: str | None, selector: str, resource_version: str, seconds: int
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield what happens from a resource version on."""
        return self._inner.watch(kind, namespace, selector, resource_version, seconds)

    async def apply(
        self, kind: Kind, item: Object, *, manager: str, create: bool = False, subresource: str | None = None
    ) -> Object:
        """Apply an object on the server under a field manager."""
        return await self._write(
            lambda: self._inner.apply(kind, item, manager=manager, create=create, subresource=subresource)
        )

    async def create(self, kind: Kind, item: Object) -> Object:
        """Create an object and return it."""
        return await self._write(lambda: self._inner.create(kind, item))

    async def replace(self, kind: Kind, item: Object) -> Object:
        """Replace an object."""
        return await self._write(lambda: self._inner.replace(kind, item))

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str | None = None, propagation: Propagation = "Background"
    ) -> None:
        """Delete an object if it has the uid."""
        await self._write(lambda: self._inner.delete(kind, namespace, name, uid=uid, propagation=propagation))

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server knows the kind."""
        return await self._inner.serves(kind)

    async def _write(self, request: Callable[[], Awaitable[T]]) -> T:
        left = self._remaining()
        if left <= 0:
            raise NotLeadingError("this replica does not lead")
        try:
            async with asyncio.timeout(left):
                return await request()
        except TimeoutError as error:
            raise UnavailableError("no answer while this replica was sure to lead") from error
