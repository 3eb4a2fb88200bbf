"""The five phases over real weights, the real verifier and rollouts whose worth is known."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from scripted import ScriptedEngine

from populora_api import Spec, load_manifest
from populora_trainer.diagnostics.complexity import measure
from populora_trainer.learning.update import Learner, LearnerSettings
from populora_trainer.loop import Trainer
from populora_trainer.observations import Observations
from populora_trainer.population import child_report
from populora_trainer.population.factors import Pair
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.population.members import founders, single_agent
from populora_trainer.population.operators import OPERATORS, breed
from populora_trainer.population.peft_format import AdapterConfig
from populora_trainer.rollout.base_model import load_base
from populora_trainer.sandbox import SandboxPool
from populora_trainer.selfplay import Tools
from populora_trainer.storage.checkpoint import CheckpointState
from populora_trainer.tasks.compact import CompactTemplate
from populora_trainer.tasks.held_out import NOTHING_HELD_OUT, HeldOutPrograms

MANIFEST = Path(__file__).with_name("tiny.yaml")


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(workers=1, timeout_seconds=5) as pool:
        yield pool


class Played:
    """A trainer with what it did."""

    def __init__(self, pool: SandboxPool, *overrides: str, held_out: HeldOutPrograms = NOTHING_HELD_OUT) -> None:
        spec = load_manifest(MANIFEST, overrides).spec
        base = load_base("builtin://nano")
        alone = spec.mode == "SingleAgent"
        members = single_agent() if alone else founders(spec.population.teachers, spec.population.students)
        self.population = LoraPopulation(
            base.model, len(members), spec.adapter.rank, spec.adapter.alpha, spec.adapter.target_modules, seed=0
        )
        self.engine = ScriptedEngine(base.tokenizer)
        self.learner = Learner(self.population, LearnerSettings(learning_rate=1e-3), pad_id=base.pad_id)
        self.phases: list[str] = []
        self.trainer = Trainer(
            spec,
            members,
            self.population,
            self.learner,
            Tools(self.engine, pool, CompactTemplate(), base.tokenizer, held_out),
            AdapterConfig(spec.adapter.rank, spec.adapter.alpha, spec.adapter.target_modules, base.uri),
            self.phases.append,
        )
        self.observed: list[Observations] = []

    @property
    def spec(self) -> Spec:
        return self.trainer.spec

    def step(self, steps: int = 1) -> Observations:
        for _ in range(steps):
            self.observed.append(asyncio.run(self.trainer.train_step()))
        return self.observed[-1]

    def weights(self) -> list[torch.Tensor]:
        """Return every member's factors as one vector each."""
        return [
            torch.cat([torch.cat([A.flatten(), B.flatten()]) for A, B in self.population.factors(slot).values()])
            for slot in range(len(self.trainer.members))
        ]


@pytest.fixture(scope="module")
def played(pool: SandboxPool) -> Played:
    """Two teachers and two students after three steps of all task types; evolution every second step."""
    played = Played(
        pool, "evolution.everySteps=2", "tasks.types=[code_i, code_o, code_f]", "tasks.problemsPerMatchup=12"
    )
    played.step(3)
    return played


def equal_states(one: CheckpointState, other: CheckpointState) -> bool:
    return (
        tuple(one.members) == tuple(other.members)
        and (one.buffer, one.archive) == (other.buffer, other.archive)
        and one.optimizer.keys() == other.optimizer.keys()
        and all(torch.equal(one.optimizer[name], other.optimizer[name]) for name in one.optimizer)
        and all(
            torch.equal(mine.factors[path].A, theirs.factors[path].A)
            and torch.equal(mine.factors[path].B, theirs.factors[path].B)
            for mine, theirs in zip(one.adapters, other.adapters, strict=True)
            for path in mine.factors
        )
    )


