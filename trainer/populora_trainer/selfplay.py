"""One round of self-play as values: teachers propose, the verifier judges, students solve, both are rewarded.

Nothing here changes a weight, a rating or the buffer; `loop.py` does that with what these functions return. Every
random draw is named by (run seed, step, member, purpose), so a round can be repeated from its step number.

Sampling and judging go on in waves, as the engine is done with requests: a problem reaches its student as soon as the
verifier has accepted it. What is returned is in the order of what was asked, whatever was done first.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from populora_api import Spec
from populora_trainer.learning.update import Group
from populora_trainer.population.matchmaking import Matchup
from populora_trainer.population.members import Member
from populora_trainer.randomness import choices, draw
from populora_trainer.rollout.engine import Completion, RolloutEngine, RolloutRequest
from populora_trainer.sandbox import Case, Judgement, Verifier
from populora_trainer.tasks.budget import proposal_prompt
from populora_trainer.tasks.buffer import ProblemBuffer
from populora_trainer.tasks.cases import answer_case, proposal_case
from populora_trainer.tasks.held_out import NOTHING_HELD_OUT, HeldOutPrograms
from populora_trainer.tasks.problem import Problem, TaskType
from populora_trainer.tasks.rewards import PRESETS, AnswerKind, student_reward, teacher_reward
from populora_trainer.tasks.templates import Template, Tokenizer

HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Tools:
    """What a round plays with.

    Attributes:
        engine: samples.
        verifier: judges.
        template, tokenizer: turn problems into tokens, and tokens into answers.
        held_out: programs that no update and no prompt of the training may see.
    """

    engine: RolloutEngine
    verifier: Verifier
    template: Template
    tokenizer: Tokenizer
    held_out: HeldOutPrograms = NOTHING_HELD_OUT


@dataclass(frozen=True, slots=True)
class Proposal:
    """One proposed problem and what the verifier said of it.

    Attributes:
        matchup: the pair that it was proposed for.
        task: its type.
        prompt: number of its prompt within the round; proposals of one prompt form the teacher's group.
        prompt_ids: the proposer's prompt as tokens.
        completion: what the teacher wrote, as tokens.
        text: the same as text.
        problem: the parsed problem, canonical and with outputs once valid; None where the text cannot be parsed.
        verdict: the verifier's verdict, "malformed" where nothing could be parsed, "held_out" where its program is
            kept for evaluation, or "prompt_limit" where the problem does not fit into a student's prompt.
        seen: whether the buffer knew the program before the round (code_i and code_o, where the program is new text).
    """

    matchup: Matchup
    task: TaskType
    prompt: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str
    problem: Problem | None
    verdict: str
    valid: bool = False
    seen: bool = False

    @property
    def withheld(self) -> bool:
        """Whether its program is kept for evaluation: it is not run, not tried, not paid, not rated and not learned."""
        return self.verdict == HELD_OUT


@dataclass(frozen=True, slots=True)
class Solution:
    """The student's rollouts on one valid proposal, with a judgement each.

    `withheld_G` marks programs that are kept for evaluation, written as answers to another problem: they are judged
    like all answers, and not learned.
    """

    proposal: Proposal
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    kinds: tuple[AnswerKind, ...]
    withheld_G: tuple[bool, ...]

    @property
    def solve_rate(self) -> float:
        """Share of the rollouts that are correct: rho in arXiv 2605.16727, equation 2."""
        return sum(kind == "correct" for kind in self.kinds) / len(self.kinds)


async def propose(
    matchups: Sequence[Matchup],
    members: Sequence[Member],
    spec: Spec,
    step: int,
    buffer: ProblemBuffer,
    tools: Tools,
    accepted: Callable[[Sequence[Proposal]], None] = lambda proposals: None,
) -> list[Proposal]:
    """Let every matchup's teacher write `tasks.problemsPerMatchup` problems and have them validated.

    The proposals of a matchup are split equally over the task types; each prompt carries references of its own from
    the buffer, as many as fit into it, and is sampled `training.proposalsPerPrompt` times. `accepted` is told of valid
    problems wave by wave.
    """
    per_prompt = spec.training.proposals_per_prompt
    prompts_per_task = spec.tasks.problems_per_matchup // (len(spec.tasks.types) * per_prompt)
    asked: list[tuple[Matchup, TaskType, list[Problem]]] = []
    requests: list[RolloutRequest] = []
    for matchup in matchups:
        teacher, student = members[matchup.teacher].name, members[matchup.student].name
        for task in spec.tasks.types:
            for number in range(prompts_per_task):
                name = (spec.population.seed, step, teacher, student, task, number)
                drawn = buffer.references(task, spec.tasks.references_per_proposal, choices(*name, "references"))
                references, prompt_ids = proposal_prompt(
                    tools.template, tools.tokenizer, task, drawn, spec.training.max_prompt_tokens
                )
                asked.append((matchup, task, references))
                requests.append(_request(spec, matchup.teacher, prompt_ids, per_prompt, draw(*name, "propose")))

    judged: dict[int, list[Proposal]] = {}
    async with aclosing(tools.engine.generate(requests)) as waves:
        async for wave in waves:
            proposals = []
            for prompt, completions in wave:
                matchup, task, references = asked[prompt]
                for completion in completions:
                    text = tools.template.decode(tools.tokenizer, completion.token_ids)
                    finished = completion.finish_reason == "stop"
                    problem = tools.template.parse_proposal(task, text, references) if finished else None
                    given = requests[prompt].prompt_ids
                    proposals.append(
                        Proposal(matchup, task, prompt, given, completion, text, problem, verdict="malformed")
                    )
            proposals = await _validate(proposals, spec, buffer, tools)
            for proposal in proposals:
                judged.setdefault(proposal.prompt, []).append(proposal)
            accepted([proposal for proposal in proposals if proposal.valid])
    return [proposal for prompt in range(len(requests)) for proposal in judged[prompt]]


async def solve(
    proposals: Sequence[Proposal],
    members: Sequence[Member],
    spec: Spec,
    step: int,
    tools: Tools,
    first: int = 0,
) -> list[Solution]:
    """Let the matched student try every valid proposal `training.rolloutsPerProblem` times and judge each try.

    `first` is the number of valid proposals of the round that were given before: the draws are named by that count.
    """
    valid = [proposal for proposal in proposals if proposal.valid]
    requests = []
    for number, proposal in enumerate(valid, first):
        teacher, student = members[proposal.matchup.teacher].name, members[proposal.matchup.student].name
        assert proposal.problem is not None
        prompt_ids = tools.template.encode(tools.tokenizer, tools.template.solve(proposal.problem))
        seed = draw(spec.population.seed, step, teacher, student, number, "solve")
        requests.append(_request(spec, proposal.matchup.student, prompt_ids, spec.training.rollouts_per_problem, seed))
    problems = [proposal.problem for proposal in valid if proposal.problem is not None]
    solved: dict[int, Solution] = {}
    async with aclosing(tools.engine.generate(requests)) as waves:
        async for wave in waves:
            tried = [problems[number] for number, _ in wave]
            answers = read_answers(tried, [completions for _, completions in wave], tools)
            kinds = await judge_answers(tried, answers, tools)
            for (number, completions), answers_G, kinds_G in zip(wave, answers, kinds, strict=True):
                writes = problems[number].task == "code_f"
                withheld_G = tuple(writes and answer in tools.held_out for answer in answers_G)
                solved[number] = Solution(
                    valid[number], requests[number].prompt_ids, tuple(completions), kinds_G, withheld_G
                )
    return [solved[number] for number in range(len(valid))]


class Students:
    """The round's students: they try problems while their teachers still write others."""

    def __init__(
        self, group: asyncio.TaskGroup, members: Sequence[Member], spec: Spec, step: int, tools: Tools
    ) -> None:
        self._group = group
        self._members, self._spec, self._step, self._tools = members, spec, step, tools
        self._tasks: list[asyncio.Task[list[Solution]]] = []
        self._begun = 0

    def begin(self, proposals: Sequence[Proposal]) -> None:
        """Start to solve valid proposals."""
        if proposals:
            solving = solve(proposals, self._members, self._spec, self._step, self._tools, self._begun)
            self._tasks.append(self._group.create_task(solving))
            self._begun += len(proposals)

    async def finish(self, proposals: Sequence[Proposal]) -> list[Solution]:
        """Return the solutions of the round's valid proposals, in their order, when all are there."""
        solutions = {id(solution.proposal): solution for task in self._tasks for solution in await task}
        return [solutions[id(proposal)] for proposal in proposals if proposal.valid]


