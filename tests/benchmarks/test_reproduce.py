"""What `make reproduce` compares differs in what it says and nothing else, and a comparison says what it lacks."""

import json
import sys
from pathlib import Path

import pytest

from populora_api import changes, resolved_yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "learning"))
import reproduce
from conditions import CONDITIONS, POPULATION
from results import Outcome, write_results
from runs import Job, in_words, jobs_of

NAMES = [condition.name for condition in CONDITIONS]


@pytest.mark.parametrize("condition", CONDITIONS, ids=NAMES)
def test_conditions_differ_from_the_population_in_what_they_say_and_nothing_else(condition, tmp_path):
    population, run = (one.load(seed=3, steps=40, folder=tmp_path) for one in (POPULATION, condition))
    differing = {change.field.removeprefix("spec.") for change in changes(population, run, local=True)}
    assert differing == set(condition.differs)
    assert all(condition.differs.values())


def test_one_reward_scheme_is_shared_by_all_but_the_arm_that_is_named_for_another(tmp_path):
    presets = {one.name: one.load(0, 40, tmp_path).spec.rewards.preset for one in CONDITIONS}
    assert presets == {**dict.fromkeys(NAMES, "PopuLoRA"), "absolute-zero": "AbsoluteZero"}
    # Whatever else may be allowed to differ, an adapter's work a step, its optimizer and the base never are.
    guarded = ("baseModel", "adapter", "tasks.types", "tasks.problemsPerMatchup", "training.learningRate")
    guarded += ("training.rolloutsPerProblem", "training.proposalsPerPrompt", "training.steps", "population.seed")
    guarded += ("evaluation", "sandbox", "training.weightDecay", "training.temperature")
    for condition in CONDITIONS:
        assert not [field for field in condition.differs if field.startswith(guarded)], condition.name


def made(job: Job, step: int, **changed: str) -> None:
    """Leave what a run leaves of which `step` steps are done."""
    job.folder.mkdir(parents=True)
    text = resolved_yaml(job.condition.load(job.seed, job.steps, job.folder))
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    (job.folder / "run.yaml").write_text(text)
    (job.folder / "LATEST").write_text(json.dumps({"step": step, "sha256": "0" * 64}))


def test_runs_are_complete_when_all_their_steps_are_durable(tmp_path):
    jobs = jobs_of(tmp_path, ["single", "frozen"], seeds=2, steps=5)
    assert [job.folder.name for job in jobs] == ["single-s0", "frozen-s0", "single-s1", "frozen-s1"]
    made(jobs[0], 5)
    made(jobs[1], 3)
    assert [job.step() for job in jobs] == [5, 3, 0, 0]
    assert [job.strange() for job in jobs] == [""] * 4
    assert in_words(jobs) == [
        f"{job.title}: {job.step()} of 5 steps ({job.folder})" for job in jobs if job.folder.name != "single-s0"
    ]


def test_a_run_of_another_recipe_is_not_taken_for_one_of_the_comparison(tmp_path):
    jobs = jobs_of(tmp_path, ["single"], seeds=3, steps=5)
    made(jobs[0], 5, PopuLoRA="AbsoluteZero")
    made(jobs[1], 9)
    assert jobs[0].strange() == 'spec.rewards.preset: "AbsoluteZero" -> "PopuLoRA"'
    assert jobs[1].strange() == "it has 9 steps, and 5 are wanted"
    # Fewer steps than are wanted are no other recipe: the run goes on.
    made(jobs[2], 2, **{"steps: 5": "steps: 2"})
    assert jobs[2].strange() == ""


def call(monkeypatch, *arguments: str) -> str:
    """Call the command and return what it ends with."""
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *arguments])
    with pytest.raises(SystemExit) as end:
        reproduce.main()
    return str(end.value.code)


