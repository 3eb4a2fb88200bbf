"""Who is replaced, by whose child and by which operator; planned as values, before any weight is touched."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from populora_trainer.population.members import Member, Role, child_name, ranked

# How much less is known of a newborn than of its parents. They were chosen for ratings that luck has a part in, so a
# child starts above its worth by a little; with 5 % it is culled as often as others that are as good, see
# benchmarks/newborns.py.
NEWBORN_SIGMA = 1.05


@dataclass(frozen=True, slots=True)
class Breeding:
    """An operator that evolution may use.

    Attributes:
        operator: its id, e.g. `"M1"`.
        parents: number of parents that it takes, 1 or 2.
        weight: its chance relative to the others; zero or more.
        fitter: the place of the better ranked parent, where the operator tells them apart; None leaves them as drawn.
    """

    operator: str
    parents: int
    weight: float = 1.0
    fitter: Literal["first", "second"] | None = None


@dataclass(frozen=True, slots=True)
class Replacement:
    """One member's end and its successor's beginning.

    Attributes:
        slot: whose adapter is overwritten.
        replaced: the member that goes.
        child: the member that comes, rated by `newborn_rating`.
        operator: id of the operator that makes the child's factors.
        parents: slots of the parents, as many as the operator takes and in the order in which it takes them. Where a
            crossover finds a single survivor, the other is the replaced slot itself, so factors of parents are read
            before any slot is overwritten.
        seed: of the operator's generator.
    """

    slot: int
    replaced: Member
    child: Member
    operator: str
    parents: tuple[int, ...]
    seed: int


def replaced_count(size: int, fraction: float) -> int:
    """Return how many of a role's members go: the fraction rounded down, at least one, never all.

    None where the fraction is 0 or the role has a single member.
    """
    if size < 2 or fraction <= 0.0:
        return 0
    # The slack keeps 0.3 * 10 from being rounded down to 2.
    return min(max(1, math.floor(size * fraction + 1e-9)), size - 1)


def newborn_rating(parents: Sequence[Member], survivors: int) -> tuple[float, float]:
    """Return mu and sigma of a child: its parents' mean mu, and their mean sigma times `NEWBORN_SIGMA`.

    With the prior's sigma a child's lower bound would lie up to 25 below its parents', which it can't make up for
    before the next round. Where a single member survives, parents are not chosen and sigma is their mean.

    Args:
        parents: one or two.
        survivors: number of members that parents were drawn from.
    """
    mu, sigma = (
        math.fsum(values) / len(parents) for values in zip(*((one.mu, one.sigma) for one in parents), strict=True)
    )
    return mu, sigma * NEWBORN_SIGMA if survivors > 1 else sigma


def plan(
    members: Sequence[Member],
    generation: int,
    step: int,
    generator: random.Random,
    *,
    replace_fraction: float,
    operators: Sequence[Breeding],
    roles: Sequence[Role] = ("teacher", "student"),
) -> list[Replacement]:
    """Plan one round of evolution: the bottom fraction of each role by LCB makes room for children of the others.

    Parents are survivors of the same role, drawn by linear ranking: of k survivors, the best has weight k, the next
    k - 1, the last 1. A crossover draws two different parents. Where only one member survives, operators with one
    parent are used; if there are none, the survivor is crossed with the member that goes. The best of a role is never
    replaced. An operator's `fitter` decides which of the drawn parents is its first: the child's record, measures and
    weights all keep the order of `Replacement.parents`.

    Args:
        members: the population, with its ratings.
        generation: number of this round, 1 for the first; it must grow, as children are named by it.
        step: the training step that the round opens, the first in which the children take part.
        generator: chance, e.g. `choices(seed, step, "evolution")`.
        replace_fraction: share of each role that is replaced, in [0, 1).
        operators: what children are made by, with weights.
        roles: which roles evolve; the single agent has nobody to be bred from.

    Returns:
        One replacement per replaced slot, role by role, from the worst upwards.

    Raises:
        ValueError: the generation is not newer than every member's, or no operator has a weight.
    """
    if any(member.generation >= generation for member in members):
        raise ValueError(f"generation {generation} is not newer than the population's")
    if not any(one.weight > 0.0 for one in operators):
        raise ValueError("evolution needs an operator with a weight above zero")
    return [
        replacement
        for role in roles
        for replacement in _plan_role(members, role, generation, step, generator, replace_fraction, operators)
    ]


def apply(members: Sequence[Member], replacements: Sequence[Replacement]) -> tuple[Member, ...]:
    """Return the population after the replacements; roles and slots stay as they are."""
    after = list(members)
    for one in replacements:
        after[one.slot] = one.child
    return tuple(after)


def _plan_role(
    members: Sequence[Member],
    role: Role,
    generation: int,
    step: int,
    generator: random.Random,
    replace_fraction: float,
    operators: Sequence[Breeding],
) -> list[Replacement]:
    ranking = ranked(members, role)
    count = replaced_count(len(ranking), replace_fraction)
    survivors = ranking[: len(ranking) - count]
    return [
        _replacement(members, slot, survivors, generation, step, generator, operators)
        for slot in reversed(ranking[len(survivors) :])
    ]


def _replacement(
    members: Sequence[Member],
    slot: int,
    survivors: Sequence[int],
    generation: int,
    step: int,
    generator: random.Random,
    operators: Sequence[Breeding],
) -> Replacement:
    allowed = [one for one in operators if one.weight > 0.0]
    pool = {survivor: len(survivors) - rank for rank, survivor in enumerate(survivors)}
    if len(survivors) == 1:
        # With crossovers alone, the survivor's only possible mate is the member that goes.
        allowed = [one for one in allowed if one.parents == 1] or allowed
        pool[slot] = 0
    breeding = generator.choices(allowed, [one.weight for one in allowed])[0]
    parents: list[int] = []
    for _ in range(breeding.parents):
        weights = [*pool.values()]
        parents += generator.choices(list(pool), weights) if any(weights) else [slot]
        del pool[parents[-1]]
    if breeding.fitter is not None:
        places = [*survivors, slot]
        parents.sort(key=places.index, reverse=breeding.fitter == "second")
    replaced = members[slot]
    mu, sigma = newborn_rating([members[parent] for parent in parents], len(survivors))
    child = Member(
        name=child_name(replaced.place, generation),
        role=replaced.role,
        generation=generation,
        parents=tuple(members[parent].name for parent in parents),
        operator=breeding.operator,
        born_step=step,
        mu=mu,
        sigma=sigma,
    )
    return Replacement(slot, replaced, child, breeding.operator, tuple(parents), generator.getrandbits(63))
