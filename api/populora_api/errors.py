"""What is wrong with a manifest."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        source: where it stands, `FILE:LINE` or the `--set` that brought it.
        field: path of the field, e.g. `spec.training.steps`; empty for the document as a whole.
        message: what is there and what is allowed.
    """

    source: str
    field: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.field, self.message) if part)


class ManifestError(Exception):
    """A manifest that cannot be used; its message has one line a problem."""

    exit_code = 42

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
