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
# Sweeps after which steps are halved, so that any swinging ends.
_CAREFUL = 100


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
    """One rated game: who won, and the teacher's share of the points, which decided it.

    `task` is None where one game covers the whole matchup.
    """

    teacher: int
    student: int
    task: TaskType | None
    points: float
    outcome: Outcome


def teacher_points(solve_rate: float | None) -> float | None:
    """Return the teacher's share of the one point that a problem is worth; the student has the rest.

        1 - rho    where 0 < rho <= 1;    0    where the verifier refused it;    None, no point, where nobody solved it

    So no problem that can't be verified or solved ever raises a teacher. An unsolved one gives the student no point
    either: students would else win nearly every game against hard teachers, whatever they can do.
    """
    if solve_rate is None:
        return 0.0
    return 1.0 - solve_rate if solve_rate > 0.0 else None


def games(exchanges: Sequence[Exchange], games_per: GamesPer = "TaskType") -> list[Game]:
    """Return the games of a step, in the order of their slots and tasks.

    The teacher wins where its share of the points is above 1/2 by more than `DRAW_MARGIN`, which is a mean solve rate
    below 1/2 by more; the student wins where it is below; between them the game is drawn. Where no problem gave a
    point, the teacher loses. The single agent has nobody to be compared with: its problems make no game.

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
            -1.0 if exchange.solve_rate is None else exchange.solve_rate,
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
    all_points = (teacher_points(exchange.solve_rate) for exchange in exchanges)
    given = [points for points in all_points if points is not None]
    points = math.fsum(given) / len(given) if given else 0.0
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

    All games of a step are one observation, so their order does not matter (rated one after another, two wins and a
    loss give a mean between 24.7 and 28.9, by order). The games of a pair speak of nothing but the difference of its
    two skills; its posterior is found by expectation propagation with TrueSkill's v and w, and carried back to both
    skills. Members who meet several opponents combine what each pair says, again until it stands still. A member who
    plays drifts by TAU once a step, whatever its number of games; one game between two members gives exactly
    `trueskill.rate_1vs1`.

    Args:
        members: the population; a member without a game is returned as it is.
        played: games among them, in any order.

    Source: Herbrich, Minka, Graepel, "TrueSkill: A Bayesian Skill Rating System", 2007, sections 2 and 3.
    """
    results: dict[_Pair, Counter[Outcome]] = {}
    for game in sorted(played, key=lambda one: (one.teacher, one.student, one.outcome)):
        results.setdefault((game.teacher, game.student), Counter())[game.outcome] += 1
    busy = Counter(slot for game in played for slot in (game.teacher, game.student))
    prior = {
        slot: _Gaussian.of(members[slot].mu, members[slot].sigma ** 2 + TAU**2)
        for slot in range(len(members))
        if slot in busy
    }
    messages = dict.fromkeys(results, (_NOTHING, _NOTHING))
    skills = dict(prior)
    for sweep in range(_SWEEPS):
        before = dict(skills)
        # One pair after another, each with what the others say by now: this stands still after a few sweeps.
        for pair, old in messages.items():
            teacher, student = (skills[slot].minus(message) for slot, message in zip(pair, old, strict=True))
            new = _messages(teacher, student, results[pair])
            messages[pair] = new if sweep < _CAREFUL else (old[0].towards(new[0], 0.5), old[1].towards(new[1], 0.5))
            skills[pair[0]], skills[pair[1]] = (
                rest.plus(message) for rest, message in zip((teacher, student), messages[pair], strict=True)
            )
        if len(busy) == 2 * len(results) or all(skills[slot].near(before[slot]) for slot in skills):
            break
    return tuple(
        replace(member, mu=skills[slot].mean, sigma=math.sqrt(skills[slot].variance), games=member.games + busy[slot])
        if slot in skills
        else member
        for slot, member in enumerate(members)
    )


