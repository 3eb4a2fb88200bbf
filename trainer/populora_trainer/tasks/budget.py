"""Prompts that fit: references are left out of a teacher's prompt until it is within the limit."""

from collections.abc import Sequence

from populora_trainer.tasks.buffer import IDENTITY
from populora_trainer.tasks.problem import Problem, TaskType
from populora_trainer.tasks.templates import Template, Tokenizer


def proposal_prompt(
    template: Template, tokenizer: Tokenizer, task: TaskType, references: Sequence[Problem], limit: int
) -> tuple[list[Problem], list[int]]:
    """Return the references that a teacher's prompt has room for, and the prompt.

    References come in the order in which they were drawn; one that does not fit behind those before it is left out.
    Where none fits, the identity program takes their place, for which `shortest_limit` has seen to it that there is
    room.

    Args:
        template, tokenizer: how a prompt becomes token ids.
        task: what the teacher is asked for.
        references: problems drawn for the prompt.
        limit: tokens that a prompt may have.
    """

    def encoded(shown: Sequence[Problem]) -> list[int]:
        return template.encode(tokenizer, template.propose(task, shown))

    prompt = encoded(references)
    if len(prompt) <= limit:
        return list(references), prompt
    kept: list[Problem] = []
    fitting: list[int] | None = None
    for reference in references:
        tried = encoded([*kept, reference])
        if len(tried) <= limit:
            kept.append(reference)
            fitting = tried
    return (kept, fitting) if fitting is not None else ([IDENTITY], encoded([IDENTITY]))


def shortest_limit(
    template: Template, tokenizer: Tokenizer, tasks: Sequence[TaskType], fixed: Sequence[Problem] = ()
) -> tuple[int, str]:
    """Return the tokens that a run's prompts need at the least, and what needs them.

    Args:
        template, tokenizer: how a prompt becomes token ids.
        tasks: the run's types.
        fixed: problems that are asked whatever their length, such as held-out ones.
    """
    needs = [(template.propose(task, [IDENTITY]), f"the shortest prompt for a {task} proposal") for task in tasks]
    needs += [(template.solve(problem), f"the longest held-out {problem.task} problem") for problem in fixed]
    return max((len(template.encode(tokenizer, prompt)), what) for prompt, what in needs)
