"""The tables of a report: the members that live, and what became of each operator's children."""

from collections.abc import Mapping
from typing import NamedTuple

from populora_trainer.diagnostics.report_data import RunData, number, role_of, seniority
from populora_trainer.population.lineage import Relative

RETENTION_STEPS = 10


class MemberRow(NamedTuple):
    """A living member in the table."""

    name: str
    role: str
    operator: str
    parents: str
    mu: float
    sigma: float
    lcb: float
    best: bool


def member_rows(run: RunData) -> list[MemberRow]:
    """Return the members of the newest metrics line, teachers first."""
    latest = next((line["ratings"] for line in reversed(run.metrics) if isinstance(line.get("ratings"), Mapping)), {})
    ratings = latest if isinstance(latest, Mapping) else {}
    best = set(best_members(ratings).values())
    rows = []
    for name in sorted(ratings, key=seniority):
        relative = run.relatives.get(name)
        rows.append(
            MemberRow(
                name=name,
                role=role_of(name),
                operator=relative.operator if relative and relative.operator else "founder",
                parents=", ".join(relative.parents) if relative else "",
                mu=number(ratings, name, "mu") or 0.0,
                sigma=number(ratings, name, "sigma") or 0.0,
                lcb=number(ratings, name, "lcb") or 0.0,
                best=name in best,
            )
        )
    return rows


def best_members(ratings: Mapping[str, object]) -> dict[str, str]:
    """Return the name with the highest lower confidence bound of each role."""
    best: dict[str, str] = {}
    for name in ratings:
        role = role_of(name)
        if role not in best or (number(ratings, name, "lcb") or 0) > (number(ratings, best[role], "lcb") or 0):
            best[role] = name
    return best


class OperatorRow(NamedTuple):
    """What became of the children of one operator."""

    operator: str
    children: int
    alive: int
    retained: float | None  # share that lived longer than RETENTION_STEPS, of those born that long ago
    first_rank: float | None  # mean rank at the first round after birth: 0 the best of its role, 1 the worst
    diagnostics: dict[str, float]  # means


def operator_rows(run: RunData) -> list[OperatorRow]:
    """Return one row for every operator that bred a child."""
    children: dict[str, list[Relative]] = {}
    for one in run.relatives.values():
        if one.operator:
            children.setdefault(one.operator, []).append(one)
    last = max((number(line, "step") or 0.0 for line in run.metrics), default=0.0)
    rows = []
    for operator in sorted(children):
        of_age = [one for one in children[operator] if one.born_step + RETENTION_STEPS <= last]
        kept = [one for one in of_age if one.died_step is None or one.died_step > one.born_step + RETENTION_STEPS]
        ranks = [
            (one.ranks[0][1] - 1) / (one.ranks[0][2] - 1)
            for one in children[operator]
            if one.ranks and one.ranks[0][2] > 1
        ]
        measured: dict[str, list[float]] = {}
        for one in children[operator]:
            for name, values in _measured(one.diagnostics).items():
                measured.setdefault(name, []).append(sum(values) / len(values))
        rows.append(
            OperatorRow(
                operator=operator,
                children=len(children[operator]),
                alive=sum(one.died_step is None for one in children[operator]),
                retained=len(kept) / len(of_age) if of_age else None,
                first_rank=sum(ranks) / len(ranks) if ranks else None,
                diagnostics={name: sum(values) / len(values) for name, values in measured.items()},
            )
        )
    return rows


def _measured(diagnostics: Mapping[str, object]) -> dict[str, list[float]]:
    """Return the numbers in a child's diagnostics by name, of all its parents together."""
    found: dict[str, list[float]] = {}
    for name, value in diagnostics.items():
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, Mapping):
                for inner, numbers in _measured(entry).items():
                    found.setdefault(inner, []).extend(numbers)
            elif isinstance(entry, int | float):
                found.setdefault(name, []).append(float(entry))
    return found
