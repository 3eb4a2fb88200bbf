"""Who plays whom: prioritised fictitious self-play between teachers and students, sampled as a whole matching."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import linear_sum_assignment

from populora_trainer.population.members import Member, slots
from populora_trainer.population.ratings import win_probability

Strategy = Literal["PFSP", "Uniform"]
Weighting = Literal["Variance", "Hard"]

# An almost certain game still keeps a weight, so that every matching stays possible.
_FLOOR = 1e-12
# 2^12 subsets take some 20 ms; beyond it matchings are sampled by perturbed optimisation.
_EXACT_LIMIT = 12


@dataclass(frozen=True, slots=True)
class Matchup:
    """A teacher that proposes to a student, as slots of the population; equal for the single agent."""

    teacher: int
    student: int


def matchmake(
    members: Sequence[Member],
    generator: random.Random,
    *,
    strategy: Strategy = "PFSP",
    weighting: Weighting = "Variance",
) -> list[Matchup]:
    """Return the matchups of one step, ordered by teacher and student.

    Every member plays: each member of the larger role once, those of the smaller role equally often or one game
    apart. Among all such matchings, PFSP draws one with a probability proportional to the product of its pairs'
    weights; Uniform gives every pair the same weight. The single agent plays itself.

    Args:
        members: the population.
        generator: chance, e.g. `choices(seed, step, "matchmaking")`.
        strategy: how pairs are chosen.
        weighting: what PFSP prefers, see `weight`.
    """
    teachers, students = slots(members, "teacher"), slots(members, "student")
    if members[teachers[0]].role == "agent":
        return [Matchup(agent, agent) for agent in teachers]
    swapped = len(students) > len(teachers)
    many, few = (students, teachers) if swapped else (teachers, students)
    weights = np.ones((len(many), len(few)))
    if strategy == "PFSP":
        for row, one in enumerate(many):
            for column, other in enumerate(few):
                teacher, student = (other, one) if swapped else (one, other)
                weights[row, column] = weight(1.0 - win_probability(members[teacher], members[student]), weighting)
    columns = sample_matching(weights, generator)
    pairs = ((few[column], one) if swapped else (one, few[column]) for one, column in zip(many, columns, strict=True))
    return [Matchup(teacher, student) for teacher, student in sorted(pairs)]


def weight(x: float, weighting: Weighting = "Variance") -> float:
    """Return the PFSP weight of a pair whose student is predicted to win with probability x.

        Variance: x (1 - x), near-balanced pairs first;    Hard: (1 - x)^2, strong teachers first

    Source: Vinyals et al., "Grandmaster level in StarCraft II using multi-agent reinforcement learning", 2019,
    methods, f_var and f_hard.
    """
    return max(_FLOOR, x * (1.0 - x) if weighting == "Variance" else (1.0 - x) ** 2)


def sample_matching(weights: np.ndarray, generator: random.Random) -> list[int]:
    """Assign a column to every row so that columns are used equally often, or one time apart.

    A matching M is drawn with probability proportional to prod_{(row, column) in M} weights[row, column]. Up to 12
    seats the draw is exact: the permanent of every subset of seats is computed, then rows are assigned one after
    another by their conditional probability. Above, the log weights are perturbed by Gumbel noise and the best
    assignment is taken: the same preferences, but only near the product distribution.

    Args:
        weights: (rows, columns), positive, with at least as many rows as columns.

    Returns:
        The column of every row.
    """
    rows, columns = weights.shape
    rounds, rest = divmod(rows, columns)
    # Each column has `rounds` seats that must be taken, and one more that `rest` of the columns fill. Rows without a
    # member take the seats that stay empty. Every matching then stands for the same number of seatings.
    extra = 1 if rest else 0
    seats = [column for column in range(columns) for _ in range(rounds + extra)]
    table = np.empty((len(seats), len(seats)))
    table[:rows] = weights[:, seats]
    if rest:
        optional = np.arange(len(seats)) % (rounds + 1) == rounds
        table[rows:] = np.where(optional, 1.0, 0.0)
    table /= table.max(axis=1, keepdims=True)
    taken = _sample_exactly(table, generator) if len(seats) <= _EXACT_LIMIT else _sample_perturbed(table, generator)
    return [seats[seat] for seat in taken[:rows]]


def _sample_exactly(table: np.ndarray, generator: random.Random) -> list[int]:
    """Return the seat of every row, drawn with probability proportional to the product of the chosen entries."""
    size = len(table)
    # total[subset] = sum over the ways to seat the first |subset| rows on exactly these seats.
    total = [0.0] * (1 << size)
    total[0] = 1.0
    entries = table.tolist()
    for subset in range(1, 1 << size):
        row = entries[subset.bit_count() - 1]
        total[subset] = math.fsum(
            row[seat] * total[subset ^ (1 << seat)] for seat in range(size) if subset >> seat & 1 and row[seat]
        )
    taken = [0] * size
    left = (1 << size) - 1
    for row_number in reversed(range(size)):
        free = [seat for seat in range(size) if left >> seat & 1]
        chances = [entries[row_number][seat] * total[left ^ (1 << seat)] for seat in free]
        seat = generator.choices(free, chances)[0]
        taken[row_number] = seat
        left ^= 1 << seat
    return taken


def _sample_perturbed(table: np.ndarray, generator: random.Random) -> list[int]:
    """Return the assignment with the highest sum of log weights plus Gumbel noise (perturb and MAP)."""
    noise = np.array([[-math.log(generator.expovariate(1.0)) for _ in row] for row in table])
    with np.errstate(divide="ignore"):
        score = np.where(table > 0.0, np.log(table) + noise, -1e9)
    _, taken = linear_sum_assignment(score, maximize=True)
    return [int(seat) for seat in taken]
