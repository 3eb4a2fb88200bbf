"""The training loop, as section 3.3 of arXiv 2605.16727 has it: five phases a step, over a population of adapters.

    (1) matchmaking          every teacher gets a student (PFSP over TrueSkill)
    (2) teacher generation   teachers write problems, the verifier keeps the valid ones
    (3) student solve        each matched student tries each problem several times
    (4) cross-evaluation     both are rewarded and rated, and all adapters are updated at once
    (5) evolution            every k steps the weakest make room for children of the others

Phase (5) opens the step that follows: a run's last population is then never freshly bred, and a run that is given
more steps later equals one that had them from the start.

The clock has two phases more than the paper. "sync" is the time until every vLLM replica serves the members' present
weights, next to nothing where this process samples. "propose" ends with the last proposal's verdict and "solve" with
the last judged answer: where the engine is done with some requests before others, students begin during "propose", and
"solve" is what they need beyond it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from populora_api import Spec
from populora_trainer.diagnostics.archive import Archive
from populora_trainer.learning.update import Learner
from populora_trainer.observations import Observations, Stopwatch
from populora_trainer.population import child_report, evolution, lineage
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.population.matchmaking import matchmake
from populora_trainer.population.members import Member
from populora_trainer.population.operators import OPERATORS, breed
from populora_trainer.population.peft_format import AdapterConfig
from populora_trainer.population.ratings import Exchange, games, rate
from populora_trainer.randomness import choices
from populora_trainer.selfplay import Solution, Tools, cross_evaluate, propose, students_at_work, training_groups
from populora_trainer.storage.checkpoint import Adapter, CheckpointState
from populora_trainer.tasks.buffer import ProblemBuffer


class Trainer:
    """A population in training: its members, their weights and optimizer, and what they have seen.

    Attributes:
        members: who holds which slot of the stacked weights.
        step: number of steps done.
    """

    def __init__(
        self,
        spec: Spec,
        members: Sequence[Member],
        population: LoraPopulation,
        learner: Learner,
        tools: Tools,
        adapter: AdapterConfig,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.spec = spec
        self.members = tuple(members)
        self.population = population
        self.learner = learner
        self.tools = tools
        self.adapter = adapter
        self.on_phase = on_phase
        self.buffer = ProblemBuffer(spec.tasks.buffer_size, tools.held_out)
        self.archive = Archive()
        self.step = 0

    async def train_step(self) -> Observations:
        """Do the next step; weights, ratings, buffer and archive move on. Returns what was observed."""
        spec, step, clock = self.spec, self.step + 1, Stopwatch(self.on_phase)
        births: list[lineage.Record] = []
        if spec.evolution.every_steps and step > 1 and (step - 1) % spec.evolution.every_steps == 0:
            with clock("evolution"):
                births = self._evolve(step)
        members = self.members

        with clock("matchmaking"):
            matchups = matchmake(
                members,
                self._chance(step, "matchmaking"),
                strategy=spec.matchmaking.strategy,
                weighting=spec.matchmaking.weighting,
            )
        with clock("sync"):
            await self.tools.engine.follow(self.step, members)
        async with students_at_work(members, spec, step, self.tools) as students:
            with clock("propose"):
                proposals = await propose(matchups, members, spec, step, self.buffer, self.tools, students.begin)
            with clock("solve"):
                solutions = await students.finish(proposals)
        with clock("evaluate"):
            rewards = cross_evaluate(proposals, solutions, spec)
            played = games(
                [
                    Exchange(proposal.matchup.teacher, proposal.matchup.student, proposal.task, rho)
                    for proposal, rho in zip(proposals, rewards.solve_rate_P, strict=True)
                    if not proposal.withheld
                ],
                spec.matchmaking.games_per,
            )
            self.members = rate(members, played)
            self._remember(step, members, solutions)
        with clock("update"):
            update = self.learner.update(training_groups(proposals, solutions, rewards, spec))

        self.step = step
        return Observations(
            step=step,
            seconds=clock.seconds,
            before=members,
            after=self.members,
            matchups=matchups,
            proposals=proposals,
            solutions=solutions,
            rewards=rewards,
            games=played,
            update=update,
            births=births,
            coverage=self.archive.coverage,
        )

    def _evolve(self, step: int) -> list[lineage.Record]:
        """Replace the weakest of each role by children of others, and return the family records."""
        evolve = self.spec.evolution
        before = self.members
        plan = evolution.plan(
            before,
            max(member.generation for member in before) + 1,
            step,
            self._chance(step, "evolution"),
            replace_fraction=evolve.replace_fraction,
            operators=[
                evolution.Breeding(one.id, OPERATORS[one.id].arity, one.weight, OPERATORS[one.id].fitter)
                for one in evolve.operators
            ],
        )
        records = lineage.ranks(before, step)
        children = []
        for one in plan:
            parents = [self.population.factors(slot) for slot in one.parents]
            child = breed(one.operator, parents, torch.Generator().manual_seed(one.seed))
            children.append(child)
            report = asdict(child_report.report(parents, child))
            parameters = OPERATORS[one.operator].parameters
            records.append(lineage.birth(one, before, parameters=parameters, diagnostics=report))
        for one, child in zip(plan, children, strict=True):
            self.population.set_factors(one.slot, child)
            self.learner.reset(one.slot)
        self.learner.share()
        self.members = evolution.apply(before, plan)
        return records

    def _remember(self, step: int, members: Sequence[Member], solutions: Sequence[Solution]) -> None:
        """Put the step's valid problems into the buffer and the teachers' own programs into the archive."""
        for solution in solutions:
            proposal, rho = solution.proposal, solution.solve_rate
            assert proposal.problem is not None
            author = members[proposal.matchup.teacher].name
            self.buffer.add(proposal.problem, author=author, step=step, solve_rate=rho)
            if proposal.task != "code_f":
                self.archive.insert(proposal.problem.program, solve_rate=rho, author=author, step=step)

    def _chance(self, step: int, purpose: str) -> random.Random:
        return choices(self.spec.population.seed, step, purpose)

    def state(self) -> CheckpointState:
        """Return everything that the next step depends on."""
        return CheckpointState(
            members=self.members,
            adapters=[Adapter(self.population.factors(slot), self.adapter) for slot in range(len(self.members))],
            optimizer=self.learner.state(),
            buffer=self.buffer.to_bytes(),
            archive=self.archive.to_bytes(),
            counters={},
        )

    def restore(self, step: int, state: CheckpointState) -> None:
        """Go on from what `state` returned after a step, bit for bit."""
        for slot, adapter in enumerate(state.adapters):
            self.population.set_factors(slot, adapter.factors)
        self.members = tuple(state.members)
        self.learner.load_state(state.optimizer)
        self.learner.share()
        self.buffer = ProblemBuffer.from_bytes(state.buffer, self.tools.held_out)
        self.archive = Archive.from_bytes(state.archive)
        self.step = step
