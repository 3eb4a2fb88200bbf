"""What the verifier is asked about a problem and about an answer to it."""

from populora_trainer.sandbox.verdicts import Case
from populora_trainer.tasks.problem import Problem


def proposal_case(problem: Problem, number: str = "") -> Case:
    """Ask whether a proposed problem is valid: its program runs on every input.

    Args:
        problem: without outputs.
        number: what the judgement is known by.
    """
    return Case(number, problem.task, problem.program, problem.inputs)


def answer_case(problem: Problem, answer: str, number: str = "") -> Case:
    """Ask whether an answer is right on what judges it, `Problem.judged`; nothing else reaches the verifier.

    A code_f program answers for the hidden pairs alone, as in Absolute Zero: one that repeats what was shown gains
    nothing by it, and one that misses a shown pair loses nothing.

    Args:
        problem: with the outputs that the verifier has found.
        answer: what a template's `parse_solution` returned.
        number: what the judgement is known by.
    """
    judged = problem.judged
    return Case(
        id=number,
        task=problem.task,
        program=problem.program,
        inputs=problem.inputs[judged],
        answer=answer,
        outputs=problem.outputs[judged],
    )