@asynccontextmanager
async def students_at_work(
    members: Sequence[Member], spec: Spec, step: int, tools: Tools
) -> AsyncGenerator[Students, None]:
    """Yield the round's students; what fails in one of them ends the round, and no work of theirs outlives it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield Students(group, members, spec, step, tools)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def read_answers(
    problems: Sequence[Problem], completions_per_problem: Sequence[Sequence[Completion]], tools: Tools
) -> list[tuple[str | None, ...]]:
    """Return for every problem the answer that each completion gives, None where it is malformed or cut off."""
    template, tokenizer = tools.template, tools.tokenizer
    return [
        tuple(
            template.parse_solution(problem, template.decode(tokenizer, completion.token_ids))
            if completion.finish_reason == "stop"
            else None
            for completion in completions
        )
        for problem, completions in zip(problems, completions_per_problem, strict=True)
    ]


async def judge_answers(
    problems: Sequence[Problem], answers: Sequence[Sequence[str | None]], tools: Tools
) -> list[tuple[AnswerKind, ...]]:
    """Return for every problem one of correct, wrong and malformed per answer.

    Equal answers to equal problems are executed once: students repeat themselves, above all on easy problems.
    """
    cases: dict[tuple[Problem, str], Case] = {}
    for problem, row in zip(problems, answers, strict=True):
        for answer in row:
            if answer is not None and (problem, answer) not in cases:
                cases[problem, answer] = answer_case(problem, answer, str(len(cases)))
    judged = await tools.verifier.judge(list(cases.values()))
    kind_of = {key: _answer_kind(judgement) for key, judgement in zip(cases, judged, strict=True)}
    return [
        tuple("malformed" if answer is None else kind_of[problem, answer] for answer in row)
        for problem, row in zip(problems, answers, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a round pays: one reward per proposal, and one per rollout of every solution, in their order."""

    teacher_P: tuple[float, ...]
    student_PG: tuple[tuple[float, ...], ...]
    solve_rate_P: tuple[float | None, ...]


