"""Signals that ask a run to stop: what the first and the second one mean, and how long the step may still take.

A second Ctrl-C ends the process where it stands, as a kill would, from which every run goes on at its last checkpoint.
An exception instead would end the event loop at any of its lines, and each task that it breaks would print its own.
"""

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

TOO_LONG = "The step takes longer than --grace allows; the run is left at its last checkpoint"
INTERRUPTED = "Interrupted; the run is left at its last checkpoint"
_STOPS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Takes the first SIGINT or SIGTERM as a wish to stop after this step; a SIGINT after it ends at once.

    A context manager: signals mean that between its begin and its end.

    Args:
        say: prints a sentence.
        abandon: called in a thread with a signal and a sentence; it must end the process.
        grace_seconds: after which the step is no longer waited for and `abandon` is called with the first signal;
            None waits for it however long it takes.

    Attributes:
        asked: the first signal, None as long as there was none.
    """

    def __init__(
        self,
        say: Callable[[str], object],
        abandon: Callable[[int, str], object],
        grace_seconds: float | None = None,
    ) -> None:
        self.asked: int | None = None
        self._taken = False
        self._say = say
        self._grace = grace_seconds
        self._abandon = abandon
        self._timer: threading.Timer | None = None

    def hear(self, number: int) -> None:
        """Take a signal that came to another process of this run."""
        if self.asked is not None:
            return
        self.asked = number
        if self._grace is not None:
            self._timer = threading.Timer(self._grace, self._abandon, (number, TOO_LONG))
            self._timer.daemon = True
            self._timer.start()
        # A signal may have come in the middle of a line to the same stream, which allows no second one inside.
        with suppress(RuntimeError):
            self._say("Stopping after this step; Ctrl-C again stops now, at the last checkpoint.")

    def _take(self, number: int, frame: FrameType | None) -> None:
        # Ctrl-C may reach all processes of a run at once: what the others tell of it is not the second one.
        if self._taken and number == signal.SIGINT:
            # In a thread: what the signal came in the middle of may hold a lock that the others' news need.
            threading.Thread(target=self._abandon, args=(number, INTERRUPTED), daemon=True).start()
            return
        self._taken = True
        self.hear(number)

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._take) for number in _STOPS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
