"""What a replica remembers of each run while it leads. All of it may be lost at any moment; nothing rests on it."""

from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from populora_operator.builders.context import Context
from populora_operator.failures import Failure
from populora_operator.observed import Child, Pod
from populora_operator.plan import Applied, Where
from populora_operator.progress import Progress
from populora_operator.status import Heartbeat
from populora_operator.subject import Subject

MAX_EVENTS = 64


@dataclass
class RunMemory:
    """Of one run.

    Attributes:
        subject: as it was last read or written, None before.
        context: of that generation, None where it is not valid.
        applied: how children looked when they were last applied.
        obstacle: why the last pass could not make a child.
        events: how often each Event was said, and when first.
    """

    subject: Subject | None = None
    context: Context | None = None
    applied: dict[Where, Applied] = field(default_factory=dict)
    obstacle: Failure | None = None
    events: OrderedDict[str, tuple[int, datetime]] = field(default_factory=OrderedDict)
    progress: Progress | None = None
    _answered: float | None = None
    _stepped: float | None = None
    _pod: str | None = None

    def hear(self, pod: Pod, progress: Progress | None, clock: float) -> Heartbeat:
        """Take in a trainer's answer, None where it did not answer.

        Args:
            pod: the pod that was asked.
            progress: its answer.
            clock: monotonic seconds.
        """
        if pod.uid != self._pod:
            self._pod, self._answered, self._stepped = pod.uid, clock, clock
        if progress is not None:
            if self.progress is None or self.progress.step != progress.step:
                self._stepped = clock
            self.progress, self._answered = progress, clock
        return self.heartbeat(clock)

    def heartbeat(self, clock: float) -> Heartbeat:
        """Return what is known of the trainer's answers."""
        if self._answered is None or self._stepped is None:
            return Heartbeat(self.progress)
        silent, still = clock - self._answered, clock - self._stepped
        return Heartbeat(self.progress, True, timedelta(seconds=silent), timedelta(seconds=still))

    def without_trainer(self) -> Heartbeat:
        """Note that no trainer runs, and return what is known of its answers."""
        self._pod = self._answered = self._stepped = None
        return Heartbeat(self.progress)

    def note_applied(self, child: Child, digest: str) -> None:
        """Remember how a child looks after it was applied."""
        self.applied[child.kind, child.name] = Applied(digest, child.uid, child.state)

    def count_event(self, name: str, now: datetime) -> tuple[int, datetime]:
        """Return how often an Event is now said, and when first."""
        count, first = self.events.pop(name, (0, now))
        self.events[name] = (count + 1, first)
        while len(self.events) > MAX_EVENTS:
            self.events.popitem(last=False)
        return count + 1, first
