"""TrueSkill ratings of teachers and students from the problems that they exchanged in a step."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Literal

import mpmath
import trueskill
from trueskill.backends import choose_backend

from populora_trainer.population.members import PRIOR_MU, PRIOR_SIGMA, Member
from populora_trainer.tasks.problem import TaskType

GamesPer = Literal["Matchup", "TaskType", "Problem"]
Outcome = Literal["teacher", "student", "draw"]

BETA = PRIOR_SIGMA / 2.0
TAU = PRIOR_SIGMA / 100.0
# A solve rate drawn uniformly from [0, 1] lies within the margin of 1/2 with the draw probability.
DRAW_PROBABILITY = 0.10
DRAW_MARGIN = 0.05

_TOLERANCE = 1e-6
_SWEEPS = 1000


@dataclass(frozen=True, slots=True)
class Exchange:
    """One proposed problem, seen from the ratings.

    Attributes:
        teacher, student: slots of the members.
        task: its type.
        solve_rate: share of the student's rollouts that solved it, in [0, 1]; None where the proposal was not valid.
    """

    teacher: int
    student: int
    task: TaskType
    solve_rate: float | None


@dataclass(frozen=True, slots=True)
class Game:
    """One rated game: who won, and the teacher's mean points that decided it.

    `task` is None where one game covers the whole matchup.
    """

    teacher: int
    student: int
    task: TaskType | None
    points: float
    outcome: Outcome


def teacher_points(solve_rate: float | None) -> float:
    """Return what a problem is worth to its teacher in a game, in [0, 1).

        1 - rho    where 0 < rho <= 1;    0    where nobody could verify (None) or solve (rho = 0) it

    A problem that can't be verified or solved counts as one that the student has solved. Left out of the mean instead,
    it would raise a teacher whenever it stands in for an easy problem.
    """
    return 1.0 - solve_rate if solve_rate else 0.0


def games(exchanges: Sequence[Exchange], games_per: GamesPer = "TaskType") -> list[Game]:
    """Return the games of a step, in the order of their slots and tasks.

    The teacher wins where its mean points are above 1/2 by more than `DRAW_MARGIN`, the student where they are below
    by more; between them the game is drawn. A teacher without one valid problem in a game has 0 points and loses.
    The single agent has nobody to be compared with: its problems make no game.

    Args:
        exchanges: every proposal of the step, valid or not.
        games_per: what one game covers: all of a matchup, one task type of it, or a single problem.
    """
    between = sorted(
        (exchange for exchange in exchanges if exchange.teacher != exchange.student),
        key=lambda exchange: (
            exchange.teacher,
            exchange.student,
            exchange.task,
            teacher_points(exchange.solve_rate),
        ),
    )
    if games_per == "Problem":
        groups = [[exchange] for exchange in between]
    else:
        whole = games_per == "Matchup"
        groups = [
            list(group)
            for _, group in groupby(between, key=lambda one: (one.teacher, one.student, "" if whole else one.task))
        ]
    return [_game(group, None if games_per == "Matchup" else group[0].task) for group in groups]


def _game(exchanges: Sequence[Exchange], task: TaskType | None) -> Game:
    points = math.fsum(teacher_points(exchange.solve_rate) for exchange in exchanges) / len(exchanges)
    lead = points - 0.5
    # The margin itself is a draw; the slack keeps 0.55 - 0.5 from winning by a rounding error.
    outcome: Outcome = "draw" if abs(lead) <= DRAW_MARGIN + 1e-12 else "teacher" if lead > 0 else "student"
    return Game(exchanges[0].teacher, exchanges[0].student, task, points, outcome)


def win_probability(teacher: Member, student: Member) -> float:
    """Return the predicted probability that the teacher's performance is above the student's.

    x = Phi((mu_t - mu_s) / sqrt(2 beta^2 + sigma_t^2 + sigma_s^2))
    """
    spread = math.sqrt(2.0 * BETA**2 + teacher.sigma**2 + student.sigma**2)
    return 0.5 * math.erfc((student.mu - teacher.mu) / (spread * math.sqrt(2.0)))


def rate(members: Sequence[Member], played: Sequence[Game]) -> tuple[Member, ...]:
    """Return the members with the ratings that they hold after the games of one step.

    All games of a step are one observation: the ratings are the fixed point of expectation propagation over them, the
    algorithm inside TrueSkill, with TrueSkill's own two-player update as the local step. Rated one after another they
    would depend on their order. A member who plays drifts by TAU once a step, whatever its number of games; one game
    between two members gives exactly `trueskill.rate_1vs1`.

    Args:
        members: the population; a member without a game is returned as it is.
        played: games among them, in any order.

    Source: Herbrich, Minka, Graepel, "TrueSkill: A Bayesian Skill Rating System", 2007, section 3.
    """
    count = Counter((game.teacher, game.student, game.outcome) for game in played)
    if not count:
        return tuple(members)
    # Equal games between the same two members have equal messages at the fixed point, so each kind is computed once.
    kinds = sorted(count)
    games_of: Counter[int] = Counter()
    for teacher, student, outcome in kinds:
        games_of[teacher] += count[teacher, student, outcome]
        games_of[student] += count[teacher, student, outcome]
    prior = {slot: _Skill.of(members[slot].mu, math.hypot(members[slot].sigma, TAU)) for slot in sorted(games_of)}
    messages = {kind: (_Skill(0.0, 0.0), _Skill(0.0, 0.0)) for kind in kinds}
    # A member's games pull all at once; a half step keeps them from overshooting together.
    damping = 0.5 if max(games_of.values()) > 1 else 1.0

    skills = prior
    for sweep in range(_SWEEPS):
        messages = {kind: _towards(sent, _messages(kind, skills, sent), damping) for kind, sent in messages.items()}
        before, skills = skills, _combined(prior, messages, count)
        if all(skills[slot].near(before[slot]) for slot in skills):
            break
        if sweep >= 100:
            damping = 50.0 / sweep
    return tuple(
        replace(member, mu=skills[slot].mu, sigma=skills[slot].sigma, games=member.games + games_of[slot])
        if slot in skills
        else member
        for slot, member in enumerate(members)
    )


@dataclass(frozen=True, slots=True)
class _Skill:
    """A Gaussian, or a message between two, by its precision and its precision times the mean."""

    precision: float
    weighted_mean: float

    @classmethod
    def of(cls, mu: float, sigma: float) -> "_Skill":
        return cls(1.0 / sigma**2, mu / sigma**2)

    @property
    def mu(self) -> float:
        return self.weighted_mean / self.precision

    @property
    def sigma(self) -> float:
        return math.sqrt(1.0 / self.precision)

    def towards(self, other: "_Skill", share: float) -> "_Skill":
        return _Skill(
            self.precision + share * (other.precision - self.precision),
            self.weighted_mean + share * (other.weighted_mean - self.weighted_mean),
        )

    def without(self, message: "_Skill") -> "_Skill":
        return _Skill(self.precision - message.precision, self.weighted_mean - message.weighted_mean)

    def near(self, other: "_Skill") -> bool:
        scale = max(1.0, abs(self.mu) / PRIOR_MU)
        return abs(self.mu - other.mu) <= _TOLERANCE * scale and abs(self.sigma - other.sigma) <= _TOLERANCE


_Kind = tuple[int, int, Outcome]
_Sent = tuple[_Skill, _Skill]


def _towards(old: _Sent, new: _Sent, share: float) -> _Sent:
    return old[0].towards(new[0], share), old[1].towards(new[1], share)


def _messages(kind: _Kind, skills: dict[int, _Skill], sent: _Sent) -> _Sent:
    """Return what one game says about its two players, given what everything but this game says about them."""
    teacher, student, outcome = kind
    left, right = skills[teacher].without(sent[0]), skills[student].without(sent[1])
    env = environment()
    ranks = {"teacher": (0, 1), "student": (1, 0), "draw": (0, 0)}[outcome]
    (after_left,), (after_right,) = env.rate(
        [(env.create_rating(left.mu, left.sigma),), (env.create_rating(right.mu, right.sigma),)], ranks=ranks
    )
    return (
        _Skill(after_left.pi, after_left.tau).without(left),
        _Skill(after_right.pi, after_right.tau).without(right),
    )


def _combined(prior: dict[int, _Skill], messages: dict[_Kind, _Sent], count: Counter[_Kind]) -> dict[int, _Skill]:
    total = dict(prior)
    for (teacher, student, outcome), sent in messages.items():
        times = count[teacher, student, outcome]
        for slot, message in zip((teacher, student), sent, strict=True):
            held = total[slot]
            total[slot] = _Skill(
                held.precision + times * message.precision, held.weighted_mean + times * message.weighted_mean
            )
    return total


@cache
def environment() -> trueskill.TrueSkill:
    """Return the TrueSkill environment of the engine: its defaults, no drift of its own, and upsets of any size.

    `trueskill`'s three backends raise FloatingPointError on upsets of some 40 sigma, or depend on mpmath's global
    precision. This one takes doubles where they are accurate and a private 40-digit context in the far tails.
    """
    context = mpmath.MPContext()
    context.dps = 40
    _, _, ppf = choose_backend(None)
    margin = float(context.sqrt(2) * context.erfinv(DRAW_PROBABILITY))

    def cdf(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2.0)) if abs(x) < _FAR else context.ncdf(x)

    def pdf(x: float) -> float:
        return math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi) if abs(x) < _FAR else context.npdf(x)

    def quantile(probability: float) -> float:
        # The only quantile that a game asks for, at every update: the draw margin's.
        return margin if probability == (DRAW_PROBABILITY + 1) / 2.0 else float(ppf(probability))

    return trueskill.TrueSkill(
        PRIOR_MU, PRIOR_SIGMA, BETA, tau=0.0, draw_probability=DRAW_PROBABILITY, backend=(cdf, pdf, quantile)
    )


_FAR = 20.0