def test_the_phases_of_a_step_come_in_the_papers_order_and_evolution_opens_the_step_after_its_period(played):
    step = ["matchmaking", "sync", "propose", "solve", "evaluate", "update"]
    assert played.phases == [*step, *step, "evolution", *step]
    assert [list(one.seconds) for one in played.observed] == [step, step, ["evolution", *step]]
    assert all(seconds >= 0 for one in played.observed for seconds in one.seconds.values())


def test_teachers_and_students_learn_and_the_base_does_not(pool):
    played = Played(pool)
    weights = played.weights()
    state = {name: tensor.clone() for name, tensor in played.population.model.state_dict().items()}
    observed = played.step()
    assert observed.update.updated == (0, 1, 2, 3)
    for before, after in zip(weights, played.weights(), strict=True):
        assert not torch.equal(before, after)
    adapters = {id(tensor) for _, A, B in played.population.named_stacks() for tensor in (A, B)}
    frozen = [name for name, tensor in played.population.model.named_parameters() if id(tensor) not in adapters]
    assert len(frozen) > 50
    assert all(torch.equal(played.population.model.state_dict()[name], state[name]) for name in frozen)


def test_no_training_sees_a_held_out_program(pool):
    """The script proposes and answers `x + k` for ten k; half of them are held out."""
    held_out = HeldOutPrograms.of(f"def f(n):\n    return n + {k}" for k in range(0, 10, 2))
    types = ("tasks.types=[code_i, code_o, code_f]", "tasks.problemsPerMatchup=24")
    played, free = Played(pool, *types, held_out=held_out), Played(pool, *types)
    learned: list[str] = []
    update = played.learner.update

    def watch(groups):
        for group in groups:
            shown = played.trainer.tools.tokenizer.decode(list(group.prompt_ids), skip_special_tokens=False)
            pairs = zip(group.completions, group.rewards_G, strict=True)
            written = [one.token_ids for one, reward in pairs if reward is not None]
            learned.extend([shown, *(played.trainer.tools.tokenizer.decode(list(one)) for one in written)])
        return update(groups)

    played.learner.update = watch
    played.step(2)
    free.step(2)
    even = re.compile(r"x \+ [02468]\b")
    assert even.search(repr([one.problem for step in free.observed for one in step.proposals if one.valid]))
    withheld = [one for step in played.observed for one in step.proposals if one.withheld]
    assert len(withheld) > 4
    assert learned
    assert not [text for text in learned if even.search(text)]
    assert not even.search(played.trainer.buffer.to_bytes().decode())
    assert not even.search(played.trainer.archive.to_bytes().decode())
    valid = [one for step in played.observed for one in step.proposals if one.valid]
    assert valid
    assert not any(one.problem.program in held_out for one in valid)
    metrics = [step.metrics() for step in played.observed]
    assert sum(one["verdicts"]["held_out"] for one in metrics) == len(withheld)
    assert sum(sum(one["verdicts"].values()) for one in metrics) == sum(len(step.proposals) for step in played.observed)
    records = [record for step in played.observed for record in step.problem_records()]
    assert sum(record["verdict"] == "held_out" for record in records) == len(withheld)
    assert {record["shown"] for record in records if record["task"] == "code_f" and record["valid"]} == {1}
    assert {record["shown"] for record in records if record["task"] != "code_f"} == {0}


def test_a_held_out_proposal_makes_no_game(pool):
    """All that can be proposed is held out, so that only what is no program or fails is left to rate by."""
    everything = HeldOutPrograms.of(f"def f(n):\n    return n + {k}" for k in range(10))
    observed = Played(pool, "training.proposalsPerPrompt=2", "tasks.problemsPerMatchup=4", held_out=everything).step()
    assert all(one.withheld for one in observed.proposals)
    assert not observed.games
    assert observed.before == observed.after
    assert observed.update.updated == ()


def test_frozen_teachers_propose_and_stay_as_they_are(pool):
    played = Played(pool, "training.freezeTeachers=true")
    before = played.weights()
    observed = played.step()
    after = played.weights()
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True, True, False, False]
    assert observed.update.updated == (2, 3)
    assert len(observed.proposals) == 8


