import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.sandbox import Case
from populora_trainer.sandbox.wire import case_to_json
from populora_trainer.tasks.cases import answer_case, proposal_case
from populora_trainer.tasks.chat import ChatTemplate
from populora_trainer.tasks.compact import CompactTemplate
from populora_trainer.tasks.problem import Problem

PROGRAM = "def f(a):\n    return a * 7"
GIVEN, RETURNED = ("11", "22", "33", "44", "55"), ("77", "154", "231", "308", "385")


def function(pairs: int) -> Problem:
    return Problem("code_f", PROGRAM, GIVEN[:pairs], RETURNED[:pairs], "hint")


@given(st.integers(2, 12))
def test_half_of_a_functions_pairs_are_shown_and_the_others_judge(pairs):
    problem = Problem("code_f", PROGRAM, tuple(map(str, range(pairs))), message="hint")
    judged = problem.inputs[problem.judged]
    assert problem.inputs == problem.inputs[: problem.shown] + judged
    assert problem.shown - len(judged) in (0, 1)


def test_ten_inputs_are_split_as_in_absolute_zero():
    problem = Problem("code_f", PROGRAM, tuple("abcdefghij"), message="hint")
    assert (problem.shown, problem.inputs[problem.judged]) == (5, tuple("fghij"))


@pytest.mark.parametrize("pairs", [2, 3, 4, 5])
def test_what_judges_a_function_is_not_in_its_students_prompt(pairs):
    problem = function(pairs)
    case = answer_case(problem, "def f(a):\n    return a")
    prompts = CompactTemplate().solve(problem), ChatTemplate().solve(problem)[0].content
    for arguments, value in zip(case.inputs, case.outputs, strict=True):
        assert all(arguments not in prompt and value not in prompt for prompt in prompts)
    for arguments in problem.inputs[: problem.shown]:
        assert all(arguments in prompt for prompt in prompts)
        assert arguments not in case.inputs


def test_the_verifier_is_asked_for_the_hidden_pairs_alone():
    assert answer_case(function(4), "p", "9") == Case("9", "code_f", PROGRAM, ("33", "44"), "p", ("231", "308"))
    travels = case_to_json(answer_case(function(4), "p"))
    assert (travels["inputs"], travels["outputs"]) == (["33", "44"], ["231", "308"])


@pytest.mark.parametrize("task", ["code_i", "code_o"])
def test_the_sole_pair_of_the_other_types_judges(task):
    problem = Problem(task, PROGRAM, ("1",), ("7",))
    assert answer_case(problem, "2") == Case("", task, PROGRAM, ("1",), "2", ("7",))


def test_a_proposal_runs_on_every_input():
    assert proposal_case(function(4), "3") == Case("3", "code_f", PROGRAM, GIVEN[:4])
