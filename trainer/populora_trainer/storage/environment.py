"""What a run was computed with: the threads, ranks, torch and device that its bits depend on.

`environment.json` beside `run.yaml` holds one entry for each change, oldest first. It is no part of a checkpoint, whose
digest says that two states are equal wherever they were computed.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from populora_trainer.errors import StorageError
from populora_trainer.storage.store import MissingObject, ObjectStore

ENVIRONMENT = "environment.json"


@dataclass(frozen=True, slots=True)
class Environment:
    """What bits depend on besides the run's own state.

    Attributes:
        threads: number of torch's threads within an operation; sums are split by it.
        torch: version.
        device: `cpu`, or the accelerator's name.
        instructions: widest vector instructions of the processor that torch uses, e.g. `AVX512`.
        ranks: number of processes that share a step; sums are split by it as well.
    """

    threads: int
    torch: str
    device: str
    instructions: str
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """An environment, and the step after which the run was computed with it."""

    after_step: int
    environment: Environment


def read_environments(store: ObjectStore) -> tuple[Entry, ...]:
    """Return what a run was computed with so far, oldest first; empty for a run that never recorded it.

    Raises:
        StorageError: the record is damaged.
    """
    try:
        data = store.get(ENVIRONMENT)
    except MissingObject:
        return ()
    try:
        return tuple(_entry(**values) for values in json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise StorageError(
            f"{store.location}/{ENVIRONMENT} is damaged: it must be a list of after_step, threads, torch, device, "
            f"instructions and ranks; once it is deleted, the run goes on with this machine's number of threads"
        ) from error


def record_environment(store: ObjectStore, step: int, environment: Environment) -> None:
    """Record what the steps after `step` are computed with; written only where that is news.

    Entries of later steps, which the run has been taken back from, go; so does another one of the same step, of which
    no step is left.
    """
    before = read_environments(store)
    entries = [entry for entry in before if entry.after_step < step]
    if not entries or entries[-1].environment != environment:
        entries.append(Entry(step, environment))
    if entries != list(before):
        rows = [{"after_step": entry.after_step, **asdict(entry.environment)} for entry in entries]
        store.put(ENVIRONMENT, json.dumps(rows, indent=1).encode() + b"\n")


def environment_after(entries: Sequence[Entry], step: int) -> Environment | None:
    """Return what the steps after `step` were computed with; None where it was not recorded."""
    known = [entry.environment for entry in entries if entry.after_step <= step]
    return known[-1] if known else None


def differences(before: Environment, now: Environment) -> str:
    """Say what differs, e.g. `threads 2 (before: 4)`; empty where nothing does."""
    fields = asdict(before)
    return ", ".join(
        f"{name} {value} (before: {fields[name]})" for name, value in asdict(now).items() if value != fields[name]
    )


def _entry(after_step: int, threads: int, torch: str, device: str, instructions: str, ranks: int = 1) -> Entry:
    if not (isinstance(after_step, int) and all(isinstance(one, int) and one > 0 for one in (threads, ranks))):
        raise ValueError
    return Entry(after_step, Environment(threads, str(torch), str(device), str(instructions), ranks))