def test_evolution_replaces_the_lowest_rated_of_each_role_and_starts_its_child_anew(pool):
    played = Played(pool, "evolution.everySteps=1", 'evolution.operators=[{"id": "C1"}]')
    played.step()
    rated, weights = played.trainer.members, played.weights()
    worst = [min(pair, key=lambda slot: (rated[slot].lcb, -slot)) for pair in ((0, 1), (2, 3))]
    survivors = [slot for slot in range(4) if slot not in worst]
    assert [member.name for member in rated] == ["t0", "t1", "s0", "s1"]
    steps = [int(count) for count in played.learner.state()["steps"]]
    assert steps == [1, 1, 1, 1]

    births = [record for record in played.trainer._evolve(2) if record["event"] == "birth"]
    bred, members = played.weights(), played.trainer.members
    assert [record["slot"] for record in births] == worst
    for slot, survivor, record in zip(worst, survivors, births, strict=True):
        # C1 copies its parent, so the child is the other member of its role.
        assert torch.equal(bred[slot], weights[survivor])
        assert torch.equal(bred[survivor], weights[survivor])
        assert members[slot].name == f"{rated[slot].name}-g1" == record["child"]
        assert members[slot].parents == (rated[survivor].name,)
        assert (members[slot].mu, members[slot].operator) == (rated[survivor].mu, "C1")
        assert record["replaced"]["name"] == rated[slot].name
        assert [parent["name"] for parent in record["parents"]] == [rated[survivor].name]
        assert record["diagnostics"]["parents"][0]["cosine"] == pytest.approx(1, abs=1e-5)
        assert members[survivor] == rated[survivor]
    optimizer = played.learner.state()
    assert [int(count) for count in optimizer["steps"]] == [int(slot not in worst) for slot in range(4)]
    moments = [tensor for name, tensor in optimizer.items() if name != "steps"]
    assert [any(bool(moment[slot].any()) for moment in moments) for slot in range(4)] == [
        slot in survivors for slot in range(4)
    ]


@pytest.fixture(scope="module")
def grown(pool: SandboxPool) -> Played:
    """Four teachers and a student with weights and ratings that are all different; nothing was played."""
    grown = Played(pool, "population.teachers=4", "population.students=1", "evolution.replaceFraction=0.5")
    generator = torch.Generator().manual_seed(0)
    for slot in range(5):
        factors = grown.population.factors(slot)
        grown.population.set_factors(
            slot,
            {path: Pair(*(torch.randn(one.shape, generator=generator) for one in factors[path])) for path in factors},
        )
    return grown


@pytest.mark.parametrize("id", OPERATORS)
def test_record_report_and_operator_take_a_childs_parents_in_one_order(grown, id):
    trainer, chance = grown.trainer, random.Random(id)
    trainer.spec = load_manifest(
        MANIFEST, ("evolution.replaceFraction=0.5", f'evolution.operators=[{{"id": "{id}"}}]')
    ).spec
    orders = set()
    for _ in range(5):
        rated = trainer.members = tuple(replace(one, mu=chance.uniform(20, 40), sigma=2.0) for one in trainer.members)
        before = {member.name: grown.population.factors(slot) for slot, member in enumerate(rated)}
        step = max(member.born_step for member in rated) + 1
        for record in trainer._evolve(step):
            if record["event"] != "birth":
                continue
            names = [parent["name"] for parent in record["parents"]]
            parents, slot = [before[name] for name in names], record["slot"]
            child = grown.population.factors(slot)
            again = breed(id, parents, torch.Generator().manual_seed(record["seed"]))
            assert all(torch.equal(child[path].B, again[path].B) for path in child)
            for parent, measured in zip(parents, record["diagnostics"]["parents"], strict=True):
                assert measured == asdict(child_report.report([parent], child).parents[0])
            member = trainer.members[slot]
            assert (list(member.parents), member.born_step, record["step"]) == (names, step, step)
            fitness = [parent["lcb"] for parent in record["parents"]]
            orders.add(fitness == sorted(fitness, reverse=True))
    wanted = {"first": {True}, "second": {False}}.get(OPERATORS[id].fitter or "")
    assert orders == (wanted or ({True} if OPERATORS[id].arity == 1 else {True, False}))