_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Gaussian:
    """A Gaussian, or a message that multiplies one, by its precision and its precision times the mean."""

    precision: float
    weighted_mean: float

    @classmethod
    def of(cls, mean: float, variance: float) -> "_Gaussian":
        return cls(1.0 / variance, mean / variance)

    @property
    def mean(self) -> float:
        return self.weighted_mean / self.precision

    @property
    def variance(self) -> float:
        return 1.0 / self.precision

    def plus(self, message: "_Gaussian", times: float = 1.0) -> "_Gaussian":
        return _Gaussian(self.precision + times * message.precision, self.weighted_mean + times * message.weighted_mean)

    def minus(self, message: "_Gaussian") -> "_Gaussian":
        return self.plus(message, -1.0)

    def towards(self, other: "_Gaussian", share: float) -> "_Gaussian":
        return self.plus(other.minus(self), share)

    def near(self, other: "_Gaussian") -> bool:
        scale = max(1.0, abs(self.mean) / PRIOR_MU)
        return (
            abs(self.mean - other.mean) <= _TOLERANCE * scale
            and abs(math.sqrt(self.variance) - math.sqrt(other.variance)) <= _TOLERANCE
        )


_NOTHING = _Gaussian(0.0, 0.0)


def _messages(teacher: _Gaussian, student: _Gaussian, results: Counter[Outcome]) -> tuple[_Gaussian, _Gaussian]:
    """Return what a pair's games say about either member, given what everything else says about both."""
    prior = _Gaussian.of(teacher.mean - student.mean, teacher.variance + student.variance)
    posterior = _difference(prior, results)
    moved, narrowed = posterior.mean - prior.mean, prior.variance - posterior.variance
    share_t, share_s = teacher.variance / prior.variance, student.variance / prior.variance
    return (
        _Gaussian.of(teacher.mean + share_t * moved, teacher.variance - share_t**2 * narrowed).minus(teacher),
        _Gaussian.of(student.mean - share_s * moved, student.variance - share_s**2 * narrowed).minus(student),
    )


def _difference(prior: _Gaussian, results: Counter[Outcome]) -> _Gaussian:
    """Return the posterior of teacher's minus student's skill after the results of all of their games.

    Equal results have equal messages at the fixed point, so each kind is computed once.
    """
    sent = dict.fromkeys(results, _NOTHING)
    damping = 1.0 if results.total() == 1 else 0.5
    total = prior
    for sweep in range(_SWEEPS):
        sent = {
            outcome: message.towards(_after(total.minus(message), outcome).minus(total.minus(message)), damping)
            for outcome, message in sent.items()
        }
        before, total = total, prior
        for outcome, message in sent.items():
            total = total.plus(message, results[outcome])
        if total.near(before):
            break
        damping = _slower(damping, sweep)
    return total


def _after(difference: _Gaussian, outcome: Outcome) -> _Gaussian:
    """Return the difference after one game: TrueSkill's two-player update.

    c^2 = var + 2 beta^2;    mean + var / c * v(mean / c, margin / c);    var * (1 - var / c^2 * w(...))
    """
    env = environment()
    mean, variance = difference.mean, difference.variance
    c = math.sqrt(variance + 2.0 * BETA**2)
    margin = env.ppf((DRAW_PROBABILITY + 1.0) / 2.0) * math.sqrt(2.0) * BETA / c
    sign = -1.0 if outcome == "student" else 1.0
    lead = sign * mean / c
    v, w = (env.v_draw, env.w_draw) if outcome == "draw" else (env.v_win, env.w_win)
    shift = sign * float(v(lead, margin))
    return _Gaussian.of(mean + variance / c * shift, variance * (1.0 - variance / c**2 * float(w(lead, margin))))


def _slower(damping: float, sweep: int) -> float:
    # Far from an answer, ever smaller steps end any swinging.
    return damping if sweep < 100 else 50.0 / sweep


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
