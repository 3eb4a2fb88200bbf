"""What a step showed: from the loop's values to the lines of the run's logs."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from populora_trainer.diagnostics.complexity import measure
from populora_trainer.diagnostics.metrics import Sample, assemble, solve_rates
from populora_trainer.diagnostics.records import (
    ComplexityRecord,
    HeldOutRecord,
    MatchupRecord,
    MemberStatus,
    ProblemRecord,
    StepMetrics,
    TaskGame,
)
from populora_trainer.learning.update import UpdateMetrics
from populora_trainer.population.lineage import Record
from populora_trainer.population.matchmaking import Matchup
from populora_trainer.population.members import Member
from populora_trainer.population.ratings import Game, win_probability
from populora_trainer.rollout.engine import Completion
from populora_trainer.selfplay import Proposal, Rewards, Solution
from populora_trainer.tasks.problem import TaskType


class Stopwatch:
    """Seconds of wall time per phase; says when a phase begins."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the body as a phase."""
        self._on_phase(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Observations:
    """The values of one step, as they were.

    Attributes:
        step: its number, from 1.
        seconds: wall time per phase.
        before, after: the members that played it, and the same with the ratings they hold after it.
        births: family records of the evolution that opened it.
        coverage: share of the archive's cells that are occupied after it.
    """

    step: int
    seconds: dict[str, float]
    before: tuple[Member, ...]
    after: tuple[Member, ...]
    matchups: Sequence[Matchup]
    proposals: Sequence[Proposal]
    solutions: Sequence[Solution]
    rewards: Rewards
    games: Sequence[Game]
    update: UpdateMetrics
    births: Sequence[Record]
    coverage: float

    def problem_records(self) -> list[ProblemRecord]:
        """Return a line for every proposal, valid or not."""
        return [
            {
                "step": self.step,
                "teacher": self.before[proposal.matchup.teacher].name,
                "student": self.before[proposal.matchup.student].name,
                "task": proposal.task,
                "program": proposal.problem.program if proposal.problem else proposal.text,
                "inputs": list(proposal.problem.inputs) if proposal.problem else [],
                "outputs": list(proposal.problem.outputs) if proposal.problem else [],
                "shown": proposal.problem.shown if proposal.problem else 0,
                "message": proposal.problem.message if proposal.problem else "",
                "verdict": proposal.verdict,
                "valid": proposal.valid,
                "solve_rate": rho,
                "reward": reward,
                "complexity": _complexity(proposal),
                "seen": proposal.seen,
            }
            for proposal, rho, reward in zip(
                self.proposals, self.rewards.solve_rate_P, self.rewards.teacher_P, strict=True
            )
        ]

    def matchup_records(self) -> list[MatchupRecord]:
        """Return a line for every matchup."""
        problems = self.problem_records()
        records: list[MatchupRecord] = []
        for matchup in self.matchups:
            teacher, student = self.before[matchup.teacher], self.before[matchup.student]
            mine = [
                problem
                for problem in problems
                if (problem["teacher"], problem["student"]) == (teacher.name, student.name)
            ]
            tasks: dict[TaskType, TaskGame] = {}
            for task in dict.fromkeys(problem["task"] for problem in mine):
                of_task = [problem for problem in mine if problem["task"] == task]
                valid = [problem for problem in of_task if problem["valid"]]
                tasks[task] = {
                    "proposals": len(of_task),
                    "valid": len(valid),
                    "solve_rate": solve_rates(valid)["overall"],
                }
            record: MatchupRecord = {
                "step": self.step,
                "teacher": teacher.name,
                "student": student.name,
                "tasks": tasks,
                "games": [
                    {"task": game.task, "teacher": game.teacher_result, "student": game.student_result}
                    for game in self.games
                    if (game.teacher, game.student) == (matchup.teacher, matchup.student)
                ],
            }
            if matchup.teacher != matchup.student:
                record["win_probability"] = win_probability(teacher, student)
            records.append(record)
        return records

    def metrics(self, held_out: HeldOutRecord | None = None) -> StepMetrics:
        """Return the step's line of metrics.jsonl."""
        samples = [
            _sample("teacher", proposal.completion, reward)
            for proposal, reward in zip(self.proposals, self.rewards.teacher_P, strict=True)
        ]
        samples += [
            _sample("student", completion, reward)
            for solution, rewards_G in zip(self.solutions, self.rewards.student_PG, strict=True)
            for completion, reward in zip(solution.completions, rewards_G, strict=True)
        ]
        return assemble(
            self.step,
            seconds=self.seconds,
            problems=self.problem_records(),
            samples=samples,
            ratings={member.name: (member.mu, member.sigma) for member in self.after},
            advantage=self.update.advantage(),
            coverage=self.coverage,
            tokens={"sampled": sum(sample.tokens for sample in samples), "trained": self.update.computed_tokens},
            learner=self.update.learner(),
            held_out=held_out,
        )


def member_status(members: Sequence[Member], digests: Sequence[str] | None = None) -> list[MemberStatus]:
    """Return the members as `/status` shows them.

    Args:
        members: the population, in the order of its slots.
        digests: of the folders that their adapters are stored in, in the same order; None where they are not stored.
    """
    shown: list[MemberStatus] = [
        {
            "name": member.name,
            "role": member.role,
            "generation": member.generation,
            "mu": member.mu,
            "sigma": member.sigma,
            "lcb": member.lcb,
        }
        for member in members
    ]
    for status, digest in zip(shown, digests or (), strict=digests is not None):
        status["digest"] = digest
    return shown


def _sample(role: str, completion: Completion, reward: float) -> Sample:
    logprobs = completion.logprobs
    return Sample(role, len(logprobs), reward, -math.fsum(logprobs) / len(logprobs) if logprobs else None)


def _complexity(proposal: Proposal) -> ComplexityRecord | None:
    measured = measure(proposal.problem.program) if proposal.problem else None
    if measured is None:
        return None
    return {
        "ast_depth": measured.ast_depth,
        "cyclomatic": measured.cyclomatic,
        "loc": measured.loc,
        "variables": measured.variables,
    }