def cross_evaluate(proposals: Sequence[Proposal], solutions: Sequence[Solution], spec: Spec) -> Rewards:
    """Reward students by their answers and teachers by how hard, but solvable, their problems were.

    A proposal whose program is held out earns 0, with every preset, and is left out of the update: paid or punished, it
    would tell the teacher which programs are held out.

    Source: arXiv 2605.16727, equations 1 and 2.
    """
    solve_rate = {id(solution.proposal): solution.solve_rate for solution in solutions}
    rates = tuple(solve_rate.get(id(proposal)) for proposal in proposals)
    preset, penalty = PRESETS[spec.rewards.preset], spec.tasks.novelty_penalty
    teacher = tuple(
        0.0
        if proposal.withheld
        else teacher_reward(rate, preset, task=proposal.task, seen=proposal.seen, novelty_penalty=penalty)
        for proposal, rate in zip(proposals, rates, strict=True)
    )
    student = tuple(tuple(student_reward(kind, preset) for kind in solution.kinds) for solution in solutions)
    return Rewards(teacher, student, rates)


def training_groups(
    proposals: Sequence[Proposal], solutions: Sequence[Solution], rewards: Rewards, spec: Spec
) -> list[Group]:
    """Return what the learner learns from: the completions of one prompt with their rewards, teachers first.

    What is held out has None for its reward, which keeps a completion out of the gradient and of its group's mean.
    """
    groups = []
    if not spec.training.freeze_teachers:
        by_prompt: dict[int, list[tuple[Proposal, float]]] = {}
        for proposal, reward in zip(proposals, rewards.teacher_P, strict=True):
            by_prompt.setdefault(proposal.prompt, []).append((proposal, reward))
        for rows in by_prompt.values():
            first = rows[0][0]
            groups.append(
                Group(
                    member=first.matchup.teacher,
                    role="teacher",
                    task=first.task,
                    prompt_ids=first.prompt_ids,
                    completions=tuple(proposal.completion for proposal, _ in rows),
                    rewards_G=_learned([reward for _, reward in rows], [one.withheld for one, _ in rows]),
                )
            )
    for solution, rewards_G in zip(solutions, rewards.student_PG, strict=True):
        groups.append(
            Group(
                member=solution.proposal.matchup.student,
                role="student",
                task=solution.proposal.task,
                prompt_ids=solution.prompt_ids,
                completions=solution.completions,
                rewards_G=_learned(rewards_G, solution.withheld_G),
            )
        )
    return groups


