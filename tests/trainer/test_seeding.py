"""The problems that the untrained base writes before the first step."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted import ScriptedEngine

from populora_api import load_manifest
from populora_trainer.sandbox import SandboxPool
from populora_trainer.seeding import PROPOSALS_PER_PROBLEM, Seeding, held, seed_problems
from populora_trainer.selfplay import Tools
from populora_trainer.tasks.buffer import ProblemBuffer
from populora_trainer.tasks.compact import CompactTemplate

MANIFEST = Path(__file__).with_name("tiny.yaml")
IDENTITY = "def f(a):\n    return a"


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(workers=1, timeout_seconds=5) as pool:
        yield pool


class Seeded:
    """A buffer that was seeded by a script, and what was said on the way."""

    def __init__(self, pool: SandboxPool, *overrides: str, stop=lambda: False) -> None:
        spec = load_manifest(MANIFEST, ("tasks.seedProblems=12", *overrides)).spec
        self.buffer, self.engine = ProblemBuffer(), ScriptedEngine()
        self.told: list[Seeding] = []
        tools = Tools(self.engine, pool, CompactTemplate(), self.engine.tokenizer)
        self.result = asyncio.run(seed_problems(spec, self.buffer, tools, on_round=self.told.append, stop=stop))

    @property
    def prompts(self) -> list[str]:
        return [self.engine.tokenizer.decode(list(request.prompt_ids)) for request in self.engine.requests]


@pytest.fixture(scope="module")
def seeded(pool: SandboxPool) -> Seeded:
    return Seeded(pool)


def test_both_sections_hold_as_many_different_valid_problems_as_were_wanted(seeded: Seeded) -> None:
    sections = [list(seeded.buffer.entries(task)) for task in ("code_i", "code_o")]
    for task, (identity, *seeds) in zip(("code_i", "code_o"), sections, strict=True):
        assert identity.problem.program == IDENTITY
        assert len({(seed.problem.program, seed.problem.inputs) for seed in seeds}) == 12
        for seed in seeds:
            assert (seed.author, seed.step, seed.solve_rate, seed.problem.task) == ("base", 0, None, task)
            addend = int(seed.problem.program.rpartition("+ ")[2])
            assert seed.problem.outputs == (str(int(seed.problem.inputs[0]) + addend),)
    assert [seed.problem.program for seed in sections[0]] == [seed.problem.program for seed in sections[1]]
    assert len(list(seeded.buffer.entries("code_f"))) == 1
    assert held(seeded.buffer) == 12


def test_what_was_sampled_is_counted_and_told_round_by_round(seeded: Seeded) -> None:
    assert seeded.result is seeded.told[-1]
    assert seeded.told[0] == Seeding(wanted=12)
    assert [one.kept for one in seeded.told] == sorted({one.kept for one in seeded.told})
    assert seeded.result.kept == seeded.result.wanted == 12
    # Of the script's four proposals from one prompt one is no program, and some others fail.
    assert 12 <= seeded.result.valid < seeded.result.proposals
    assert seeded.result.proposals == sum(request.n for request in seeded.engine.requests)
    assert seeded.result.tokens > seeded.result.proposals
    assert seeded.result.record() == {
        name: getattr(seeded.result, name) for name in ("wanted", "kept", "proposals", "valid", "tokens")
    }


def test_only_the_first_adapter_writes_and_nobody_solves(seeded: Seeded) -> None:
    assert {request.member for request in seeded.engine.requests} == {0}
    assert all(prompt.startswith("<po>") for prompt in seeded.prompts)
    assert len({request.seed for request in seeded.engine.requests}) == len(seeded.engine.requests)


def test_the_first_round_is_shown_the_identity_program_and_later_ones_what_was_found(seeded: Seeded) -> None:
    assert IDENTITY in seeded.prompts[0]
    assert any("return x + " in prompt for prompt in seeded.prompts[1:])


def test_one_seed_gives_one_start_whatever_the_population_and_another_another(
    pool: SandboxPool, seeded: Seeded
) -> None:
    alone = Seeded(pool, "mode=SingleAgent", "population.teachers=1", "population.students=1")
    large = Seeded(pool, "population.teachers=5", "training.steps=7")
    assert seeded.buffer.to_bytes() == alone.buffer.to_bytes() == large.buffer.to_bytes()
    assert Seeded(pool, "population.seed=1").buffer.to_bytes() != seeded.buffer.to_bytes()


@pytest.mark.parametrize(
    ("types", "tokens"),
    [("[code_f]", {"<po>"}), ("[code_i, code_f]", {"<pi>"}), ("[code_i, code_o]", {"<pi>", "<po>"})],
)
def test_programs_are_asked_for_by_the_types_that_have_any(pool: SandboxPool, types: str, tokens: set[str]) -> None:
    found = Seeded(pool, f"tasks.types={types}", "tasks.problemsPerMatchup=8")
    assert {prompt[:4] for prompt in found.prompts} == tokens
    assert held(found.buffer) == 12


def test_a_base_that_writes_next_to_nothing_valid_is_given_up(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = "def f(x):\n    return x + 1<in>1"
    monkeypatch.setattr(ScriptedEngine, "_proposal", lambda self, prompt, request, number: always)
    found = Seeded(pool, "tasks.seedProblems=2")
    assert (found.result.kept, found.result.proposals) == (1, 2 * PROPOSALS_PER_PROBLEM)
    assert held(found.buffer) == 1


def test_a_stop_is_heard_between_two_rounds(pool: SandboxPool) -> None:
    asked = iter([False, False, True])
    stopped = Seeded(pool, stop=lambda: next(asked))
    assert stopped.result is None
    assert len(stopped.told) == 3
