"""What a run's storage tells about where it stands, read while it may be training."""

from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from populora_trainer.errors import StorageError
from populora_trainer.population.members import JsonValue, Member, Role, ranked
from populora_trainer.storage.checkpoint import newest_manifest
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.logs import read_log
from populora_trainer.storage.run import RUN_MANIFEST, existing_run
from populora_trainer.storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class Overview:
    """Where a run stands.

    Attributes:
        name: from its manifest.
        step: newest committed step; None before the first.
        steps: how many it shall do, where its manifest says so.
        digest: of the newest checkpoint.
        holder: which process trains it; None where none does.
        members: the population, role by role from the best LCB to the worst.
        metrics_step: the step of the rates below; None where no step was logged.
        solve_rate: overall and per task type.
        valid_rate: share of proposals that the verifier accepted.
        held_out, held_out_step: newest held-out solve rate, and when it was measured.
    """

    name: str
    step: int | None
    steps: int | None
    digest: str | None
    holder: str | None
    members: tuple[Member, ...]
    metrics_step: int | None
    solve_rate: Mapping[str, float | None]
    valid_rate: float | None
    held_out: float | None
    held_out_step: int | None

    def to_dict(self) -> dict[str, JsonValue]:
        """Return it as JSON values; members carry their `lcb` as well."""
        return {
            "name": self.name,
            "step": self.step,
            "steps": self.steps,
            "digest": self.digest,
            "holder": self.holder,
            "solve_rate": dict(self.solve_rate),
            "valid_rate": self.valid_rate,
            "metrics_step": self.metrics_step,
            "held_out": self.held_out,
            "held_out_step": self.held_out_step,
            "members": [{**member.to_dict(), "lcb": member.lcb} for member in self.members],
        }


def overview(place: str) -> Overview:
    """Return where the run in a folder or under a URI stands.

    Raises:
        StorageError: there is no run, or its newest checkpoint is damaged.
    """
    store = existing_run(place)
    stored = _manifest(store)
    newest = newest_manifest(store)
    latest: Mapping[str, object] = {}
    evaluated: Mapping[str, object] = {}
    for record in read_log(store, "metrics"):
        # A log that was put together by hand need not be in order.
        if _step(record) and _step(record) >= _step(latest):
            latest = record
        if record.get("held_out") and _step(record) >= _step(evaluated):
            evaluated = record
    members = newest.members if newest is not None else ()
    roles: tuple[Role, ...] = ("teacher", "student", "agent")
    return Overview(
        name=str(_at(stored, "metadata", "name") or place),
        step=newest.step if newest is not None else None,
        steps=_whole(_at(stored, "spec", "training", "steps")),
        digest=newest.digest if newest is not None else None,
        holder=store.holder() if isinstance(store, LocalStore) else None,
        members=tuple(members[slot] for role in roles for slot in ranked(members, role)),
        metrics_step=_whole(latest.get("step")),
        solve_rate=_rates(latest.get("solve_rate")),
        valid_rate=_number(latest.get("valid_rate")),
        held_out=_number(_at(evaluated, "held_out", "solve_rate", "overall")),
        held_out_step=_whole(evaluated.get("step")),
    )


def _manifest(store: ObjectStore) -> Mapping[str, object]:
    try:
        stored = yaml.safe_load(store.get(RUN_MANIFEST).decode())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise StorageError(f"{store.location}/{RUN_MANIFEST} is damaged: it is not YAML in UTF-8") from error
    if not isinstance(stored, Mapping):
        raise StorageError(f"{store.location}/{RUN_MANIFEST} is damaged: it is not a PopulationRun")
    return stored


def _at(values: object, *path: str) -> object:
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _step(record: Mapping[str, object]) -> int:
    return _whole(record.get("step")) or 0


def _rates(values: object) -> dict[str, float | None]:
    return {str(key): _number(value) for key, value in values.items()} if isinstance(values, Mapping) else {}
