"""The lanes of a pool: starts them, says which are idle, and puts new ones in the place of those that end.

A lane that is killed from outside, or cannot be started for lack of memory or processes, is started again: at once the
first time, and after pauses that grow where it keeps ending before a run is finished. Nothing here waits for a process
to start, so one lane's trouble is not the others'.
"""

import contextlib
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass

from populora_trainer.errors import SandboxError
from populora_trainer.sandbox.kernel import OPTIONAL_LAYERS
from populora_trainer.sandbox.lane import Lane

_START_SECONDS = 60.0  # for a zygote to load its modules
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds between starts of one lane
_STEADY_SECONDS = 60.0  # in service, after which the end of a lane counts as its first again


@dataclass(slots=True)
class _Place:
    """Where a lane stands or is to stand.

    Attributes:
        lane: None while a new one is not yet to be started.
        ready: whether it is in service.
        changed: when it got ready, or when its start began.
        ends: in a row without a finished run between them.
        start_at: the earliest moment of the next start.
    """

    lane: Lane | None = None
    ready: bool = False
    changed: float = 0.0
    ends: int = 0
    start_at: float = 0.0


class Crew:
    """The lanes of all hash seeds; lane i has the seed i % number of seeds."""

    def __init__(
        self,
        seeds: Sequence[int],
        lanes_per_seed: int,
        memory_mib: int,
        allow_missing: frozenset[str],
        selector: selectors.BaseSelector,
    ) -> None:
        """Prepare the places; `start_all` fills them.

        Args:
            seeds: hash seeds.
            lanes_per_seed: programs that may run at a time under each.
            memory_mib: address space of a program.
            allow_missing: isolation layers that may be absent.
            selector: where the control socket of each lane is registered, with its index as data.
        """
        self.idle: tuple[set[int], ...] = tuple(set() for _ in seeds)
        self.restarts = 0
        self.finished_at = [float("-inf")] * len(seeds)  # when a run under each seed last ended by itself
        self._seeds = seeds
        self._memory_mib = memory_mib
        self._allow_missing = allow_missing
        self._selector = selector
        self._places = [_Place() for _ in range(lanes_per_seed * len(seeds))]
        # Since when runs under a seed only fail for reasons of the machine, and the latest of these reasons.
        self._failing: list[tuple[float, str] | None] = [None] * len(seeds)

    def start_all(self) -> dict[str, str]:
        """Start all lanes and wait until they are ready; return the layers that they do without, and why.

        Raises:
            SandboxError: one does not start, or a layer is missing that may not be.
        """
        for index in range(len(self._places)):
            try:
                self._start(index)
            except OSError as error:
                raise SandboxError(f"a verifier worker cannot be started: {error}") from error
        missing: dict[str, str] = {}
        for index in range(len(self._places)):
            missing |= self._admit(index, _START_SECONDS)
        return missing

    def lane(self, index: int) -> Lane:
        """Return a lane that is in service."""
        lane = self._places[index].lane
        assert lane is not None
        return lane

    def starts(self, index: int) -> bool:
        """Say whether a lane is being started."""
        place = self._places[index]
        return place.lane is not None and not place.ready

    def admit(self, index: int) -> None:
        """Take a lane into service that has something to say about its start."""
        try:
            self._admit(index, 1.0)
        except SandboxError as error:
            self._set_back(index, str(error), failed=True)

    def finished(self, index: int, *, killed: bool) -> None:
        """Note that a lane is idle again.

        Args:
            index: of the lane.
            killed: whether its run was killed from outside, so that nothing is known of what this machine can do.
        """
        self.idle[index % len(self._seeds)].add(index)
        if killed:
            self._note(index, "programs are killed from outside; is memory short?")
        else:
            self._places[index].ends = 0
            self._failing[index % len(self._seeds)] = None
            self.finished_at[index % len(self._seeds)] = time.monotonic()

    def lost(self, index: int, *, running: bool) -> None:
        """Take a lane out of service that is gone or stuck; `turn` puts a new one in its place.

        Args:
            index: of the lane.
            running: whether a run was lost with it.
        """
        self._set_back(index, "verifier workers end without finishing a run", failed=running)

    def turn(self, now: float) -> None:
        """Start the lanes that are due, and give up those that do not get ready."""
        for index, place in enumerate(self._places):
            if place.lane is None and place.start_at <= now:
                try:
                    self._start(index)
                except OSError as error:
                    self._set_back(index, f"a verifier worker cannot be started: {error}", failed=True)
            elif place.lane is not None and not place.ready and place.changed + _START_SECONDS < now:
                self._set_back(index, "a verifier worker did not start in time", failed=True)

    def next_turn(self, now: float) -> float:
        """Return the seconds until `turn` has something to do, at most 1."""
        starts = [place.start_at - now for place in self._places if place.lane is None]
        return max(0.0, min([1.0, *starts]))

    def trouble(self, now: float, patience: float) -> str | None:
        """Return why no run can be made under some seed, where that has been so for longer than the patience."""
        for failing in self._failing:
            if failing and now - failing[0] > patience:
                return failing[1]
        return None

    def close(self) -> None:
        """End all lanes and wait until they are gone."""
        for place in self._places:
            if place.lane:
                place.lane.kill()
                place.lane = None

    def _start(self, index: int) -> None:
        place = self._places[index]
        stage = index % len(self._seeds)
        lane = Lane(self._seeds[stage], self._memory_mib, varied=stage > 0)
        place.lane, place.ready, place.changed = lane, False, time.monotonic()
        self._selector.register(lane.control, selectors.EVENT_READ, index)

    def _admit(self, index: int, timeout: float) -> dict[str, str]:
        place = self._places[index]
        report = self.lane(index).finish_start(timeout)
        missing = {layer: reason for layer, reason in report.items() if reason is not None}
        lacking = {
            layer: reason
            for layer, reason in missing.items()
            if layer not in self._allow_missing and layer not in OPTIONAL_LAYERS
        }
        if lacking:
            listed = "; ".join(f"{layer} ({reason})" for layer, reason in lacking.items())
            flags = " ".join(f"--allow-missing {layer}" for layer in lacking)
            raise SandboxError(
                f"the verifier's isolation lacks {listed}; programs are not run without it unless told: {flags}"
            )
        place.ready, place.changed = True, time.monotonic()
        self.idle[index % len(self._seeds)].add(index)
        return missing

    def _set_back(self, index: int, reason: str, *, failed: bool) -> None:
        """Empty a place, and fix when it is to be filled again."""
        place, now = self._places[index], time.monotonic()
        if place.ready and now - place.changed > _STEADY_SECONDS:
            place.ends = 0
        if place.lane:
            for channel in (place.lane.control, place.lane.result_fd):
                with contextlib.suppress(KeyError):
                    self._selector.unregister(channel)
            place.lane.kill()
        self.idle[index % len(self._seeds)].discard(index)
        pause = min(_FIRST_PAUSE * 2 ** min(place.ends - 1, 30), _LONGEST_PAUSE) if place.ends else 0.0
        place.lane, place.ready, place.start_at = None, False, now + pause
        place.ends += 1
        self.restarts += 1
        if failed:
            self._note(index, reason)

    def _note(self, index: int, reason: str) -> None:
        seed = index % len(self._seeds)
        failing = self._failing[seed]
        self._failing[seed] = (failing[0] if failing else time.monotonic(), reason)
