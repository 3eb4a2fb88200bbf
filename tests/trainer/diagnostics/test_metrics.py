import json
import math

import pytest

from populora_trainer.diagnostics.metrics import Sample, assemble, to_line


def problem(task="code_o", solve_rate=0.5, valid=True, complexity=(3, 1, 2, 1)):
    return {
        "step": 1,
        "teacher": "teacher-0",
        "student": "student-0",
        "task": task,
        "program": "def f(a):\n    return a",
        "inputs": ["1"],
        "outputs": ["1"],
        "shown": 0,
        "message": "",
        "verdict": "valid" if valid else "syntax",
        "valid": valid,
        "solve_rate": solve_rate if valid else None,
        "reward": 0.5,
        "complexity": None
        if complexity is None
        else dict(zip(("ast_depth", "cyclomatic", "loc", "variables"), complexity, strict=True)),
        "seen": False,
    }


def step(**changes):
    arguments = {
        "seconds": {"propose": 1.0, "solve": 3.0},
        "problems": [problem()],
        "samples": [Sample("teacher", 10, 0.5, 1.0)],
        "ratings": {"teacher-0": (25.0, 8.0)},
        "advantage": {"std": 1.0},
        "coverage": 0.25,
    }
    return assemble(1, **(arguments | changes))


def test_the_object_has_the_documented_keys():
    metrics = step()
    assert set(metrics) == {
        *("step", "seconds", "solve_rate", "valid_rate", "reward", "entropy", "response_tokens", "complexity"),
        *("ratings", "tokens_per_second", "advantage", "coverage", "tokens", "verdicts"),
    }
    assert set(metrics["solve_rate"]) == {"overall", "code_i", "code_o", "code_f"}
    assert set(metrics["reward"]) == {"teacher", "student"}
    assert set(metrics["complexity"]) == {"ast_depth", "cyclomatic", "loc", "variables"}
    assert metrics["ratings"] == {"teacher-0": {"mu": 25.0, "sigma": 8.0, "lcb": 1.0}}


def test_rates_are_means_over_what_was_valid_and_tried():
    problems = [
        problem("code_o", 0.5),
        problem("code_o", 1.0),
        problem("code_i", 0.0),
        problem("code_f", None),
        problem("code_i", valid=False),
    ]
    metrics = step(problems=problems)
    assert metrics["solve_rate"] == {"overall": 0.5, "code_i": 0.0, "code_o": 0.75, "code_f": None}
    assert metrics["valid_rate"] == 0.8


def test_complexity_is_the_mean_over_valid_programs_that_teachers_wrote():
    problems = [
        problem("code_o", complexity=(3, 1, 2, 1)),
        problem("code_i", complexity=(5, 4, 8, 2)),
        problem("code_o", complexity=(99,) * 4, valid=False),
        problem("code_f", complexity=(99,) * 4),  # drawn from the buffer and given to its teacher
    ]
    assert step(problems=problems)["complexity"] == {"ast_depth": 4, "cyclomatic": 2.5, "loc": 5, "variables": 1.5}
    measures = dict.fromkeys(("ast_depth", "cyclomatic", "loc", "variables"))
    assert step(problems=problems[3:])["complexity"] == measures


def test_each_role_has_its_rewards_lengths_and_token_weighted_entropy():
    samples = [
        Sample("teacher", 30, 0.25, 1.0),
        Sample("student", 10, 1.0, 2.0),
        Sample("student", 30, 0.5, 4.0),
        Sample("student", 20, -0.5, None),
    ]
    metrics = step(samples=samples)
    assert metrics["reward"] == {"teacher": 0.25, "student": pytest.approx(1 / 3)}
    assert metrics["response_tokens"] == {"teacher": 30, "student": 20}
    assert metrics["entropy"] == {"teacher": 1.0, "student": pytest.approx((10 * 2 + 30 * 4) / 40)}
    assert step(samples=samples[:1])["entropy"] == {"teacher": 1.0, "student": None}


def test_tokens_a_second_count_all_work_over_all_phases():
    assert step()["tokens_per_second"] == 10 / 4
    assert step(tokens={"sampled": 10, "trained": 30})["tokens_per_second"] == 10
    assert step()["seconds"] == {"propose": 1.0, "solve": 3.0, "total": 4.0}
    assert step(seconds={"solve": 1.0, "total": 2.0})["seconds"]["total"] == 2.0


def test_an_empty_step_is_none_everywhere_and_still_json():
    metrics = step(seconds={}, problems=[], samples=[], ratings={}, advantage={}, coverage=None)
    assert metrics["valid_rate"] is None
    assert metrics["solve_rate"] == dict.fromkeys(("overall", "code_i", "code_o", "code_f"))
    assert metrics["entropy"] == metrics["response_tokens"] == {"teacher": None, "student": None}
    assert metrics["tokens_per_second"] is None
    assert json.loads(to_line(metrics))["reward"] == {"teacher": None, "student": None}


def test_numbers_that_json_cannot_hold_become_null():
    metrics = step(advantage={"std": math.nan, "max": math.inf, "mean": 0.0}, learner={"loss": -math.inf})
    line = to_line(metrics)
    assert json.loads(line)["advantage"] == {"std": None, "max": None, "mean": 0.0}
    assert json.loads(line)["learner"] == {"loss": None}
    assert line.count("\n") == 1
    with pytest.raises(ValueError, match="JSON"):
        to_line(metrics | {"coverage": math.nan})


def test_evaluations_are_carried_where_there_are_any():
    rates = {"overall": 0.5, "code_i": 0.5, "code_o": 0.5, "code_f": None}
    metrics = step(held_out={"solve_rate": rates, "stderr": 0.02})
    assert metrics["held_out"]["solve_rate"] == rates


def test_proposals_are_counted_by_verdict():
    problems = [problem(), problem(), problem(valid=False), problem(valid=False) | {"verdict": "held_out"}]
    assert step(problems=problems)["verdicts"] == {"held_out": 1, "syntax": 1, "valid": 2}