def test_the_children_play_and_learn_in_the_step_that_they_open(played):
    observed = played.observed[2]
    assert {member.name: member.born_step for member in observed.after} == {
        member.name: 3 if member.generation else 1 for member in observed.after
    }
    births = [record for record in observed.births if record["event"] == "birth"]
    assert [record["step"] for record in births] == [3, 3]
    assert [one.births for one in played.observed[:2]] == [[], []]
    children = {record["child"] for record in births}
    assert {member.name for member in observed.before} >= children
    assert {member.generation for member in observed.after} == {0, 1}
    assert {record["teacher"] for record in observed.matchup_records()} & children
    assert observed.update.updated == (0, 1, 2, 3)


def test_ratings_move_by_the_games_of_the_step(played):
    for observed in played.observed:
        assert observed.games
        for before, after in zip(observed.before, observed.after, strict=True):
            assert after.sigma < before.sigma
            assert after.games > before.games


def test_what_is_logged_of_a_step_adds_up(played):
    for observed in played.observed:
        problems, matchups, metrics = observed.problem_records(), observed.matchup_records(), observed.metrics()
        valid = [problem for problem in problems if problem["valid"]]
        assert len(problems) == 2 * played.spec.tasks.problems_per_matchup
        assert 0 < len(valid) < len(problems)
        assert metrics["valid_rate"] == pytest.approx(len(valid) / len(problems))
        rates = [problem["solve_rate"] for problem in valid]
        assert metrics["solve_rate"]["overall"] == pytest.approx(sum(rates) / len(rates))
        assert metrics["reward"]["teacher"] == pytest.approx(sum(p["reward"] for p in problems) / len(problems))
        for problem in valid:
            assert problem["reward"] == pytest.approx(1 - problem["solve_rate"] if 0 < problem["solve_rate"] < 1 else 0)
        assert all(
            problem["reward"] == -1 and problem["solve_rate"] is None for problem in problems if problem not in valid
        )
        for task in played.spec.tasks.types:
            of_task = [problem["solve_rate"] for problem in valid if problem["task"] == task]
            assert metrics["solve_rate"][task] == pytest.approx(sum(of_task) / len(of_task))
        assert sum(game["valid"] for record in matchups for game in record["tasks"].values()) == len(valid)
        assert {(record["teacher"], record["student"]) for record in matchups} == {
            (problem["teacher"], problem["student"]) for problem in problems
        }
        assert list(metrics["ratings"]) == [member.name for member in observed.after]
        sampled = sum(len(proposal.completion.token_ids) for proposal in observed.proposals) + sum(
            len(completion.token_ids) for solution in observed.solutions for completion in solution.completions
        )
        assert metrics["tokens"]["sampled"] == sampled
        assert metrics["entropy"] == pytest.approx({"teacher": 0.5, "student": 0.5})
        lengths = {
            "teacher": [len(one.completion.token_ids) for one in observed.proposals],
            "student": [len(one.token_ids) for solution in observed.solutions for one in solution.completions],
        }
        assert metrics["response_tokens"] == pytest.approx({role: sum(n) / len(n) for role, n in lengths.items()})
        assert set(observed.update.entropy) == {"teacher", "student"}
        written = [measure(problem["program"]) for problem in valid if problem["task"] != "code_f"]
        assert len(written) < len(valid)
        assert metrics["complexity"]["loc"] == pytest.approx(sum(one.loc for one in written) / len(written))


def test_valid_problems_are_remembered_with_their_author_and_solve_rate(played):
    for observed in played.observed:
        for solution in observed.solutions:
            problem = solution.proposal.problem
            assert problem.task == "code_f" or played.trainer.buffer.seen(problem.program)
            assert len(problem.inputs) == len(problem.outputs)
    assert 0 < played.observed[0].coverage <= played.observed[-1].coverage == played.trainer.archive.coverage


