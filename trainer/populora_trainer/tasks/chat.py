"""Chat prompts for instruction models, in words of our own, and the reading of their answers.

Answers come in fenced blocks: `python`, `input`, `output`, `message`. The model may write whatever it likes around them
and think between `<think>` and `</think>`. What counts:

* the last block of a tag, because models revise themselves; for a code_f proposal every `input` block, in order;
* blocks without a tag stand in for the missing tags, in order, where there are exactly as many of them as missing
  parts (a sole answer: the last of them); a code_f proposal needs its tags;
* a fence left open means that the answer was cut off, and is malformed like an answer without the block.

Unlike Absolute Zero (`reject_multiple_functions`), a program may hold any number of functions and classes beside `f`.
"""

import re
from collections.abc import Sequence
from itertools import takewhile

from populora_trainer.tasks.compact import MAX_FUNCTION_INPUTS, MIN_FUNCTION_INPUTS
from populora_trainer.tasks.parsing import Block, argument_list, defines_entry, fenced_blocks, input_list, literal_text
from populora_trainer.tasks.problem import Problem, TaskType
from populora_trainer.tasks.templates import Message, Prompt, Tokenizer
from populora_trainer.tasks.turns import PLAIN_DIALOGUE, Turns

ASKED_FUNCTION_INPUTS = 10  # as in Absolute Zero: half is shown, half judges

_PYTHON_TAGS = ("python", "py", "python3")
_SOLUTION_TAGS: dict[TaskType, tuple[str, ...]] = {
    "code_i": ("input",),
    "code_o": ("output",),
    "code_f": _PYTHON_TAGS,
}

_PROGRAM_RULES = """\
Rules for the program:
- Its entry point is a function named `f` that takes at least one argument and returns a value. Helper functions, \
classes and imports of safe standard modules (math, itertools, collections, functools, re, string, ...) are welcome.
- It is deterministic: no randomness, no time, no files, no network, no processes, no input or printing, and nothing \
that depends on object identity or set order.
- Arguments and the returned value are Python literals (numbers, strings, booleans, None, lists, tuples, dicts, sets).
- It finishes within a few seconds and returns a value of moderate size."""

_PROPOSE = {
    "code_o": """\
Invent one new problem for a student of Python. The student will see your program and your input, and must work out by \
reasoning alone what the program returns.""",
    "code_i": """\
Invent one new problem for a student of Python. The student will see your program and what it returned for your input, \
and must find an input for which it returns exactly that.""",
}

_AIM = """\
The best problem is one that a capable student solves in some of several attempts, not in all: it needs several steps \
of real reasoning, and no guessing, long arithmetic or obscure knowledge. It must differ in idea, not only in names or \
numbers, from the examples."""

_PROPOSE_FORMAT = """\
Think first if you like. Then give exactly two blocks, the program and the arguments of one call, separated by commas \
and without the outer parentheses:

```python
def f(...):
    ...
```

```input
...
```"""

_PROPOSE_FUNCTION = """\
Here is a Python program. A student will see some of its inputs with their outputs and a message from you, never the \
program itself, and must write a program that behaves the same, on inputs the student has not seen as well.

{program}

Write {count} inputs that together show what the program does: different from each other, covering its ordinary and \
its special cases, all of them valid for `f`. An input is the arguments of one call, separated by commas and without \
the outer parentheses; the values are Python literals. Then write a message that points the student to the idea \
without giving the program away.

Think first if you like. Then give {count} input blocks and one message block:

```input
...
```

```message
...
```"""

_SOLVE_OUTPUT = """\
Here are a Python program and the arguments of one call of `f`. Work out what the call returns.

{program}

{input}

Think step by step. Then give the returned value as a Python literal, with quotes around strings, in one block:

```output
...
```"""

_SOLVE_INPUT = """\
Here are a Python program and a value that `f` returned. Find arguments for which `f` returns exactly this value; any \
that do are right.

{program}

{output}

Think step by step. Then give the arguments of the call, separated by commas and without the outer parentheses, as \
Python literals (quotes around strings), in one block:

```input
...
```"""

_SOLVE_FUNCTION = """\
Here are calls of an unknown Python function `f` with what they returned, and a message about it. Write a program that \
defines `f` so that it agrees with all of them and with further calls that you do not see.

{pairs}

{message}

Do not list the shown cases: the program is judged on the others. Helper functions, classes and imports of safe \
standard modules are welcome; the program must be deterministic. Think step by step. Then give the whole program in \
one block:

```python
def f(...):
    ...
```"""


