"""A round of self-play with scripted completions, the real prompts and the real verifier."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import pytest
from tokenizer_families import letters

from populora_api import Spec, load_manifest
from populora_trainer.errors import RolloutError
from populora_trainer.population.matchmaking import Matchup
from populora_trainer.population.members import Member, founders, single_agent
from populora_trainer.rollout.engine import Completion, RolloutRequest, Wave
from populora_trainer.sandbox import Case, Judgement, SandboxPool
from populora_trainer.sandbox.wire import case_from_json, case_to_json
from populora_trainer.selfplay import (
    Proposal,
    Solution,
    Tools,
    cross_evaluate,
    propose,
    solve,
    students_at_work,
    training_groups,
)
from populora_trainer.tasks.buffer import ProblemBuffer
from populora_trainer.tasks.chat import ChatTemplate
from populora_trainer.tasks.held_out import NOTHING_HELD_OUT, HeldOutPrograms

ROOT = Path(__file__).parents[2]
END = 0  # the id of `<eos>`
MATCHUPS = [Matchup(0, 2), Matchup(1, 3)]


LETTERS = letters()
Script = Callable[[str, RolloutRequest, int], str]


class ScriptedEngine:
    """Answers the n-th completion of a request with `script(prompt, request, n)`; "..." at the end means cut off."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[RolloutRequest] = []

    async def follow(self, step: int, members: Sequence[Member]) -> None:
        """A script has no weights."""

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Wave, None]:
        self.requests += requests
        yield list(enumerate([self._completion(one, number) for number in range(one.n)] for one in requests))

    def _completion(self, request: RolloutRequest, number: int) -> Completion:
        text = self.script(LETTERS.decode(request.prompt_ids), request, number)
        ids = tuple(LETTERS.encode(text.removesuffix("<cut>")))
        if text.endswith("<cut>"):
            return Completion(ids, (-0.5,) * len(ids), "length")
        return Completion((*ids, END), (-0.5,) * (len(ids) + 1), "stop")


class CountingVerifier:
    """The real verifier, with a count of the cases that it was given."""

    def __init__(self, pool: SandboxPool) -> None:
        self.pool = pool
        self.cases: list[Case] = []

    async def judge(self, cases: Sequence[Case]) -> list[Judgement]:
        self.cases += cases
        return await self.pool.judge(cases)


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(workers=1, timeout_seconds=5) as pool:
        yield pool


@pytest.fixture
def spec() -> Spec:
    overrides = (
        "population.teachers=2",
        "population.students=2",
        "tasks.types=[code_o, code_i]",
        "tasks.problemsPerMatchup=8",
        "training.proposalsPerPrompt=4",
        "training.rolloutsPerProblem=4",
        "training.maxPromptTokens=4000",
    )
    return load_manifest(ROOT / "manifests" / "nano-4x4.yaml", overrides).spec


def proposal_text(program: str, arguments: str) -> str:
    return f"```python\n{program}\n```\n```input\n{arguments}\n```"


PROPOSALS = (
    proposal_text("def f(x):\n    return x + 1", "2"),
    proposal_text("def f(x):\n    return x / 0", "2"),
    "I would rather not.",
    proposal_text("def f(x):\n    return x + 1", "2") + "<cut>",
)


def teach_then_solve(prompt: str, request: RolloutRequest, number: int) -> str:
    if "Invent one new problem" in prompt:
        return PROPOSALS[number]
    if "Work out what the call returns" in prompt:
        return ("```output\n3\n```", "```output\n3\n```", "```output\n4\n```", "three")[number]
    return ("```input\n2\n```", "```input\n2\n```", "```input\n2\n```", "```input\n5\n```")[number]


