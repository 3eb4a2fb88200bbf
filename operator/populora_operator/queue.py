"""A work queue of keys: each waits at most once, none is worked on twice at a time, failures wait longer and longer."""

import asyncio
from collections import deque
from dataclasses import dataclass

Key = tuple[str, str]
"""Namespace and name of a run."""

FIRST_BACKOFF_SECONDS = 0.25
LAST_BACKOFF_SECONDS = 60.0


@dataclass(frozen=True)
class Work:
    """A key whose turn it is.

    Attributes:
        key: the run.
        woken: something has happened to it; False where only its time has come.
    """

    key: Key
    woken: bool


class WorkQueue:
    """Keys to reconcile. `take` and `done` frame the work on a key; everything else may be called at any time."""

    def __init__(self) -> None:
        self._ready: deque[Key] = deque()
        self._waiting: dict[Key, bool] = {}  # in _ready: whether woken
        self._working: set[Key] = set()
        self._again: dict[Key, bool] = {}  # added while it was worked on: whether woken
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Keys that wait for a worker; those whose time has not come are not counted."""
        return len(self._waiting) + len(self._again)

    def add(self, key: Key, *, woken: bool = True) -> None:
        """Let a key be worked on as soon as a worker is free, once however often it is added before."""
        if woken or key in self._timers:
            self._cancel_timer(key)
        where = self._again if key in self._working else self._waiting
        if key not in where and key not in self._working:
            self._ready.append(key)
            self._changed.set()
        where[key] = where.get(key, False) or woken

    def add_after(self, key: Key, seconds: float) -> None:
        """Let a key be worked on after some seconds, or earlier where it is to be earlier already."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, seconds)
        if (timer := self._timers.get(key)) is not None and timer.when() <= due:
            return
        self._cancel_timer(key)
        self._timers[key] = loop.call_at(due, self._time_has_come, key)

    def fail(self, key: Key, at_least: float = 0.0) -> float:
        """Let a key be worked on again after a time that doubles with each failure; return that time in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        seconds = max(at_least, min(LAST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 30)))
        self.add_after(key, seconds)
        return seconds

    def succeed(self, key: Key) -> None:
        """Forget a key's failures."""
        self._failures.pop(key, None)

    def forget(self, key: Key) -> None:
        """Forget a key that exists no longer."""
        self.succeed(key)
        self._cancel_timer(key)

    async def take(self) -> Work:
        """Wait for a key whose turn it is; nobody else gets it until `done`."""
        while not self._ready:
            self._changed.clear()
            await self._changed.wait()
        key = self._ready.popleft()
        self._working.add(key)
        return Work(key, self._waiting.pop(key))

    def done(self, key: Key) -> None:
        """End the work on a key."""
        self._working.discard(key)
        if key in self._again:
            self.add(key, woken=self._again.pop(key))

    def close(self) -> None:
        """Cancel every timer."""
        for key in list(self._timers):
            self._cancel_timer(key)

    def _time_has_come(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key, woken=False)

    def _cancel_timer(self, key: Key) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