def _learned(rewards_G: Sequence[float], withheld_G: Sequence[bool]) -> tuple[float | None, ...]:
    """Take out what no update may see, and with it a completion that is left with nothing to be compared with."""
    if not any(withheld_G):
        return tuple(rewards_G)
    alone = withheld_G.count(False) == 1
    return tuple(None if withheld or alone else reward for reward, withheld in zip(rewards_G, withheld_G, strict=True))


def _request(spec: Spec, member: int, prompt_ids: Sequence[int], n: int, seed: int) -> RolloutRequest:
    return RolloutRequest(
        member=member,
        prompt_ids=tuple(prompt_ids),
        n=n,
        seed=seed,
        max_tokens=spec.training.max_response_tokens,
        temperature=spec.training.temperature,
    )


def _answer_kind(judgement: Judgement) -> AnswerKind:
    kind = judgement.kind
    assert kind == "correct" or kind == "wrong" or kind == "malformed", f"an answer was judged {kind}"
    return kind


async def _validate(proposals: list[Proposal], spec: Spec, buffer: ProblemBuffer, tools: Tools) -> list[Proposal]:
    """Run every parsed proposal that is not held out, and return all proposals with their verdicts, in order."""
    proposals = [
        replace(proposal, verdict=HELD_OUT)
        if proposal.problem is not None and proposal.problem.program in tools.held_out
        else proposal
        for proposal in proposals
    ]
    cases: dict[Problem, Case] = {}
    for proposal in proposals:
        problem = proposal.problem
        if problem is not None and not proposal.withheld and problem not in cases:
            cases[problem] = proposal_case(problem, str(len(cases)))
    judged = dict(zip(cases, await tools.verifier.judge(list(cases.values())), strict=True))
    return [
        proposal
        if proposal.problem is None or proposal.withheld
        else _judged(proposal, proposal.problem, judged[proposal.problem], spec, buffer, tools)
        for proposal in proposals
    ]


def _judged(
    proposal: Proposal,
    problem: Problem,
    judgement: Judgement,
    spec: Spec,
    buffer: ProblemBuffer,
    tools: Tools,
) -> Proposal:
    if judgement.kind != "valid":
        return replace(proposal, verdict=str(judgement.verdict))
    problem = replace(problem, inputs=judgement.inputs, outputs=judgement.outputs)
    prompt_ids = tools.template.encode(tools.tokenizer, tools.template.solve(problem))
    if len(prompt_ids) > spec.training.max_prompt_tokens:
        return replace(proposal, problem=problem, verdict="prompt_limit")
    seen = problem.task != "code_f" and buffer.seen(problem.program)
    return replace(proposal, problem=problem, verdict=str(judgement.verdict), valid=True, seen=seen)
