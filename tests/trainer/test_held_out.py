"""The evaluation on fixed problems: what is asked of whom, and what is made of the answers."""

import asyncio
import math
import statistics
from collections.abc import AsyncGenerator, Sequence

import pytest

from populora_trainer.evaluation.held_out import HeldOutResult, Sampling, solve_held_out, summarise
from populora_trainer.nano.tokenizer import build_tokenizer
from populora_trainer.population.members import Member
from populora_trainer.rollout.engine import Completion, RolloutRequest, Wave
from populora_trainer.sandbox import SandboxPool
from populora_trainer.selfplay import Tools
from populora_trainer.tasks.compact import CompactTemplate
from populora_trainer.tasks.problem import Problem

PROBLEMS = (
    Problem("code_o", "def f(x):\n    return x + 1", ("2",), ("3",)),
    Problem("code_i", "def f(x):\n    return x * x", ("3",), ("9",)),
    Problem("code_f", "def f(x):\n    return x + 5", ("1", "2"), ("6", "7"), "Add five."),
)
TOKENIZER = build_tokenizer()


# The program is wrong on the pair that is shown, and right on the one that judges it.
RIGHT = {"<o>": "3", "<i>": "-3", "<f>": "def f(x):\n    if x == 1:\n        return 0\n    return 5 + x"}


class Answers:
    """Slot 1 is right about everything when greedy, and in its first two samples; slot 2 never."""

    def __init__(self) -> None:
        self.requests: list[RolloutRequest] = []

    async def follow(self, step: int, members: Sequence[Member]) -> None:
        """Answers have no weights."""

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Wave, None]:
        self.requests += requests
        yield list(enumerate([self._answer(one, number) for number in range(one.n)] for one in requests))

    def _answer(self, request: RolloutRequest, number: int) -> Completion:
        task = TOKENIZER.decode(list(request.prompt_ids[:1]))
        text = RIGHT[task] if request.member == 1 and number < 2 else "0"
        ids = (*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id)
        return Completion(ids, (-0.1,) * len(ids), "stop")


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(workers=1, timeout_seconds=5) as pool:
        yield pool


def evaluate(pool: SandboxPool, slots: Sequence[int], seed: int = 0) -> tuple[dict[int, HeldOutResult], Answers]:
    engine = Answers()
    sampling = Sampling(samples=4, temperature=0.7, max_tokens=33, seed=seed)
    tools = Tools(engine, pool, CompactTemplate(), TOKENIZER)
    return asyncio.run(solve_held_out(PROBLEMS, slots, sampling, tools)), engine


def test_every_member_gets_its_own_rates_problem_by_problem(pool):
    results, _ = evaluate(pool, [1, 2])
    assert results == {
        1: HeldOutResult((0.5, 0.5, 0.5), (1.0, 1.0, 1.0)),
        2: HeldOutResult((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
    }


def test_every_problem_is_sampled_at_the_temperature_and_once_greedily(pool):
    _, engine = evaluate(pool, [1, 2])
    assert [(one.member, one.n, one.temperature, one.max_tokens) for one in engine.requests] == [
        (slot, n, temperature, 33) for slot in (1, 2) for _ in PROBLEMS for n, temperature in ((4, 0.7), (1, 0.0))
    ]


def test_members_and_evaluations_draw_alike_so_that_differences_are_theirs(pool):
    _, engine = evaluate(pool, [1, 2])
    first, second = (
        [(request.prompt_ids, request.seed) for request in engine.requests if request.member == slot] for slot in (1, 2)
    )
    assert first == second
    assert len({seed for _, seed in first}) == len(PROBLEMS)
    assert {seed for _, seed in first}.isdisjoint(request.seed for request in evaluate(pool, [1], seed=1)[1].requests)


def test_the_summary_is_the_mean_over_members_with_its_standard_error_over_problems():
    results = {
        "s0": HeldOutResult((1.0, 0.5, 0.0), (1.0, 1.0, 0.0)),
        "s1": HeldOutResult((0.5, 0.5, 0.5), (1.0, 0.0, 0.0)),
    }
    summary = summarise(PROBLEMS, results)
    assert summary["solve_rate"] == {"overall": 0.5, "code_o": 0.75, "code_i": 0.5, "code_f": 0.25}
    assert summary["greedy"] == {"overall": 0.5, "code_o": 1.0, "code_i": 0.5, "code_f": 0.0}
    assert summary["members"] == {"s0": 0.5, "s1": 0.5}
    assert summary["problems"] == 3
    assert summary["stderr"] == pytest.approx(statistics.stdev([0.75, 0.5, 0.25]) / math.sqrt(3))


def test_one_problem_has_no_standard_error_and_a_missing_type_no_rate():
    summary = summarise(PROBLEMS[:1], {"s0": HeldOutResult((0.25,), (0.0,))})
    assert summary["stderr"] is None
    assert summary["solve_rate"] == {"overall": 0.25, "code_o": 0.25, "code_i": None, "code_f": None}