def play(
    spec: Spec,
    pool: SandboxPool,
    script: Script = teach_then_solve,
    step: int = 1,
    held_out: HeldOutPrograms = NOTHING_HELD_OUT,
):
    engine, verifier = ScriptedEngine(script), CountingVerifier(pool)
    tools = Tools(engine, verifier, ChatTemplate(), LETTERS, held_out)
    members = founders(2, 2)

    async def play_round() -> tuple[list[Proposal], list[Solution]]:
        proposals = await propose(MATCHUPS, members, spec, step, ProblemBuffer(64), tools)
        return proposals, await solve(proposals, members, spec, step, tools)

    proposals, solutions = asyncio.run(play_round())
    return proposals, solutions, engine, verifier


def test_every_proposal_is_kept_with_its_verdict(spec, pool):
    proposals, _, _, _ = play(spec, pool)
    assert len(proposals) == 2 * 8
    for first in range(0, 16, 4):
        group = proposals[first : first + 4]
        assert [one.valid for one in group] == [True, False, False, False]
        assert [one.problem is None for one in group] == [False, False, True, True]
        assert group[1].verdict != group[2].verdict == "malformed"
        assert len({one.prompt for one in group}) == 1


def test_a_cut_off_completion_is_malformed_even_where_its_text_could_be_read(spec, pool):
    proposals, _, _, _ = play(spec, pool)
    assert proposals[3].completion.finish_reason == "length"
    assert proposals[3].verdict == "malformed"


def test_valid_problems_carry_the_verified_output(spec, pool):
    proposals, _, _, _ = play(spec, pool)
    assert proposals[0].problem is not None
    assert (proposals[0].problem.inputs, proposals[0].problem.outputs) == (("2",), ("3",))


def test_students_solve_only_valid_problems_of_their_own_teacher(spec, pool):
    _, solutions, engine, _ = play(spec, pool)
    assert len(solutions) == 4
    solving = [request for request in engine.requests if "Invent" not in LETTERS.decode(request.prompt_ids)]
    assert sorted(request.member for request in solving) == [2, 2, 3, 3]
    assert [solution.solve_rate for solution in solutions] == [0.5, 0.75, 0.5, 0.75]
    assert solutions[0].kinds == ("correct", "correct", "wrong", "malformed")


def test_equal_answers_are_judged_once(spec, pool):
    _, _, _, verifier = play(spec, pool)
    answers = [case for case in verifier.cases if case.answer is not None]
    # Both matchups hold the same two problems, with two different answers each.
    assert len(answers) == 4


def test_no_case_of_a_solution_lets_the_program_see_the_expected_answer(spec, pool):
    _, _, _, verifier = play(spec, pool)
    assert all(case.answer is None or case.outputs == ("3",) for case in verifier.cases)


def test_rewards_are_the_papers(spec, pool):
    proposals, solutions, _, _ = play(spec, pool)
    rewards = cross_evaluate(proposals, solutions, spec)
    assert rewards.teacher_P[:4] == (0.5, -1.0, -1.0, -1.0)
    assert rewards.teacher_P[4:8] == (0.25, -1.0, -1.0, -1.0)
    assert rewards.student_PG[0] == (1.0, 1.0, -0.5, -1.0)
    assert rewards.solve_rate_P[:4] == (0.5, None, None, None)


def test_groups_are_prompts_of_one_member_with_all_their_completions(spec, pool):
    proposals, solutions, _, _ = play(spec, pool)
    groups = training_groups(proposals, solutions, cross_evaluate(proposals, solutions, spec), spec)
    assert [(group.role, group.member) for group in groups] == [
        ("teacher", 0),
        ("teacher", 0),
        ("teacher", 1),
        ("teacher", 1),
        ("student", 2),
        ("student", 2),
        ("student", 3),
        ("student", 3),
    ]
    assert all(len(group.completions) == len(group.rewards_G) == 4 for group in groups)
    assert groups[0].rewards_G == (0.5, -1.0, -1.0, -1.0)


