"""What the verifier is asked and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

TaskType = Literal["code_i", "code_o", "code_f"]
Kind = Literal["valid", "invalid", "correct", "wrong", "malformed"]


class Verdict(StrEnum):
    """Precise outcome of one case.

    The rule behind the kinds: what is refused before it runs is *malformed*, what runs and is not right is *wrong*.
    A case whose own problem is at fault is *invalid*, with or without an answer.

    | verdict          | meaning                                         | problem | code_o    | code_i    | code_f    |
    |------------------|-------------------------------------------------|---------|-----------|-----------|-----------|
    | valid            | runs, deterministic, within every limit         | valid   |           |           |           |
    | correct          | the answer agrees with every output             |         | correct   | correct   | correct   |
    | wrong_output     | the answer gives another value                  |         | wrong     | wrong     | wrong     |
    | bad_literal      | input or answer is not a literal                | invalid | malformed | malformed |           |
    | input_limit      | a text longer than allowed, or too many inputs  | invalid | malformed | malformed | malformed |
    | syntax_error     | the program does not compile                    | invalid |           |           | malformed |
    | missing_entry    | the program defines no callable `f`             | invalid |           |           | malformed |
    | forbidden_import | imports a module off the list (policy.py)       | invalid |           |           | malformed |
    | forbidden_name   | uses a name off the list (policy.py)            | invalid |           |           | malformed |
    | runtime_error    | raises, at import or in `f`                     | invalid |           | wrong     | wrong     |
    | nondeterministic | runs or calls give different values             | invalid |           | wrong     | wrong     |
    | timeout          | still running at the deadline; killed           | invalid |           | wrong     | wrong     |
    | memory           | asks for more memory than allowed               | invalid |           | wrong     | wrong     |
    | output_limit     | an output longer than allowed; never cut        | invalid |           | wrong     | wrong     |
    | unserialisable   | an output that has no literal (see literals.py) | invalid |           | wrong     | wrong     |
    | crashed          | the process ended without a well-formed result  | invalid |           | wrong     | wrong     |
    """

    VALID = "valid"
    CORRECT = "correct"
    WRONG_OUTPUT = "wrong_output"
    BAD_LITERAL = "bad_literal"
    INPUT_LIMIT = "input_limit"
    SYNTAX_ERROR = "syntax_error"
    MISSING_ENTRY = "missing_entry"
    FORBIDDEN_IMPORT = "forbidden_import"
    FORBIDDEN_NAME = "forbidden_name"
    RUNTIME_ERROR = "runtime_error"
    NONDETERMINISTIC = "nondeterministic"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    UNSERIALISABLE = "unserialisable"
    CRASHED = "crashed"


REFUSED_BEFORE_RUNNING = frozenset(
    {
        Verdict.BAD_LITERAL,
        Verdict.INPUT_LIMIT,
        Verdict.SYNTAX_ERROR,
        Verdict.MISSING_ENTRY,
        Verdict.FORBIDDEN_IMPORT,
        Verdict.FORBIDDEN_NAME,
    }
)


@dataclass(frozen=True, slots=True)
class Case:
    """One question to the verifier.

    Attributes:
        id: echoed in the judgement.
        task: code_o (the answer is the output), code_i (the answer is an input; any preimage is right) or code_f (the
            answer is a program, judged on all of the case's inputs; a trainer gives those that were not shown).
        program: Python source of the problem; its entry point is `f`.
        inputs: argument lists as literal text without the outer parentheses; exactly one for code_i and code_o.
        answer: None to validate the problem itself.
        outputs: the program's canonical outputs from an earlier judgement; trusted, and the program is not run again.
    """

    id: str
    task: TaskType
    program: str
    inputs: tuple[str, ...]
    answer: str | None = None
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verifier's answer to one case.

    Attributes:
        id: of the case.
        verdict: the precise outcome.
        kind: what it means for a reward: valid or invalid for a problem; correct, wrong or malformed for an answer.
        inputs: the case's inputs as canonical argument lists; as given where they are not literals.
        outputs: canonical literals: of a valid problem one per input; of an answer what it stands for (code_o the
            value itself, code_i the output of its input, code_f the program's outputs), empty where there is none.
        detail: one line for people; no part of it is stable.
    """

    id: str
    verdict: Verdict
    kind: Kind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run of a program may use.

    Attributes:
        timeout_seconds: processor time of one run over all its inputs, and a third of its wall time.
        memory_mib: address space on top of the bare interpreter's, in MiB.
        max_output_chars: longest canonical output, and longest input and literal answer, in characters.
        max_program_chars: longest program, in characters.
        max_inputs: most inputs of one case; with the longest output, this bounds what a judgement takes.
    """

    timeout_seconds: float = 10.0
    memory_mib: int = 512
    max_output_chars: int = 4096
    max_program_chars: int = 32_768
    max_inputs: int = 1024


class Verifier(Protocol):
    """Anything that judges cases."""

    async def judge(self, cases: Sequence[Case]) -> list[Judgement]:
        """Return one judgement per case, in order."""
        ...