def test_the_command_names_what_is_missing_and_trains_only_that(tmp_path, monkeypatch, capsys):
    options = ("--runs", str(tmp_path), "--seeds", "2", "--steps", "5", "--conditions", "single", "frozen")
    jobs = jobs_of(tmp_path, ["single", "frozen"], seeds=2, steps=5)
    for job in jobs[:3]:
        made(job, 5)
    assert call(monkeypatch, *options, "--missing") == "1"
    shown = capsys.readouterr().out
    assert "3 of 4 runs are complete:\n  missing  Population, teachers frozen, seed 1: 0 of 5 steps" in shown
    trained = []

    def fail(job):
        trained.append(job.folder.name)
        raise reproduce.subprocess.CalledProcessError(1, "populora")

    monkeypatch.setattr(Job, "train", fail)
    ended = call(monkeypatch, *options)
    assert trained == ["frozen-s1"]
    assert ended.startswith(
        "No results are written, since these runs are missing:\nPopulation, teachers frozen, seed 1"
    )
    assert ended.endswith("frozen-s1.log says why")
    made(jobs[3], 5)
    assert call(monkeypatch, *options, "--missing") == "0"


def test_a_run_of_something_else_stops_the_command_before_it_trains(tmp_path, monkeypatch):
    (job,) = jobs_of(tmp_path, ["population"], seeds=1, steps=5)
    made(job, 5, PopuLoRA="AbsoluteZero")
    monkeypatch.setattr(Job, "train", lambda job: pytest.fail("trained"))
    ended = call(monkeypatch, "--runs", str(tmp_path), "--seeds", "1", "--steps", "5", "--conditions", "population")
    assert ended.splitlines()[0] == f'{job.folder} holds another run: spec.rewards.preset: "AbsoluteZero" -> "PopuLoRA"'


def outcome(name: str, seed: int, depth: float) -> Outcome:
    """A run whose teachers' programs end `depth` deeper than they began."""
    rates = {"overall": 0.2, "code_i": 0.2, "code_o": 0.2, "code_f": 0.2}
    held_out = {"solve_rate": rates, "greedy": rates, "stderr": 0.02, "members": {"s0": 0.2 + 0.01 * seed}}

    def line(step: int) -> dict:
        return {
            "step": step,
            "seconds": {"total": 30.0},
            "solve_rate": rates,
            "valid_rate": 0.9,
            "reward": {"teacher": 0.1, "student": 0.2},
            "complexity": dict.fromkeys(("ast_depth", "cyclomatic", "loc", "variables"), 3 + depth * step / 4)
            if step != 2
            else dict.fromkeys(("ast_depth", "cyclomatic", "loc", "variables")),
            "coverage": 0.01 * step,
            "ratings": {"s0": {"lcb": 1.0}},
            **({"held_out": held_out} if step in (0, 4) else {}),
        }

    title = next(one.title for one in CONDITIONS if one.name == name)
    return Outcome(name, title, seed, [line(step) for step in range(5)], 0.4, 0.3)


def test_results_of_some_runs_name_those_that_are_missing_and_claim_nothing_of_them(tmp_path):
    outcomes = [outcome("population", seed, 1.0 + 0.1 * seed) for seed in range(3)]
    outcomes += [outcome("single", seed, 0.2) for seed in range(2)]
    text = write_results(outcomes, tmp_path, ["Single agent, seed 2: 1 of 4 steps (runs/single-s2)"]).read_text()
    assert "**Not complete.** Missing are:\n\n- Single agent, seed 2: 1 of 4 steps" in text
    assert "| Population raises ast_depth | agree (+0.825" in text
    # Paired by the seeds that both have, and nothing where one has none.
    assert "| Population ends above the single agent in ast_depth's change | agree (+0.63" in text
    assert ", n = 2) |" in text
    assert "| Population ends above its control with frozen teachers in ast_depth's change | no runs |" in text
    for condition in CONDITIONS:
        for field, reason in condition.differs.items():
            assert f"| {condition.title} | `{field}` | {reason} |" in text
    assert (tmp_path / "results.svg").stat().st_size > 1000
    whole = write_results(outcomes[:3], tmp_path).read_text()
    assert "Missing" not in whole
    assert "3 runs of 4 steps, 3 seeds a condition, whose steps took 6 minutes in all" in whole
