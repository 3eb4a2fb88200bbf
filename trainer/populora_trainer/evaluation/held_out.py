"""The fixed held-out problems: solve rate at the training temperature, and greedy, with its standard error."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from populora_trainer.diagnostics.records import HeldOutRecord, SolveRates
from populora_trainer.randomness import draw
from populora_trainer.rollout.engine import RolloutRequest, all_completions
from populora_trainer.selfplay import Tools, judge_answers, read_answers
from populora_trainer.tasks.problem import Problem, TaskType


@dataclass(frozen=True, slots=True)
class Sampling:
    """How held-out problems are tried.

    Attributes:
        samples: rollouts per problem at `temperature`; one more is greedy.
        temperature: of the sampled rollouts.
        max_tokens: longest answer.
        seed: of the draws; the same problem is tried with the same draws at every evaluation of a run, so that a
            difference between two evaluations is the members' and not the dice's.
    """

    samples: int
    temperature: float
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """One member's results, a rate per problem in the order of the problems."""

    sampled_P: tuple[float, ...]
    greedy_P: tuple[float, ...]


async def solve_held_out(
    problems: Sequence[Problem], slots: Sequence[int], sampling: Sampling, tools: Tools
) -> dict[int, HeldOutResult]:
    """Let members try the problems; returns their results by slot."""
    requests = []
    for slot in slots:
        for number, problem in enumerate(problems):
            prompt_ids = tuple(tools.template.encode(tools.tokenizer, tools.template.solve(problem)))
            seed = draw(sampling.seed, number, "held-out")
            for count, temperature in ((sampling.samples, sampling.temperature), (1, 0.0)):
                requests.append(RolloutRequest(slot, prompt_ids, count, seed, sampling.max_tokens, temperature))
    completions = await all_completions(tools.engine, requests)
    repeated = [problem for _ in slots for problem in problems for _ in range(2)]
    kinds = await judge_answers(repeated, read_answers(repeated, completions, tools), tools)
    rates = [sum(kind == "correct" for kind in row) / len(row) for row in kinds]
    results = {}
    for index, slot in enumerate(slots):
        mine = rates[2 * len(problems) * index : 2 * len(problems) * (index + 1)]
        results[slot] = HeldOutResult(sampled_P=tuple(mine[0::2]), greedy_P=tuple(mine[1::2]))
    return results


def summarise(problems: Sequence[Problem], results: Mapping[str, HeldOutResult]) -> HeldOutRecord:
    """Return the mean over members, with the standard error of the overall sampled rate over problems.

    Args:
        problems: what was tried.
        results: by member name.
    """
    sampled_P = [statistics.fmean(one.sampled_P[i] for one in results.values()) for i in range(len(problems))]
    greedy_P = [statistics.fmean(one.greedy_P[i] for one in results.values()) for i in range(len(problems))]
    spread = statistics.stdev(sampled_P) / math.sqrt(len(problems)) if len(problems) > 1 else None
    return {
        "solve_rate": _rates(problems, sampled_P),
        "stderr": spread,
        "greedy": _rates(problems, greedy_P),
        "problems": len(problems),
        "members": {name: statistics.fmean(one.sampled_P) for name, one in results.items()},
    }


def _rates(problems: Sequence[Problem], rate_P: Sequence[float]) -> SolveRates:
    def mean(task: TaskType | None) -> float | None:
        chosen = [rate for problem, rate in zip(problems, rate_P, strict=True) if task is None or problem.task == task]
        return statistics.fmean(chosen) if chosen else None

    return {
        "overall": mean(None),
        "code_i": mean("code_i"),
        "code_o": mean("code_o"),
        "code_f": mean("code_f"),
    }
