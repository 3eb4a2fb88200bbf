"""Who is in the population: names, roles, ancestry and ratings, apart from the weights."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from populora_trainer.errors import StorageError

Role = Literal["teacher", "student", "agent"]
Result = Literal["win", "draw", "loss"]
"""What a rated game was for one of its two sides."""
JsonScalar: TypeAlias = str | int | float | bool | None
JsonValue: TypeAlias = "JsonScalar | Sequence[JsonValue] | Mapping[str, JsonValue]"

# TrueSkill's prior: an unknown player's skill lies between 0 and 50 with 99.7 % probability.
PRIOR_MU = 25.0
PRIOR_SIGMA = 25.0 / 3.0

_PREFIX: dict[Role, str] = {"teacher": "t", "student": "s", "agent": "a"}
_NAME = re.compile(r"[tsa](0|[1-9][0-9]*)(-g[1-9][0-9]*)?")


@dataclass(frozen=True, slots=True)
class Member:
    """One member of the population; its adapter sits at the same index in the stacked weights.

    Attributes:
        name: `t0`, `s3` or `a0` for founders and `t0-g7` for the child that took `t0`'s place in the seventh round of
            evolution; never used twice in a run, and safe as a file name.
        role: teachers propose, students solve, the single agent does both.
        generation: the round of evolution in which the member was born; 0 for founders.
        parents: names of the members it was bred from.
        operator: id of the operator that bred it, e.g. `"X2"`; empty for founders.
        born_step: the first training step in which it takes part, which its round of evolution opens; 1 for founders.
        mu, sigma: TrueSkill rating.
        games: rated games that it has played.
    """

    name: str
    role: Role
    generation: int = 0
    parents: tuple[str, ...] = ()
    operator: str = ""
    born_step: int = 1
    mu: float = PRIOR_MU
    sigma: float = PRIOR_SIGMA
    games: int = 0

    @property
    def lcb(self) -> float:
        """Lower confidence bound of the skill, mu - 3 sigma: what members are ranked by."""
        return self.mu - 3.0 * self.sigma

    @property
    def place(self) -> str:
        """The founder's name in whose line of succession the member stands, e.g. `t0` for `t0-g7`."""
        return self.name.partition("-")[0]

    def to_dict(self) -> dict[str, JsonValue]:
        """Return the member as JSON values."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Member":
        """Return the member that `to_dict` wrote.

        Raises:
            StorageError: a field is missing, unknown or of another type.
        """
        values = {name: value for name, value in values.items() if name not in _RETIRED}
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            wrong = ", ".join(sorted(set(values) ^ known))
            raise StorageError(f"a stored member has missing or unknown fields: {wrong}")
        for name, kind in _KINDS.items():
            value = values[name]
            # bool is a subclass of int, and a whole float may be stored as an int by other JSON writers.
            if not isinstance(value, kind) or isinstance(value, bool):
                raise StorageError(f"field {name} of a stored member is {value!r}, which has the wrong type")
        if values["role"] not in _PREFIX or not _NAME.fullmatch(str(values["name"])):
            raise StorageError(f"a stored member is called {values['name']!r} and has the role {values['role']!r}")
        parents = values["parents"]
        assert isinstance(parents, list | tuple)
        numbers = {name: float(values[name]) for name in ("mu", "sigma")}  # type: ignore[arg-type]
        return cls(**{**values, **numbers, "parents": tuple(str(name) for name in parents)})  # type: ignore[arg-type]


_KINDS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "role": str,
    "generation": int,
    "parents": (list, tuple),
    "operator": str,
    "born_step": int,
    "mu": (int, float),
    "sigma": (int, float),
    "games": int,
}

# Fields that earlier versions stored and nothing reads any more.
_RETIRED = frozenset({"lineage"})


def founders(teachers: int, students: int) -> tuple[Member, ...]:
    """Return generation 0: teachers first, then students, all with the prior's rating."""
    return (
        *(Member(f"t{number}", "teacher") for number in range(teachers)),
        *(Member(f"s{number}", "student") for number in range(students)),
    )


def single_agent() -> tuple[Member, ...]:
    """Return the Absolute Zero baseline: a population of one member that proposes and solves."""
    return (Member("a0", "agent"),)


def slots(members: Sequence[Member], role: Role) -> tuple[int, ...]:
    """Return the indices of the members that act in a role; the single agent acts as teacher and as student."""
    return tuple(index for index, member in enumerate(members) if member.role in (role, "agent"))


def child_name(place: str, generation: int) -> str:
    """Return the name of the member that takes a place in a round of evolution, e.g. `t0-g7`."""
    return f"{place}-g{generation}"


def order_key(name: str) -> tuple[str, int, int]:
    """Return a sort key under which s2 < s10 < s10-g2 < s10-g11 < t0."""
    place, _, generation = name.partition("-g")
    return place[0], int(place[1:]), int(generation or 0)


def ranked(members: Sequence[Member], role: Role) -> tuple[int, ...]:
    """Return the role's slots from the best LCB to the worst; ties go to the higher mu, then to the earlier slot."""
    return tuple(
        sorted(
            (index for index, member in enumerate(members) if member.role == role),
            key=lambda index: (-members[index].lcb, -members[index].mu, index),
        )
    )


def _plain(value: JsonScalar | tuple[str, ...]) -> JsonValue:
    return list(value) if isinstance(value, tuple) else value
