"""The protocol of a run's storage: a folder here, a bucket elsewhere."""

import hashlib
import re
from contextlib import AbstractContextManager
from typing import Protocol

from populora_trainer.errors import StorageError

# No part starts with a dot: names with one belong to the store itself (temporary files, the lock).
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


class MissingObject(StorageError):  # noqa: N818 - says what is wrong, as FileNotFoundError's users know it
    """No object of this name exists."""


class AlreadyExists(StorageError):  # noqa: N818
    """An object of this name exists, and the caller asked to be its first writer."""


class ObjectStore(Protocol):
    """Named byte strings. A reader sees an object's old bytes or its new ones, never a part of them.

    Names are relative paths with forward slashes. There is no rename and no folder, so that S3 can do all of it:
    `create` is a PUT with `If-None-Match: *`, `extend` a copy with a new end. Every method raises StorageError, with a
    sentence that names the object, where the storage fails.
    """

    @property
    def location(self) -> str:
        """The folder or URI, for messages."""
        ...

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object's bytes, or a range of them.

        Raises:
            MissingObject: there is no such object.
        """
        ...

    def size(self, key: str) -> int:
        """Return the number of an object's bytes.

        Raises:
            MissingObject: there is no such object.
        """
        ...

    def exists(self, key: str) -> bool:
        """Return whether there is such an object."""
        ...

    def list(self, prefix: str = "") -> list[str]:
        """Return the names of all objects that start with the prefix, sorted."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write an object, over an earlier one if there is any; durable on return."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Write an object that must not exist yet; of two writers exactly one succeeds.

        Raises:
            AlreadyExists: there is such an object.
        """
        ...

    def extend(self, key: str, at: int, data: bytes) -> None:
        """Make an object its first `at` bytes followed by data; durable on return.

        A log grows by this call, and is cut by it. It is the one write that a crash may leave half done in a folder:
        the first `at` bytes are safe, a part of data may follow them. An object that does not exist has 0 bytes.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; one that does not exist is removed already."""
        ...

    def lock(self) -> AbstractContextManager[None]:
        """Hold the run for writing until the context ends or the process dies, and clear what a dead one left.

        Raises:
            StorageError: another process holds it.
        """
        ...


def check_key(key: str) -> str:
    """Return the name if every store can hold it.

    Raises:
        StorageError: it is absolute, leaves the run, or has other characters than letters, digits, `.`, `_` and `-`.
    """
    if not _KEY.fullmatch(key):
        raise StorageError(f"{key!r} can't name an object: letters, digits, '.', '_', '-' in parts joined by '/'")
    return key


def sha256(data: bytes) -> str:
    """Return the digest by which an object is named and checked, 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
