"""One step's line of metrics.jsonl, assembled from plain values."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from populora_trainer.diagnostics.records import (
    ComplexityRecord,
    HeldOutRecord,
    PerRole,
    ProblemRecord,
    RatingRecord,
    Role,
    SeedingRecord,
    SolveRates,
    StepMetrics,
)
from populora_trainer.tasks.problem import WRITTEN, TaskType

LCB_SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What the metrics need of one completion.

    Attributes:
        role: in which it was drawn, "teacher" or "student".
        tokens: its length, the end-of-sequence token included.
        reward: what it earned.
        entropy: mean entropy of its tokens in nats (the mean of -log p of the sampled tokens estimates it), or None.
    """

    role: Role
    tokens: int
    reward: float
    entropy: float | None = None


def assemble(
    step: int,
    *,
    seconds: Mapping[str, float],
    problems: Sequence[ProblemRecord],
    samples: Sequence[Sample],
    ratings: Mapping[str, tuple[float, float]],
    advantage: Mapping[str, float | None],
    coverage: float | None,
    tokens: Mapping[str, int] | None = None,
    learner: Mapping[str, float | None] | None = None,
    seeding: SeedingRecord | None = None,
    held_out: HeldOutRecord | None = None,
) -> StepMetrics:
    """Return the step's metrics; whatever is not a finite number becomes None.

    Args:
        step: the step that has just ended.
        seconds: wall time of each phase; "total" is added as their sum unless it is given.
        problems: every proposal of the step.
        samples: every completion of the step.
        ratings: member name to (mu, sigma) after the step.
        advantage: statistics of the learner, passed on.
        coverage: of the archive after the step.
        tokens: tokens worked through by purpose; by default the sampled ones. Their sum over the total seconds is
            `tokens_per_second`.
        learner: further statistics of the update, passed on.
        seeding: how the base wrote the run's first references.
        held_out: an evaluation that took place after this step.
    """
    spent = {name: float(value) for name, value in seconds.items()}
    spent.setdefault("total", sum(spent.values()))
    valid = [problem for problem in problems if problem["valid"]]
    sampled = sum(sample.tokens for sample in samples)
    worked = dict(tokens) if tokens is not None else {"sampled": sampled}
    metrics: StepMetrics = {
        "step": step,
        "seconds": spent,
        "solve_rate": solve_rates(valid),
        "valid_rate": len(valid) / len(problems) if problems else None,
        "verdicts": dict(sorted(Counter(problem["verdict"] for problem in problems).items())),
        "reward": _per_role(samples, lambda drawn: _mean(sample.reward for sample in drawn)),
        "entropy": _per_role(samples, _mean_entropy),
        "response_tokens": _per_role(samples, lambda drawn: _mean(sample.tokens for sample in drawn)),
        "complexity": _mean_complexity([problem for problem in valid if problem["task"] in WRITTEN]),
        "ratings": {member: _rating(mu, sigma) for member, (mu, sigma) in ratings.items()},
        "tokens_per_second": sum(worked.values()) / spent["total"] if spent["total"] > 0 else None,
        "advantage": dict(advantage),
        "coverage": coverage,
        "tokens": worked,
    }
    if learner is not None:
        metrics["learner"] = dict(learner)
    if seeding is not None:
        metrics["seeding"] = seeding
    if held_out is not None:
        metrics["held_out"] = held_out
    return _finite(metrics)


def to_line(metrics: StepMetrics) -> str:
    """Return the object as one line of strict JSON, with the line end.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(metrics, allow_nan=False, separators=(",", ":")) + "\n"


def solve_rates(problems: Iterable[ProblemRecord]) -> SolveRates:
    """Return the mean solve rate over problems that somebody tried, in all and of each type."""
    rates: dict[TaskType, list[float]] = {"code_i": [], "code_o": [], "code_f": []}
    for problem in problems:
        if problem["solve_rate"] is not None:
            rates[problem["task"]].append(problem["solve_rate"])
    return {
        "overall": _mean(rate for task in rates.values() for rate in task),
        "code_i": _mean(rates["code_i"]),
        "code_o": _mean(rates["code_o"]),
        "code_f": _mean(rates["code_f"]),
    }


def _per_role(samples: Sequence[Sample], mean: Callable[[Sequence[Sample]], float | None]) -> PerRole:
    return {
        "teacher": mean([sample for sample in samples if sample.role == "teacher"]),
        "student": mean([sample for sample in samples if sample.role == "student"]),
    }


def _mean_entropy(samples: Sequence[Sample]) -> float | None:
    """Return the mean over tokens, so that a long completion counts for more than a short one."""
    entropies = [(sample.entropy, sample.tokens) for sample in samples if sample.entropy is not None]
    weight = sum(count for _, count in entropies)
    return math.fsum(entropy * count for entropy, count in entropies) / weight if weight else None


def _mean_complexity(problems: Sequence[ProblemRecord]) -> ComplexityRecord:
    measured = [problem["complexity"] for problem in problems if problem["complexity"] is not None]
    return {
        "ast_depth": _mean(one["ast_depth"] for one in measured),
        "cyclomatic": _mean(one["cyclomatic"] for one in measured),
        "loc": _mean(one["loc"] for one in measured),
        "variables": _mean(one["variables"] for one in measured),
    }


def _rating(mu: float, sigma: float) -> RatingRecord:
    return {"mu": mu, "sigma": sigma, "lcb": mu - LCB_SIGMAS * sigma}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _finite(metrics: StepMetrics) -> StepMetrics:
    """Return the metrics with None for every number that JSON cannot hold."""
    return cast(StepMetrics, _without_infinities(metrics))


def _without_infinities(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_infinities(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
