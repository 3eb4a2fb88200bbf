"""What the controller asks of an API server, and what may go wrong."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from populora_operator.cluster.kinds import Kind

Object = dict[str, Any]
"""An object of the API as plain JSON values."""

Propagation = Literal["Background", "Foreground"]


class ClusterError(Exception):
    """The API server refused a request or could not be reached.

    Attributes:
        code: HTTP status, 0 where there was no answer.
        reason: the server's one word.
        retry_after: seconds that the server asks to wait, None where it does not.
    """

    def __init__(self, message: str, *, code: int = 0, reason: str = "", retry_after: float | None = None):
        super().__init__(message)
        self.code, self.reason, self.retry_after = code, reason, retry_after


class NotFoundError(ClusterError):
    """The object or its kind does not exist."""


class ConflictError(ClusterError):
    """The object has changed since it was read, or has another uid."""


class AlreadyExistsError(ConflictError):
    """An object was to be created and one of its name exists."""


class ForbiddenError(ClusterError):
    """Permissions or an admission rule, such as Pod Security, forbid it."""


class QuotaExceededError(ForbiddenError):
    """A ResourceQuota forbids it."""


class NamespaceTerminatingError(ForbiddenError):
    """Nothing can be created in a namespace that is being deleted."""


class InvalidError(ClusterError):
    """The object is not valid."""


class TooManyRequestsError(ClusterError):
    """The server asks to slow down."""


class GoneError(ClusterError):
    """The resource version is too old to watch from: list again."""


class UnavailableError(ClusterError):
    """The server failed or did not answer in time; what was asked may or may not have happened."""


class NotLeadingError(ClusterError):
    """This replica does not lead (any more), so it must not write."""


@dataclass(frozen=True)
class WatchEvent:
    """What happened to an object.

    Attributes:
        type: ADDED, MODIFIED, DELETED or BOOKMARK.
        object: the object after it (before it where deleted); of a bookmark only metadata.resourceVersion.
    """

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object


@dataclass(frozen=True)
class Page:
    """Part of a list.

    Attributes:
        items: objects, without apiVersion and kind.
        resource_version: to watch from, once the last page is there.
        more: token of the next page, empty for the last.
    """

    items: list[Object]
    resource_version: str
    more: str


class Cluster(Protocol):
    """Requests to an API server; every method raises ClusterError."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Return an object as it is now."""
        ...

    async def list(
        self, kind: Kind, namespace: str | None, selector: str = "", *, fields: str = "", more: str = ""
    ) -> Page:
        """Return a page of the objects in a namespace (None: in all) whose labels and fields match."""
        ...

    def watch(
        self, kind: Kind, namespace: str | None, selector: str, resource_version: str, seconds: int
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield what happens from a resource version on; ends after some seconds, or when the connection does."""
        ...

    async def apply(
        self, kind: Kind, item: Object, *, manager: str, create: bool = False, subresource: str | None = None
    ) -> Object:
        """Apply an object on the server under a field manager, taking over fields of others, and return the result.

        Args:
            kind: its kind.
            item: the fields that the manager wants; metadata.uid or .resourceVersion make it conditional.
            manager: the field manager.
            create: raise AlreadyExistsError if an object of the name exists, whoever made it.
            subresource: `status`, or None for the object itself.
        """
        ...

    async def create(self, kind: Kind, item: Object) -> Object:
        """Create an object and return it."""
        ...

    async def replace(self, kind: Kind, item: Object) -> Object:
        """Replace an object; metadata.resourceVersion makes it conditional."""
        ...

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str | None = None, propagation: Propagation = "Background"
    ) -> None:
        """Delete an object if it has the uid; one that is gone is deleted."""
        ...

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server knows the kind."""
        ...