class ChatTemplate:
    """Templates for instruction models; implements `templates.Template`.

    Attributes:
        turns: how messages become token ids.
    """

    name = "chat"

    def __init__(self, turns: Turns = PLAIN_DIALOGUE) -> None:
        self.turns = turns

    @property
    def end_ids(self) -> tuple[int, ...]:
        """What the chat template ends a turn with."""
        return self.turns.end_ids

    def propose(self, task: TaskType, references: Sequence[Problem]) -> Prompt:
        """Ask for a new problem with the references as examples; code_f asks about the first reference's program.

        Raises:
            ValueError: code_f without a reference.
        """
        if task == "code_f":
            if not references:
                raise ValueError("a code_f proposal is about the first reference's program, and there is none")
            program = _block("python", references[0].program)
            return _user(_PROPOSE_FUNCTION.format(program=program, count=ASKED_FUNCTION_INPUTS))
        examples = "\n\n".join(_example(number, problem) for number, problem in enumerate(references, start=1))
        parts = [_PROPOSE[task], _PROGRAM_RULES, _AIM, examples, _PROPOSE_FORMAT]
        return _user("\n\n".join(filter(None, parts)))

    def parse_proposal(self, task: TaskType, text: str, references: Sequence[Problem]) -> Problem | None:
        """Read a teacher's answer; None when malformed."""
        blocks = fenced_blocks(text)
        if blocks is None:
            return None
        if task == "code_f":
            return _parse_function_proposal(blocks, references[0].program)
        program, arguments = _parts(blocks, (_PYTHON_TAGS, ("input",)))
        canonical = None if arguments is None else argument_list(arguments)
        if program is None or canonical is None or not defines_entry(program):
            return None
        return Problem(task, program, (canonical,))

    def solve(self, problem: Problem) -> Prompt:
        """Ask a student to solve a verified problem."""
        program = _block("python", problem.program)
        match problem.task:
            case "code_o":
                return _user(_SOLVE_OUTPUT.format(program=program, input=_block("input", problem.inputs[0])))
            case "code_i":
                return _user(_SOLVE_INPUT.format(program=program, output=_block("output", problem.outputs[0])))
        shown = list(zip(problem.inputs, problem.outputs, strict=True))[: problem.shown]
        pairs = "\n\n".join(f"{_block('input', arguments)}\n{_block('output', value)}" for arguments, value in shown)
        return _user(_SOLVE_FUNCTION.format(pairs=pairs, message=_block("message", problem.message)))

    def parse_solution(self, problem: Problem, text: str) -> str | None:
        """Read a student's answer: a literal (code_o), an argument list (code_i), a program (code_f), or None."""
        blocks = fenced_blocks(text)
        if blocks is None:
            return None
        tags = _SOLUTION_TAGS[problem.task]
        answer = _last(blocks, tags)
        if answer is None:
            answer = _last(blocks, ("",))
        if answer is None:
            return None
        match problem.task:
            case "code_o":
                return literal_text(answer)
            case "code_i":
                return argument_list(answer)
        return answer if defines_entry(answer) else None

    def encode(self, tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
        """Token ids of the messages with the opening of the assistant's turn.

        Raises:
            TypeError: a compact prompt was given.
        """
        messages = [message for message in prompt if isinstance(message, Message)]
        if len(messages) != len(prompt):
            raise TypeError("the chat template takes messages, got parts of text")
        return self.turns.encode(tokenizer, messages)

    def decode(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
        """Text up to the first token that ends an answer, without special tokens."""
        ends = {tokenizer.eos_token_id, *self.end_ids}
        ids = list(takewhile(lambda token: token not in ends, token_ids))
        return tokenizer.decode(ids, skip_special_tokens=True)


def proposal_completion(problem: Problem) -> str:
    """What a teacher that follows the format answers; `parse_proposal` reads it back."""
    inputs = [_block("input", arguments) for arguments in problem.inputs]
    if problem.task == "code_f":
        return "\n\n".join([*inputs, _block("message", problem.message)])
    return "\n\n".join([_block("python", problem.program), *inputs])


def solution_completion(task: TaskType, answer: str) -> str:
    """What a student that follows the format answers; `parse_solution` reads it back."""
    return _block(_SOLUTION_TAGS[task][0], answer)


def _user(content: str) -> tuple[Message, ...]:
    # One user turn: some chat templates refuse a system turn.
    return (Message("user", content),)


def _block(tag: str, text: str) -> str:
    """Fence a text so that no fence inside can close it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{tag}\n{text}\n{fence}"


def _example(number: int, problem: Problem) -> str:
    parts = [_block("python", problem.program), _block("input", problem.inputs[0])]
    if problem.outputs:
        parts.append(_block("output", problem.outputs[0]))
    return "\n".join([f"Example {number} (with the value it returns):", *parts])


def _last(blocks: Sequence[Block], tags: tuple[str, ...]) -> str | None:
    return next((block.text for block in reversed(blocks) if block.tag in tags), None)


def _parts(blocks: Sequence[Block], wanted: tuple[tuple[str, ...], ...]) -> list[str | None]:
    """The last block of each wanted tag; untagged blocks fill the gaps where there are as many of them as gaps."""
    parts = [_last(blocks, tags) for tags in wanted]
    untagged = [block.text for block in blocks if not block.tag]
    if len(untagged) == parts.count(None):
        rest = iter(untagged)
        parts = [next(rest) if part is None else part for part in parts]
    return parts


def _parse_function_proposal(blocks: Sequence[Block], program: str) -> Problem | None:
    written = [block.text for block in blocks if block.tag == "input"]
    inputs = input_list(written, MIN_FUNCTION_INPUTS, MAX_FUNCTION_INPUTS)
    message = (_last(blocks, ("message",)) or "").strip()
    if inputs is None or not message:
        return None
    return Problem("code_f", program, inputs, message=message)