def test_frozen_teachers_propose_but_are_not_trained(spec, pool):
    proposals, solutions, _, _ = play(spec, pool)
    frozen = spec.model_copy(update={"training": spec.training.model_copy(update={"freeze_teachers": True})})
    groups = training_groups(proposals, solutions, cross_evaluate(proposals, solutions, frozen), frozen)
    assert {group.role for group in groups} == {"student"}


def test_a_problem_too_long_for_a_students_prompt_is_invalid(spec, pool):
    short = spec.model_copy(update={"training": spec.training.model_copy(update={"max_prompt_tokens": 100})})
    proposals, solutions, _, _ = play(short, pool)
    assert proposals[0].verdict == "prompt_limit"
    assert not solutions


def test_seeds_follow_from_the_step_and_the_members_and_from_nothing_else(spec, pool):
    def seeds(step: int) -> list[int]:
        return [request.seed for request in play(spec, pool, step=step)[2].requests]

    assert seeds(1) == seeds(1)
    assert not set(seeds(1)) & set(seeds(2))
    assert len(set(seeds(1))) == len(seeds(1))


def test_a_single_agent_plays_both_roles(spec, pool):
    engine = ScriptedEngine(teach_then_solve)
    tools = Tools(engine, pool, ChatTemplate(), LETTERS)

    async def play_round():
        proposals = await propose([Matchup(0, 0)], single_agent(), spec, 1, ProblemBuffer(64), tools)
        return proposals, await solve(proposals, single_agent(), spec, 1, tools)

    proposals, solutions = asyncio.run(play_round())
    groups = training_groups(proposals, solutions, cross_evaluate(proposals, solutions, spec), spec)
    assert {request.member for request in engine.requests} == {0}
    assert {group.role for group in groups} == {"teacher", "student"}


def test_a_program_that_the_buffer_holds_counts_as_seen(spec, pool):
    def repeat(prompt: str, request: RolloutRequest, number: int) -> str:
        if "Invent" in prompt:
            return proposal_text("def f(a):\n    return a  # the identity", "1")
        return "```output\n1\n```"

    proposals, _, _, _ = play(spec, pool, repeat)
    assert all(one.seen for one in proposals)
    fresh, _, _, _ = play(spec, pool)
    assert not any(one.seen for one in fresh)


def function_text(inputs: Sequence[str]) -> str:
    return "".join(f"```input\n{one}\n```\n" for one in inputs) + "```message\nThe argument itself.\n```"


def teach_a_function(prompt: str, request: RolloutRequest, number: int) -> str:
    if "Here is a Python program. A student will see" in prompt:
        return function_text((("1", "2", "3", "4"), ("1", "2", " 1", "2"), ("1", "1"), ("1", "2", "True"))[number])
    hidden_only = "def f(a):\n    return None if a == 1 else a"
    shown_only = "def f(a):\n    return a if a in (1, 2) else None"
    return f"```python\n{(hidden_only, shown_only, 'def f(a):' + chr(10) + '    return a', 'def f(')[number]}\n```"


@pytest.fixture
def functions(spec) -> Spec:
    return spec.model_copy(update={"tasks": spec.tasks.model_copy(update={"types": ("code_f",)})})


def test_a_function_is_judged_on_the_hidden_pairs_alone(functions, pool):
    proposals, solutions, _, verifier = play(functions, pool, teach_a_function)
    assert proposals[0].problem is not None
    assert proposals[0].problem.inputs == ("1", "2", "3", "4")
    assert solutions[0].kinds == ("correct", "wrong", "correct", "malformed")
    answers = [case for case in verifier.cases if case.answer is not None]
    assert {case.inputs for case in answers if len(case.inputs) == 2} == {("3", "4")}
    assert all(case.outputs == case.inputs for case in answers)  # of the identity program


def test_repeated_inputs_of_a_function_are_dropped_and_too_few_different_ones_are_malformed(functions, pool):
    proposals, _, _, _ = play(functions, pool, teach_a_function)
    assert [one.problem.inputs if one.problem else None for one in proposals[:4]] == [
        ("1", "2", "3", "4"),
        ("1", "2"),
        None,
        ("1", "2", "True"),
    ]
    assert [one.verdict for one in proposals[:4]] == ["valid", "valid", "malformed", "valid"]


