"""Is the controller alive: when did the API server last say anything on each watch?"""

import time
from collections.abc import Callable, Mapping

LIMIT_SECONDS = 75.0
"""A watch is silent for a minute at most (bookmarks, and the server's end of it); beyond this something is broken."""


class Health:
    """Signs of life by what gives them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._last: dict[str, float] = {}

    def alive(self, source: str) -> None:
        """Note a sign of life, e.g. of the watch of `jobs`."""
        self._last[source] = self._clock()

    def forget(self, source: str) -> None:
        """Expect no more signs of life from a source."""
        self._last.pop(source, None)

    def ages(self) -> Mapping[str, float]:
        """Return the seconds since the last sign of life of each source."""
        now = self._clock()
        return {source: now - last for source, last in self._last.items()}

    def problems(self) -> list[str]:
        """Say which sources have been silent for too long."""
        return [
            f"{source}: nothing heard from the API server for {age:.0f} s, at most {LIMIT_SECONDS:.0f} s are normal"
            for source, age in sorted(self.ages().items())
            if age > LIMIT_SECONDS
        ]