def test_every_teacher_proposes_for_a_student_of_its_own_and_each_has_the_same_work(played):
    for observed in played.observed:
        assert sorted(matchup.teacher for matchup in observed.matchups) == [0, 1]
        assert sorted(matchup.student for matchup in observed.matchups) == [2, 3]
    rollouts = played.engine.rollouts
    assert rollouts[0] == rollouts[1] == 3 * played.spec.tasks.problems_per_matchup


@pytest.mark.parametrize(("teachers", "students"), [(1, 3), (3, 1)])
def test_unequal_roles_train(pool, teachers, students):
    played = Played(pool, f"population.teachers={teachers}", f"population.students={students}")
    played.step(2)
    for observed in played.observed:
        # Every teacher proposes, to a student that may have to serve several of them.
        assert {matchup.teacher for matchup in observed.matchups} >= set(range(teachers))
        assert {matchup.student for matchup in observed.matchups} <= set(range(teachers, teachers + students))
        assert set(observed.update.updated) == {
            slot for matchup in observed.matchups for slot in (matchup.teacher, matchup.student)
        }
    # The role of one keeps its only member.
    births = [record["role"] for record in played.observed[-1].births if record["event"] == "birth"]
    assert births == ["teacher" if teachers > students else "student"]


def test_the_single_agent_does_the_rollouts_of_one_matchup_in_both_roles(pool):
    alone = Played(
        pool, "mode=SingleAgent", "population.teachers=1", "population.students=1", "rewards.preset=AbsoluteZero"
    )
    before = alone.weights()
    observed = alone.step()
    (matchup,) = observed.matchups
    assert (matchup.teacher, matchup.student) == (0, 0)
    proposals, per_problem = alone.spec.tasks.problems_per_matchup, alone.spec.training.rollouts_per_problem
    assert alone.engine.rollouts == Counter({0: proposals + per_problem * len(observed.solutions)})
    assert observed.update.updated == (0,)
    assert not torch.equal(before[0], alone.weights()[0])
    # Its own reward shape: a problem that everybody or nobody solves costs it half a point.
    assert {problem["reward"] for problem in observed.problem_records() if problem["solve_rate"] in (0.0, 1.0)} <= {
        -0.5
    }
    # Nobody to play against and nobody to be bred from.
    assert (observed.games, observed.births) == ([], [])
    assert observed.after == observed.before
    assert "win_probability" not in observed.matchup_records()[0]


def test_a_restored_trainer_goes_on_as_the_one_that_was_never_stopped(pool):
    straight = Played(pool, "evolution.everySteps=1")
    straight.step()
    saved = straight.trainer.state()
    straight.step(2)
    resumed = Played(pool, "evolution.everySteps=1")
    resumed.trainer.restore(1, saved)
    resumed.step(2)
    assert resumed.trainer.step == straight.trainer.step == 3
    assert equal_states(resumed.trainer.state(), straight.trainer.state())
    assert not equal_states(saved, straight.trainer.state())


def test_another_seed_is_another_run(pool):
    one, other = Played(pool), Played(pool, "population.seed=1")
    one.step()
    other.step()
    assert not equal_states(one.trainer.state(), other.trainer.state())


def test_a_step_without_a_valid_problem_still_teaches_the_teachers(pool, monkeypatch):
    def useless(self, prompt, request, number):
        return "def f(x):\n    return x / 0<in>1" if number % 2 else "no program at all, at great length"

    monkeypatch.setattr(ScriptedEngine, "_proposal", useless)
    played = Played(pool)
    observed = played.step()
    metrics = observed.metrics()
    assert observed.solutions == []
    assert (metrics["valid_rate"], metrics["solve_rate"]["overall"], metrics["reward"]["student"]) == (0, None, None)
    assert all(value is None for value in metrics["complexity"].values())
    assert observed.matchup_records()[0]["tasks"] == {"code_o": {"proposals": 4, "valid": 0, "solve_rate": None}}