def test_what_travels_to_a_sandbox_service_is_judged_there_as_here(functions, pool):
    class Elsewhere:
        """Judges what is left of cases once they have been JSON."""

        async def judge(self, cases: Sequence[Case]) -> list[Judgement]:
            return await pool.judge([case_from_json(json.loads(json.dumps(case_to_json(one)))) for one in cases])

    here = play(functions, pool, teach_a_function)
    there = play(functions, Elsewhere(), teach_a_function)
    assert here[:2] == there[:2]


KEPT = HeldOutPrograms.of(["def f(number):\n    return number + 1"])


@pytest.mark.parametrize("preset", ["PopuLoRA", "AbsoluteZero"])
def test_a_held_out_program_is_neither_run_nor_tried_nor_paid_nor_learned(spec, pool, preset):
    spec = spec.model_copy(update={"rewards": spec.rewards.model_copy(update={"preset": preset})})
    free = proposal_text("def f(x):\n    return x * 3", "1")

    def script(prompt: str, request: RolloutRequest, number: int) -> str:
        if "Invent" in prompt:
            return (PROPOSALS[0], free, PROPOSALS[1], PROPOSALS[2])[number]
        return ("```output\n3\n```" if "Work out" in prompt else "```input\n1\n```") if number else "three"

    proposals, solutions, engine, verifier = play(spec, pool, script, held_out=KEPT)
    assert [one.verdict for one in proposals[:4]] == ["held_out", "valid", "runtime_error", "malformed"]
    assert [one.withheld for one in proposals[:4]] == [True, False, False, False]
    assert not any("x + 1" in case.program for case in verifier.cases)
    assert not any("x + 1" in LETTERS.decode(request.prompt_ids) for request in engine.requests)
    rewards = cross_evaluate(proposals, solutions, spec)
    assert rewards.teacher_P[:4] == (0.0, 0.25, -1.0, -1.0)
    assert rewards.solve_rate_P[:2] == (None, 0.75)
    groups = training_groups(proposals, solutions, rewards, spec)
    assert groups[0].rewards_G == (None, 0.25, -1.0, -1.0)
    assert groups[0].completions == tuple(one.completion for one in proposals[:4])


def test_without_held_out_programs_the_same_round_has_no_such_verdict(spec, pool):
    proposals, _, _, _ = play(spec, pool)
    assert proposals[0].valid
    assert not any(one.withheld for one in proposals)


def test_an_answer_that_is_a_held_out_program_is_judged_and_not_learned(functions, pool):
    def script(prompt: str, request: RolloutRequest, number: int) -> str:
        if "Here is a Python program. A student will see" in prompt:
            return function_text(("1", "2", "3", "4"))
        program = ("a", "a + 1", "a", "a - 1")[number]
        return f"```python\ndef f(a):\n    return {program}\n```"

    proposals, solutions, _, _ = play(functions, pool, script, held_out=KEPT)
    assert solutions[0].kinds == ("correct", "wrong", "correct", "wrong")
    assert solutions[0].withheld_G == (False, True, False, False)
    groups = training_groups(proposals, solutions, cross_evaluate(proposals, solutions, functions), functions)
    learned = [group.rewards_G for group in groups if group.role == "student"]
    assert set(learned) == {(1.0, None, 1.0, -0.5)}


def test_a_completion_that_is_left_alone_in_its_group_is_not_learned_either(spec, pool):
    def script(prompt: str, request: RolloutRequest, number: int) -> str:
        return PROPOSALS[0 if number else 2] if "Invent" in prompt else "three"

    proposals, solutions, _, _ = play(spec, pool, script, held_out=KEPT)
    groups = training_groups(proposals, solutions, cross_evaluate(proposals, solutions, spec), spec)
    assert not solutions
    assert {group.rewards_G for group in groups} == {(None, None, None, None)}


