"""The values that teachers, students and the verifier exchange."""

from dataclasses import dataclass
from typing import Literal

TaskType = Literal["code_i", "code_o", "code_f"]
TASK_TYPES: tuple[TaskType, ...] = ("code_i", "code_o", "code_f")
WRITTEN: frozenset[TaskType] = frozenset({"code_i", "code_o"})
"""Types whose program the teacher writes; that of a code_f problem is drawn from the buffer and given to it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A reasoning problem about one deterministic Python program whose entry point is `f`.

    code_o asks for the output of an input, code_i for an input that gives an output, code_f for a program that agrees
    with input-output pairs and a message (arXiv 2605.16727, section 3.1; Absolute Zero, section 3.2).

    Attributes:
        task: which of the three.
        program: Python source that defines `f`.
        inputs: argument lists as canonical literal text without the outer parentheses, e.g. `"3, [1, 2]"`; one for
            code_i and code_o, several for code_f, no two of them equal.
        outputs: the canonical literal `f(*input)` of every input; empty until the verifier has run the program.
        message: code_f only, what the teacher says about the program.
    """

    task: TaskType
    program: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    message: str = ""

    @property
    def shown(self) -> int:
        """Number of input-output pairs that a code_f student sees, the first ones; the others judge its program.

        Half of them, as in Absolute Zero. Of an odd number the larger half is shown.
        """
        return (len(self.inputs) + 1) // 2 if self.task == "code_f" else 0

    @property
    def judged(self) -> slice:
        """Which inputs and outputs judge an answer: those of code_f that its student does not see, else the one."""
        return slice(self.shown, None)
