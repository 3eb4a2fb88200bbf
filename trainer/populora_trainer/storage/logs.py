"""The logs of a run: one JSON object a line, each with its `step`, and each step in them once."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from populora_trainer.population.members import JsonValue
from populora_trainer.storage.store import MissingObject, ObjectStore

LogName = Literal["metrics", "matchups", "problems", "evolution"]
LOG_NAMES: tuple[LogName, ...] = ("metrics", "matchups", "problems", "evolution")

_BLOCK = 1 << 20
_MOST_DIGITS = 100  # of a whole number; sums and squares of such are finite as floats


class RunLogs:
    """Writes the logs of the run whose lock the caller holds.

    Lines wait in memory until `flush`. They are written before the checkpoint of their step; a resumed run cuts off
    the lines of steps that it will repeat (`trim`). Logs may hold timings, so no checkpoint's digest covers them.
    """

    def __init__(self, store: ObjectStore) -> None:
        """Write to the store, after what is there."""
        self._store = store
        self._waiting: dict[LogName, list[bytes]] = {name: [] for name in LOG_NAMES}
        self._size = {name: _size(store, log_key(name)) for name in LOG_NAMES}

    def append(self, name: LogName, record: Mapping[str, object]) -> None:
        """Add a record; numbers that JSON does not have (NaN, infinities) become null.

        Args:
            name: which log.
            record: JSON values, among them a whole number `step`.

        Raises:
            ValueError: the record has no step.
        """
        if not isinstance(record.get("step"), int):
            raise ValueError(f"a line of {log_key(name)} needs its step, and got {record.get('step')!r}")
        self._waiting[name].append(_line(record))

    def flush(self) -> None:
        """Write what waits; durable on return. After a failure it still waits, and can be flushed again.

        Raises:
            StorageError: it can't be written.
        """
        for name, lines in self._waiting.items():
            if lines:
                data = b"".join(lines)
                self._store.extend(log_key(name), self._size[name], data)
                self._size[name] += len(data)
                lines.clear()

    def trim(self, step: int) -> None:
        """Forget what waits, and cut off every line of a later step and a last line that was not written whole."""
        for name in LOG_NAMES:
            self._waiting[name].clear()
            end = _end_of_step(self._store, log_key(name), self._size[name], step)
            if end < self._size[name]:
                self._store.extend(log_key(name), end, b"")
                self._size[name] = end


def log_key(name: LogName) -> str:
    """Return the name of a log's object, e.g. `metrics.jsonl`."""
    return f"{name}.jsonl"


def read_log(
    store: ObjectStore, name: LogName, on_damage: Callable[[int], None] = lambda line: None
) -> Iterator[dict[str, JsonValue]]:
    """Yield the records of a log, oldest first, of a run that may be training; a torn last line is left out.

    Numbers that no measurement gives (NaN, infinities, more than 100 digits) are null, as `append` would have written
    them; a line that is no record is left out.

    Args:
        store: the run's.
        name: which log.
        on_damage: called with the number, from 1, of every line that is left out.
    """
    position, rest, number = 0, b"", 0
    try:
        while block := store.get(log_key(name), position, _BLOCK):
            position += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                number += 1
                record = _parsed(line)
                if record is not None:
                    yield record
                elif line.strip():
                    on_damage(number)
    except MissingObject:
        return


def last_record(store: ObjectStore, name: LogName) -> dict[str, JsonValue] | None:
    """Return the newest whole record of a log without reading the others; None where there is none."""
    for _, line in _lines_backwards(store, log_key(name), _size(store, log_key(name))):
        record = _parsed(line)
        if record is not None:
            return record
    return None


def _line(record: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps(record, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(record), allow_nan=False)
    return text.encode() + b"\n"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def _finite_number(text: str) -> int | float | None:
    value = float(text)
    if not abs(value) < 10.0**_MOST_DIGITS:
        return None
    return value if "." in text or "e" in text.lower() else int(text)


def _parsed(line: bytes) -> dict[str, JsonValue] | None:
    try:
        record = json.loads(
            line, parse_constant=lambda name: None, parse_float=_finite_number, parse_int=_finite_number
        )
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _size(store: ObjectStore, key: str) -> int:
    return store.size(key) if store.exists(key) else 0


def _end_of_step(store: ObjectStore, key: str, size: int, step: int) -> int:
    """Return where the last whole line of a step up to `step` ends."""
    for end, line in _lines_backwards(store, key, size):
        record = _parsed(line)
        if record is not None and isinstance(record.get("step"), int) and record["step"] <= step:  # type: ignore[operator]
            return end
    return 0


def _lines_backwards(store: ObjectStore, key: str, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield (end, line) of every line that has its line feed, from the last to the first; end counts the line feed."""
    start, held = size, b""
    while start > 0:
        length = min(_BLOCK, start)
        start -= length
        held = store.get(key, start, length) + held
        first, *lines = held.split(b"\n")
        if not lines:
            continue
        # What follows the last line feed: a torn line in the last block, nothing in the others.
        end = start + len(held) - len(lines.pop())
        for line in reversed(lines):
            yield end, line
            end -= len(line) + 1
        # The first line may begin in the block before.
        held = first + b"\n"
    if held.endswith(b"\n"):
        yield len(held), held[:-1]