class Straggling(ScriptedEngine):
    """Is done with the last request first, and with each only when something else has happened meanwhile."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.events: list[str] = []

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Wave, None]:
        self.requests += requests
        teaching = "Invent" in LETTERS.decode(requests[0].prompt_ids)
        self.events.append("teachers begin" if teaching else "students begin")
        for number in reversed(range(len(requests))):
            await asyncio.sleep(0.3 if teaching else 0.0)
            completions = [self._completion(requests[number], one) for one in range(requests[number].n)]
            self.events.append("a teacher is done" if teaching else "a student is done")
            yield [(number, completions)]


def play_streaming(spec: Spec, pool: SandboxPool, engine: ScriptedEngine, judge: CountingVerifier | None = None):
    tools = Tools(engine, judge or CountingVerifier(pool), ChatTemplate(), LETTERS)

    async def play_round() -> tuple[list[Proposal], list[Solution]]:
        async with students_at_work(founders(2, 2), spec, 1, tools) as students:
            proposals = await propose(
                MATCHUPS, founders(2, 2), spec, 1, ProblemBuffer(64), tools, accepted=students.begin
            )
            return proposals, await students.finish(proposals)

    return asyncio.run(play_round())


def test_students_begin_with_a_problem_while_teachers_still_write_others(spec, pool):
    engine = Straggling(teach_then_solve)
    play_streaming(spec, pool, engine)
    events = engine.events
    assert events.count("a teacher is done") == 4
    last_teacher = len(events) - 1 - events[::-1].index("a teacher is done")
    assert "a student is done" in events[:last_teacher]


def test_what_a_round_brings_does_not_depend_on_what_was_done_first(spec, pool):
    proposals, solutions, _, _ = play(spec, pool)
    streamed = play_streaming(spec, pool, Straggling(teach_then_solve))
    assert streamed == (proposals, solutions)
    assert cross_evaluate(*streamed, spec) == cross_evaluate(proposals, solutions, spec)
    in_one_wave = play_streaming(spec, pool, ScriptedEngine(teach_then_solve))
    assert in_one_wave == (proposals, solutions)


def test_one_wave_asks_for_what_separate_phases_ask_for_with_the_same_draws(spec, pool):
    _, _, apart, _ = play(spec, pool)
    together = ScriptedEngine(teach_then_solve)
    play_streaming(spec, pool, together)
    assert together.requests == apart.requests


def test_draws_of_problems_that_come_in_waves_are_all_different(spec, pool):
    engine = Straggling(teach_then_solve)
    play_streaming(spec, pool, engine)
    assert len({request.seed for request in engine.requests}) == len(engine.requests)


def test_what_fails_in_a_student_ends_the_round_with_its_own_error_and_leaves_nothing_running(spec, pool):
    class Failing(Straggling):
        async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Wave, None]:
            if "Invent" not in LETTERS.decode(requests[0].prompt_ids):
                raise RolloutError("no replica is left")
            async for wave in super().generate(requests):
                yield wave

    engine = Failing(teach_then_solve)
    with pytest.raises(RolloutError, match=r"^no replica is left$"):
        play_streaming(spec, pool, engine)
    assert engine.events.count("a teacher is done") < 4


def test_what_fails_in_a_teacher_ends_the_round_with_its_own_error(spec, pool):
    class Failing(Straggling):
        async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Wave, None]:
            teaching = "Invent" in LETTERS.decode(requests[0].prompt_ids)
            async for wave in super().generate(requests):
                yield wave
                if teaching and self.events.count("a teacher is done") == 2:
                    raise RolloutError("the prompt is too long")

    with pytest.raises(RolloutError, match=r"^the prompt is too long$"):
        play_streaming(spec, pool, Failing(teach_then_solve))
