"""Faults of the disk and of the process, put under `LocalStore` at the level of its system calls."""

import errno
import os
import signal
from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

from populora_trainer.storage import local


class FaultyOs:
    """The module `os` as `LocalStore` sees it: every call that changes the disk is an event, and one event goes wrong.

    `write` is two events, before and in the middle of its bytes, so that a crash leaves a part of them.
    """

    def __init__(self, at: int | None, fail: Callable[[str], None], only: tuple[str, ...] = ()) -> None:
        self.at = at
        self.fail = fail
        self.only = only
        self.events: list[str] = []

    def __getattr__(self, name: str) -> object:
        found = getattr(os, name)
        if name in ("fsync", "ftruncate", "link", "replace", "unlink", "rmdir"):

            def counted(*args: object) -> object:
                self.event(name)
                # A killed process loses nothing that it has written, so the tests needn't wait for the disk.
                return None if name == "fsync" else found(*args)

            return counted
        return found

    def open(self, path: object, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            self.event("open")
        return os.open(path, flags, *mode)

    def write(self, descriptor: int, data: memoryview) -> int:
        self.event("write")
        half = len(data) // 2
        if half:
            os.write(descriptor, data[:half])
            self.event("write")
        return half + os.write(descriptor, data[half:])

    def event(self, name: str) -> None:
        if self.only and name not in self.only:
            return
        self.events.append(name)
        if self.at == len(self.events):
            self.fail(name)


def die(_: str) -> None:
    """Be killed, without a chance to clean up."""
    os.kill(os.getpid(), signal.SIGKILL)


def raises(number: int) -> Callable[[str], None]:
    """Return a fault that the kernel reports by an error number."""

    def fail(_: str) -> None:
        raise OSError(number, os.strerror(number))

    return fail


disk_full = raises(errno.ENOSPC)


@contextmanager
def faults(at: int | None, fail: Callable[[str], None], only: tuple[str, ...] = ()):
    """Let the event number `at` go wrong while the context lasts; yields the recorder of events."""
    faulty = FaultyOs(at, fail, only)
    with mock.patch.object(local, "os", faulty):
        yield faulty
