"""Absolute Zero's start: problems that the untrained base writes, as the first references of the run's teachers.

Source: Absolute Zero (arXiv 2505.03335), section 3.3.1: valid (program, input, output) triplets, sampled before any
update with the proposers' own prompts, fill the buffers of both code_i and code_o; references come from the triplets
that are there already, at first from the identity program alone. Nothing reads code_f problems of the buffer, whose
proposers are given code_i and code_o programs, so that none are sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from populora_api import Spec
from populora_trainer.diagnostics.records import SeedingRecord
from populora_trainer.population.matchmaking import Matchup
from populora_trainer.population.members import Member
from populora_trainer.randomness import draw
from populora_trainer.selfplay import Tools, propose
from populora_trainer.tasks.buffer import ProblemBuffer
from populora_trainer.tasks.problem import WRITTEN, TaskType

AUTHOR = "base"
STEP = 0
PROPOSALS_PER_PROBLEM = 32
"""A base of which fewer than one proposal in so many is valid and new is not asked any further."""


@dataclass(frozen=True, slots=True)
class Seeding:
    """What came of it so far.

    Attributes:
        wanted: problems that were asked for.
        kept: different valid problems that went into the buffer.
        proposals, valid: what the base wrote, and how much of it the verifier accepted.
        tokens: that were sampled.
    """

    wanted: int
    kept: int = 0
    proposals: int = 0
    valid: int = 0
    tokens: int = 0

    def record(self) -> SeedingRecord:
        """Return the numbers as metrics.jsonl holds them."""
        return {
            "wanted": self.wanted,
            "kept": self.kept,
            "proposals": self.proposals,
            "valid": self.valid,
            "tokens": self.tokens,
        }

    @property
    def done(self) -> bool:
        """Whether all are there, or the base is given up."""
        return self.kept >= self.wanted or self.proposals >= PROPOSALS_PER_PROBLEM * self.wanted


async def seed_problems(
    spec: Spec,
    buffer: ProblemBuffer,
    tools: Tools,
    *,
    on_round: Callable[[Seeding], None] = lambda seeding: None,
    stop: Callable[[], bool] = lambda: False,
) -> Seeding | None:
    """Fill a new run's buffer with `tasks.seedProblems` problems; returns None where a stop was asked for before.

    Proposals are made in rounds of as many as one teacher makes in a step, and judged as any others. They are those of
    the first adapter, which before the first step is the base, as B is 0. What is drawn is named by the run's seed and
    the round, not by members: runs with one seed have one start, whatever their population.

    Args:
        spec: of the run.
        buffer: with the identity program alone; both its code_i and its code_o section get every problem.
        tools: an engine that serves the population as it is before the first step.
        on_round: told before the first round, and after each.
        stop: asked before each round.
    """
    types: tuple[TaskType, ...] = tuple(task for task in spec.tasks.types if task in WRITTEN) or ("code_o",)
    writer = Member(AUTHOR, "teacher")
    seeding, number = Seeding(spec.tasks.seed_problems), 0
    on_round(seeding)
    while not seeding.done:
        if stop():
            return None
        number += 1
        asked = spec.model_copy(
            update={
                "tasks": spec.tasks.model_copy(update={"types": types}),
                "population": spec.population.model_copy(
                    update={"seed": draw(spec.population.seed, "seed problems", number)}
                ),
            }
        )
        proposals = await propose([Matchup(0, 0)], [writer], asked, STEP, buffer, tools)
        valid = [proposal.problem for proposal in proposals if proposal.valid and proposal.problem is not None]
        kept = seeding.kept
        for problem in valid:
            if kept < seeding.wanted:
                added = [buffer.add(replace(problem, task=task), author=AUTHOR, step=STEP) for task in sorted(WRITTEN)]
                kept += all(added)
        seeding = Seeding(
            wanted=seeding.wanted,
            kept=kept,
            proposals=seeding.proposals + len(proposals),
            valid=seeding.valid + len(valid),
            tokens=seeding.tokens + sum(len(proposal.completion.token_ids) for proposal in proposals),
        )
        on_round(seeding)
    return seeding


def held(buffer: ProblemBuffer) -> int:
    """Return the number of seed problems that the buffer still holds."""
    return sum(entry.author == AUTHOR for entry in buffer.entries("code_o"))
