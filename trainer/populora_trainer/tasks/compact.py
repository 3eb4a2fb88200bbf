"""The compact prompts of the embedded base: a task token, then programs, arguments and values between special tokens.

| task | prompt | completion |
|---|---|---|
| code_o | `<o>PROGRAM<in>ARGUMENTS<out>` | `VALUE` |
| code_i | `<i>PROGRAM<out>VALUE<in>` | `ARGUMENTS` |
| code_f | `<f>(<in>ARGUMENTS<out>VALUE)+<msg>MESSAGE<prog>` | `PROGRAM` |
| propose code_o, code_i | `<po>` or `<pi>`, `REFERENCE<new>` | `PROGRAM<in>ARGUMENTS` |
| propose code_f | `<pf>PROGRAM<new>` | `(<in>ARGUMENTS)+<msg>MESSAGE` |

Every completion ends with `<eos>`. The corpus generator of the embedded base composes its documents from the same
functions, so training text and prompts cannot drift apart.
"""

from collections.abc import Sequence

from populora_trainer.tasks.parsing import argument_list, defines_entry, input_list, literal_text
from populora_trainer.tasks.problem import Problem, TaskType
from populora_trainer.tasks.templates import Control, Parts, Prompt, Tokenizer

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SOLVE_OUTPUT, SOLVE_INPUT, SOLVE_PROGRAM = "<o>", "<i>", "<f>"
PROPOSE_OUTPUT, PROPOSE_INPUT, PROPOSE_PROGRAM = "<po>", "<pi>", "<pf>"
IN, OUT, MESSAGE, PROGRAM, NEW = "<in>", "<out>", "<msg>", "<prog>", "<new>"
SPECIAL_TOKENS = (
    *(PAD, EOS, UNKNOWN, SOLVE_OUTPUT, SOLVE_INPUT, SOLVE_PROGRAM, PROPOSE_OUTPUT, PROPOSE_INPUT, PROPOSE_PROGRAM),
    *(IN, OUT, MESSAGE, PROGRAM, NEW),
)

MIN_FUNCTION_INPUTS = 2  # one pair to show and one to hide
MAX_FUNCTION_INPUTS = 12


def output_prompt(program: str, arguments: str) -> Parts:
    """The question of code_o: what does `f(arguments)` return?"""
    return Control(SOLVE_OUTPUT), program, Control(IN), arguments, Control(OUT)


def input_prompt(program: str, value: str) -> Parts:
    """The question of code_i: which arguments make `f` return `value`?"""
    return Control(SOLVE_INPUT), program, Control(OUT), value, Control(IN)


def function_prompt(pairs: Sequence[tuple[str, str]], message: str) -> Parts:
    """The question of code_f: which program maps these (arguments, value) pairs and fits the message?"""
    shown = [part for arguments, value in pairs for part in (Control(IN), arguments, Control(OUT), value)]
    return Control(SOLVE_PROGRAM), *shown, Control(MESSAGE), message, Control(PROGRAM)


def propose_prompt(task: TaskType, program: str) -> Parts:
    """Ask for a problem: `program` is an example for code_o and code_i, the program itself for code_f."""
    token = {"code_o": PROPOSE_OUTPUT, "code_i": PROPOSE_INPUT, "code_f": PROPOSE_PROGRAM}[task]
    return Control(token), program, Control(NEW)


def proposal_completion(program: str, arguments: str) -> str:
    """What a teacher answers for code_o and code_i."""
    return f"{program}{IN}{arguments}"


def function_proposal_completion(inputs: Sequence[str], message: str) -> str:
    """What a teacher answers for code_f."""
    return "".join(f"{IN}{arguments}" for arguments in inputs) + f"{MESSAGE}{message}"


class CompactTemplate:
    """Templates of the embedded base (`builtin://nano`); implements `templates.Template`."""

    name = "compact"
    end_ids: tuple[int, ...] = ()  # `<eos>` alone, which the tokenizer names

    def propose(self, task: TaskType, references: Sequence[Problem]) -> Prompt:
        """Prompt with the first reference's program.

        Raises:
            ValueError: no reference was given.
        """
        if not references:
            raise ValueError("a compact proposal needs one reference problem, got none")
        return propose_prompt(task, references[0].program)

    def parse_proposal(self, task: TaskType, text: str, references: Sequence[Problem]) -> Problem | None:
        """Read `PROGRAM<in>ARGUMENTS`, or `(<in>ARGUMENTS)+<msg>MESSAGE` for code_f; None when malformed."""
        if task == "code_f":
            return _parse_function_proposal(text, references[0].program)
        program, *rest = text.split(IN)
        if len(rest) != 1 or not defines_entry(program):
            return None
        arguments = argument_list(rest[0])
        return None if arguments is None else Problem(task, program, (arguments,))

    def solve(self, problem: Problem) -> Prompt:
        """The question of `problem`; its outputs must be known."""
        if problem.task == "code_o":
            return output_prompt(problem.program, problem.inputs[0])
        if problem.task == "code_i":
            return input_prompt(problem.program, problem.outputs[0])
        pairs = list(zip(problem.inputs, problem.outputs, strict=True))[: problem.shown]
        return function_prompt(pairs, problem.message)

    def parse_solution(self, problem: Problem, text: str) -> str | None:
        """A literal (code_o), an argument list (code_i) or a program that defines `f` (code_f); None when malformed."""
        if problem.task == "code_o":
            return literal_text(text)
        if problem.task == "code_i":
            return argument_list(text)
        return text if defines_entry(text) else None

    def encode(self, tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
        """Token ids of a compact prompt; a program or value that spells a task token is encoded character by character.

        Raises:
            TypeError: a chat prompt was given.
        """
        parts = [part for part in prompt if isinstance(part, str)]
        if len(parts) != len(prompt):
            raise TypeError("the compact template takes parts of text, got chat messages")
        if not any(_spells_a_token(part) for part in parts):
            return tokenizer.encode("".join(parts), add_special_tokens=False)
        return [
            token
            for part in parts
            for token in tokenizer.encode(
                part, add_special_tokens=False, split_special_tokens=not isinstance(part, Control)
            )
        ]

    def decode(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
        """Text up to the end-of-sequence token; the other special tokens stay, because they are the format."""
        ids = list(token_ids)
        if tokenizer.eos_token_id in ids:
            ids = ids[: ids.index(tokenizer.eos_token_id)]
        return tokenizer.decode(ids, skip_special_tokens=False)


def _spells_a_token(part: str) -> bool:
    return not isinstance(part, Control) and "<" in part and any(token in part for token in SPECIAL_TOKENS)


def _parse_function_proposal(text: str, program: str) -> Problem | None:
    body, *messages = text.split(MESSAGE)
    before, *inputs = body.split(IN)
    if before or len(messages) != 1:
        return None
    distinct = input_list(inputs, MIN_FUNCTION_INPUTS, MAX_FUNCTION_INPUTS)
    message = messages[0].strip()
    if distinct is None or any(token in message for token in SPECIAL_TOKENS):
        return None
    return Problem("code_f", program, distinct, message=message)
