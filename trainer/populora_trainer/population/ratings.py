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

from populora_trainer.population.members import PRIOR_MU, PRIOR_SIGMA, Member, Result
from populora_trainer.tasks.problem import TaskType

GamesPer = Literal["Matchup", "TaskType", "Problem"]

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
    """One rated game, as either side came out of it.

    Attributes:
        teacher, student: slots of the members.
        task: its type; None where one game covers the whole matchup.
        teacher_result: whether the teacher's score is above an even one, near it or below.
        student_result: the same of the student; None where it got nothing to solve.
    """

    teacher: int
    student: int
    task: TaskType | None
    teacher_result: Result
    student_result: Result | None


def teacher_score(solve_rates: Sequence[float | None]) -> float:
    """Return the mean of what the paper pays the teacher for each proposal, where nothing is worth less than 0.

        1 - rho    where 0 < rho;    0    where nobody solved it (rho = 0) or the verifier refused it (None)

    Every proposal counts. One more that is not solved lowers the mean, so it never raises a teacher.

    Source: arXiv 2605.16727, equation 2, with its -1 for invalid proposals raised to 0.
    """
    return math.fsum(1.0 - rho for rho in solve_rates if rho) / len(solve_rates)


def student_score(solve_rates: Sequence[float | None]) -> float | None:
    """Return the mean solve rate of the valid problems, None where there are none: the student had nothing to solve.

    A problem that it did not solve counts as 0. Were it left out, solving nothing would pay more than
    solving little.
    """
    valid = [rho for rho in solve_rates if rho is not None]
    return math.fsum(valid) / len(valid) if valid else None


def games(exchanges: Sequence[Exchange], games_per: GamesPer = "TaskType") -> list[Game]:
    """Return the games of a step, in the order of their slots and tasks.

    A side wins where its score is above 1/2 by more than `DRAW_MARGIN`, loses where it is below by more, and draws
    between them. Where every problem is valid and solved, the scores add up to 1: one side's win is the other's loss.
    A problem that nobody solved counts against both, since it shows neither a good teacher nor a good student; a
    refused one against its teacher alone. The rule is the same whatever a game covers. The single agent has nobody to
    be compared with: its problems make no game.

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
    solve_rates = [exchange.solve_rate for exchange in exchanges]
    score = student_score(solve_rates)
    return Game(
        exchanges[0].teacher,
        exchanges[0].student,
        task,
        _result(teacher_score(solve_rates)),
        None if score is None else _result(score),
    )


def _result(score: float) -> Result:
    lead = score - 0.5
    # The margin itself is a draw; the slack keeps 0.55 - 0.5 from winning by a rounding error.
    return "draw" if abs(lead) <= DRAW_MARGIN + 1e-12 else "win" if lead > 0 else "loss"


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
    skills. Where the two sides of a game have results that contradict each other, as after a problem that nobody
    solved, each side's own result is carried back to it. Members who meet several opponents combine what each pair
    says, again until it stands still. A member who plays drifts by TAU once a step, whatever its number of games; one
    game that one side wins or both draw gives exactly `trueskill.rate_1vs1`.

    Args:
        members: the population; a member without a result is returned as it is.
        played: games among them, in any order.

    Source: Herbrich, Minka, Graepel, "TrueSkill: A Bayesian Skill Rating System", 2007, sections 2 and 3.
    """
    results: dict[_Pair, _Results] = {}
    busy: Counter[int] = Counter()
    for game in sorted(played, key=lambda one: (one.teacher, one.student, one.teacher_result, str(one.student_result))):
        teachers, students = results.setdefault((game.teacher, game.student), (Counter(), Counter()))
        teachers[game.teacher_result] += 1
        busy[game.teacher] += 1
        if game.student_result is not None:
            students[_MIRROR[game.student_result]] += 1
            busy[game.student] += 1
    prior = {
        slot: _Gaussian.of(members[slot].mu, members[slot].sigma ** 2 + TAU**2) for pair in results for slot in pair
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
        if len(skills) == 2 * len(results) or all(skills[slot].near(before[slot]) for slot in skills):
            break
    return tuple(
        replace(member, mu=skills[slot].mean, sigma=math.sqrt(skills[slot].variance), games=member.games + busy[slot])
        if slot in busy
        else member
        for slot, member in enumerate(members)
    )


_Pair = tuple[int, int]
# How often the teacher won, drew and lost, by its own results and by those of the student.
_Results = tuple[Counter[Result], Counter[Result]]
_MIRROR: dict[Result, Result] = {"win": "loss", "draw": "draw", "loss": "win"}


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


def _messages(teacher: _Gaussian, student: _Gaussian, results: _Results) -> tuple[_Gaussian, _Gaussian]:
    """Return what a pair's games say about either member, given what everything else says about both."""
    prior = _Gaussian.of(teacher.mean - student.mean, teacher.variance + student.variance)
    for_teacher = _difference(prior, results[0])
    for_student = for_teacher if results[1] == results[0] else _difference(prior, results[1])
    return _carried_back(teacher, prior, for_teacher, 1.0), _carried_back(student, prior, for_student, -1.0)


def _carried_back(skill: _Gaussian, prior: _Gaussian, posterior: _Gaussian, sign: float) -> _Gaussian:
    """Return the message to one skill of a difference that moved from `prior` to `posterior`."""
    share = skill.variance / prior.variance
    moved, narrowed = posterior.mean - prior.mean, prior.variance - posterior.variance
    return _Gaussian.of(skill.mean + sign * share * moved, skill.variance - share**2 * narrowed).minus(skill)


def _difference(prior: _Gaussian, results: Counter[Result]) -> _Gaussian:
    """Return the posterior of teacher's minus student's skill after results of the teacher.

    Equal results have equal messages at the fixed point, so each kind is computed once.
    """
    sent = dict.fromkeys(results, _NOTHING)
    damping = 1.0 if results.total() == 1 else 0.5
    total = prior
    for sweep in range(_SWEEPS):
        sent = {
            result: message.towards(_after(total.minus(message), result).minus(total.minus(message)), damping)
            for result, message in sent.items()
        }
        before, total = total, prior
        for result, message in sent.items():
            total = total.plus(message, results[result])
        if total.near(before):
            break
        damping = _slower(damping, sweep)
    return total


def _after(difference: _Gaussian, result: Result) -> _Gaussian:
    """Return the difference after one result of the teacher: TrueSkill's two-player update.

    c^2 = var + 2 beta^2;    mean + var / c * v(mean / c, margin / c);    var * (1 - var / c^2 * w(...))
    """
    env = environment()
    mean, variance = difference.mean, difference.variance
    c = math.sqrt(variance + 2.0 * BETA**2)
    margin = env.ppf((DRAW_PROBABILITY + 1.0) / 2.0) * math.sqrt(2.0) * BETA / c
    sign = -1.0 if result == "loss" else 1.0
    lead = sign * mean / c
    v, w = (env.v_draw, env.w_draw) if result == "draw" else (env.v_win, env.w_win)
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
