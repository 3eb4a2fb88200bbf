from collections import Counter

from populora_trainer.nano.heldout import HARD, NATURAL, build_heldout, heldout_hashes, load_heldout
from populora_trainer.sandbox import literals
from populora_trainer.tasks.problem import TASK_TYPES


def test_the_shipped_problems_are_what_the_seed_draws():
    assert tuple(build_heldout()) == load_heldout()


def test_every_program_stands_for_the_three_types():
    problems = load_heldout()
    assert len(problems) == 3 * (NATURAL + HARD)
    assert Counter(problem.task for problem in problems) == dict.fromkeys(TASK_TYPES, NATURAL + HARD)
    assert len(heldout_hashes()) == NATURAL + HARD
    assert all(len({problem.program for problem in problems[start : start + 3]}) == 1 for start in range(0, 90, 3))


def test_outputs_are_what_python_returns():
    for problem in load_heldout():
        names = {}
        exec(problem.program, names)
        assert tuple(repr(eval(f"f({arguments})", names)) for arguments in problem.inputs) == problem.outputs
        assert len(problem.inputs) == (6 if problem.task == "code_f" else 1)


def test_no_hidden_input_of_a_function_equals_another():
    for problem in load_heldout():
        values = [literals.canonical(literals.parse_arguments(arguments)) for arguments in problem.inputs]
        assert len(set(values)) == len(values)


def test_the_shown_pairs_of_a_function_differ_where_they_can():
    for problem in load_heldout():
        shown = problem.outputs[: problem.shown]
        assert len(set(shown)) == min(len(set(problem.outputs)), len(shown))


def test_any_prefix_holds_short_and_long_programs():
    lines = [problem.program.count("\n") + 1 for problem in load_heldout()[:90:3]]
    assert min(lines) == 2
    assert max(lines) >= 9
