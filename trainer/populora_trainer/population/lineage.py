"""The family records of a run: what evolution did, how its children fared, and the tree that follows from it.

The records are the lines of `evolution.jsonl`. A `birth` says who was bred from whom; a `rank` says where a child
stands within its role some steps later. A round of evolution opens a step, and its records carry that step: children
take part in it, and those they replaced were last in the step before.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from populora_trainer.population.evolution import Replacement
from populora_trainer.population.members import JsonValue, Member, order_key, ranked

Record = dict[str, JsonValue]


def birth(
    replacement: Replacement,
    members: Sequence[Member],
    *,
    parameters: Mapping[str, JsonValue],
    diagnostics: Mapping[str, JsonValue],
) -> Record:
    """Return the record of one child, its parents in the order in which the operator took them.

    Args:
        replacement: what was planned and done.
        members: the population before the round.
        parameters: the operator's settings.
        diagnostics: the child measured against its parents (norm ratio, cosine, retained energy, distance of A), entry
            by entry in the order of `replacement.parents`.
    """
    child = replacement.child
    return {
        "step": child.born_step,
        "event": "birth",
        "child": child.name,
        "role": child.role,
        "slot": replacement.slot,
        "generation": child.generation,
        "operator": replacement.operator,
        "parameters": dict(parameters),
        "seed": replacement.seed,
        "parents": [_rated(members[parent]) for parent in replacement.parents],
        "replaced": _rated(replacement.replaced),
        "diagnostics": dict(diagnostics),
    }


def ranks(members: Sequence[Member], step: int) -> list[Record]:
    """Return, for every member that was bred, its rank within its role (1 is the best) at a step.

    Taken before each round of evolution, they show what became of the children of each operator.
    """
    records: list[Record] = []
    for role in ("teacher", "student"):
        ranking = ranked(members, role)
        for rank, slot in enumerate(ranking, start=1):
            member = members[slot]
            if member.generation:
                records.append(
                    {
                        "step": step,
                        "event": "rank",
                        "child": member.name,
                        "role": role,
                        "operator": member.operator,
                        "age": step - member.born_step,
                        "rank": rank,
                        "of": len(ranking),
                        **_rating(member),
                    }
                )
    return records


@dataclass(frozen=True, slots=True)
class Relative:
    """A member that lives or lived, as the records tell.

    Attributes:
        name, generation, operator, parents, born_step: as of `Member`.
        died_step: the first step without it, so that it lived died_step - born_step steps; None while it lives.
        ranks: (age in steps lived, rank, size of the role) at later rounds of evolution, in order of age.
        diagnostics: the child measured against its parents at birth; empty for founders.
    """

    name: str
    generation: int = 0
    operator: str = ""
    parents: tuple[str, ...] = ()
    born_step: int = 1
    died_step: int | None = None
    ranks: tuple[tuple[int, int, int], ...] = ()
    diagnostics: Mapping[str, object] = field(default_factory=dict)


def family(records: Iterable[Mapping[str, object]]) -> dict[str, Relative]:
    """Return everybody that the records name, ordered by name; founders are known from their children only.

    A line of another kind is passed over, so that newer logs stay readable.
    """
    births: dict[str, Mapping[str, object]] = {}
    died: dict[str, int] = {}
    seen: dict[str, list[tuple[int, int, int]]] = {}
    founders: set[str] = set()
    for record in records:
        if record.get("event") == "birth":
            births[str(record["child"])] = record
            replaced = _name(record["replaced"])
            died[replaced] = _integer(record["step"])
            founders |= {replaced, *_parents(record)}
        elif record.get("event") == "rank":
            age, rank, size = (_integer(record[key]) for key in ("age", "rank", "of"))
            seen.setdefault(str(record["child"]), []).append((age, rank, size))
    tree = {name: Relative(name, died_step=died.get(name)) for name in founders - births.keys()}
    for name, record in births.items():
        diagnostics = record.get("diagnostics")
        tree[name] = Relative(
            name=name,
            generation=_integer(record["generation"]),
            operator=str(record["operator"]),
            parents=_parents(record),
            born_step=_integer(record["step"]),
            died_step=died.get(name),
            ranks=tuple(sorted(seen.get(name, ()))),
            diagnostics=diagnostics if isinstance(diagnostics, dict) else {},
        )
    return {name: tree[name] for name in sorted(tree, key=order_key)}


def ancestors(tree: Mapping[str, Relative], name: str) -> set[str]:
    """Return the names of everybody that a member descends from."""
    found: set[str] = set()
    waiting = list(tree[name].parents) if name in tree else []
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += tree[one].parents if one in tree else ()
    return found


def _rated(member: Member) -> Record:
    return {"name": member.name, **_rating(member)}


def _rating(member: Member) -> Record:
    return {"mu": member.mu, "sigma": member.sigma, "lcb": member.lcb}


def _parents(record: Mapping[str, object]) -> tuple[str, ...]:
    parents = record["parents"]
    return tuple(_name(parent) for parent in parents) if isinstance(parents, list) else ()


def _name(rated: object) -> str:
    return str(rated["name"]) if isinstance(rated, dict) else str(rated)


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{value!r} is not a whole number")
    return value
