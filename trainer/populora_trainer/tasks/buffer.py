"""The run's memory of valid problems: references for the teachers' prompts, and what counts as a repetition."""

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from populora_trainer.errors import StorageError
from populora_trainer.tasks.held_out import NOTHING_HELD_OUT, HeldOutPrograms
from populora_trainer.tasks.parsing import normalised
from populora_trainer.tasks.problem import TASK_TYPES, Problem, TaskType

DEFAULT_CAPACITY = 4096
_FORMAT = 1
_SEED_PROGRAM = "def f(a):\n    return a"
_SEED_AUTHOR = "seed"
IDENTITY = Problem("code_o", _SEED_PROGRAM, ("'Hello world'",), ("'Hello world'",))
"""The shortest reference there is."""
_SEEDS: tuple[Problem, ...] = (
    Problem("code_i", _SEED_PROGRAM, ("'Hello world'",), ("'Hello world'",)),
    IDENTITY,
    Problem(
        "code_f",
        _SEED_PROGRAM,
        ("'Hello world'", "1", "[2, 3]", "{'a': 4}"),
        ("'Hello world'", "1", "[2, 3]", "{'a': 4}"),
        "Return the argument as it is.",
    ),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A problem with the circumstances of its making.

    Attributes:
        problem: valid, with canonical inputs and outputs.
        author: the teacher's name, "seed" for the identity program.
        step: the step that proposed it, -1 for the identity program.
        solve_rate: share of correct rollouts when it was proposed, in [0, 1]; None where nobody tried.
    """

    problem: Problem
    author: str
    step: int
    solve_rate: float | None = None


_Key = tuple[str, tuple[str, ...]]


class ProblemBuffer:
    """Valid problems of one run, one section a type, the newest `capacity` of each.

    Every section starts with the identity program, as in Absolute Zero. Two problems of one type are the same when
    their normalised programs (`parsing.normalised`) and their inputs are equal; the first one stays. When a section is
    full the oldest problem leaves (Absolute Zero keeps the oldest and drops the new ones).
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY, held_out: HeldOutPrograms = NOTHING_HELD_OUT) -> None:
        """Hold the identity programs.

        Args:
            capacity: problems of each type.
            held_out: programs that never enter, since what is in the buffer is in teachers' prompts.

        Raises:
            ValueError: the capacity is below 1.
        """
        if capacity < 1:
            raise ValueError(f"the buffer's capacity is at least 1, not {capacity}")
        self.capacity = capacity
        self._held_out = held_out
        self._sections: dict[TaskType, dict[_Key, Entry]] = {task: {} for task in TASK_TYPES}
        self._programs: Counter[str] = Counter()
        for problem in _SEEDS:
            self.add(problem, author=_SEED_AUTHOR, step=-1)

    def add(self, problem: Problem, *, author: str, step: int, solve_rate: float | None = None) -> bool:
        """Remember a valid problem; return False, changing nothing, where it is known already or its program held out.

        Raises:
            ValueError: there is not one output for every input (the problem was never verified), or the solve rate is
                not in [0, 1].
        """
        if not problem.inputs or len(problem.inputs) != len(problem.outputs):
            raise ValueError(f"{len(problem.inputs)} inputs and {len(problem.outputs)} outputs: not a verified problem")
        if solve_rate is not None and not 0.0 <= solve_rate <= 1.0:
            raise ValueError(f"a solve rate lies in [0, 1], not {solve_rate!r}")
        return problem.program not in self._held_out and self._insert(Entry(problem, author, step, solve_rate))

    def _insert(self, entry: Entry) -> bool:
        section = self._sections[entry.problem.task]
        key = (normalised(entry.problem.program), entry.problem.inputs)
        if key in section:
            return False
        section[key] = entry
        self._programs[key[0]] += 1
        if len(section) > self.capacity:
            oldest = next(iter(section))
            del section[oldest]
            self._programs[oldest[0]] -= 1
            if not self._programs[oldest[0]]:
                del self._programs[oldest[0]]
        return True

    def references(self, task: TaskType, count: int, rng: random.Random) -> list[Problem]:
        """Return up to `count` different problems for a teacher's prompt, drawn uniformly without replacement.

        For code_i and code_o they come from the section of that type. For code_f they come from those two sections
        together: the first one's program is the one that the teacher writes inputs and a message for. Fewer are
        returned where the buffer holds fewer. Uniform as in Absolute Zero: a bias to the newest would let one step's
        fashion feed itself.
        """
        sources: tuple[TaskType, ...] = ("code_i", "code_o") if task == "code_f" else (task,)
        held = [entry.problem for source in sources for entry in self._sections[source].values()]
        return rng.sample(held, min(count, len(held)))

    def seen(self, program: str) -> bool:
        """Tell whether a problem held now, of any type, has this program up to normalisation."""
        return normalised(program) in self._programs

    def entries(self, task: TaskType) -> Iterator[Entry]:
        """Iterate over one section, oldest first."""
        return iter(self._sections[task].values())

    def __len__(self) -> int:
        return sum(map(len, self._sections.values()))

    def to_bytes(self) -> bytes:
        """Return the buffer as JSON lines; equal buffers give equal bytes."""
        lines: list[object] = [{"format": _FORMAT, "capacity": self.capacity}]
        for task in TASK_TYPES:
            for entry in self._sections[task].values():
                problem = entry.problem
                lines.append(
                    [
                        task,
                        problem.program,
                        problem.inputs,
                        problem.outputs,
                        problem.message,
                        entry.author,
                        entry.step,
                        entry.solve_rate,
                    ]
                )
        # ASCII escapes keep lone surrogates, which a model can write and UTF-8 cannot hold.
        return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes, held_out: HeldOutPrograms = NOTHING_HELD_OUT) -> "ProblemBuffer":
        """Return the buffer that `to_bytes` wrote, without what is held out.

        Raises:
            StorageError: the bytes are not such a buffer.
        """
        try:
            header, *rows = [json.loads(line) for line in data.decode("ascii").splitlines()]
            if header["format"] != _FORMAT:
                raise ValueError(f"format {header['format']!r}, this version reads {_FORMAT}")
            buffer = cls(header["capacity"], held_out)
            buffer._sections = {task: {} for task in TASK_TYPES}
            buffer._programs.clear()
            for task, program, inputs, outputs, message, author, step, solve_rate in rows:
                problem = Problem(task, program, tuple(inputs), tuple(outputs), message)
                new = buffer.add(problem, author=author, step=int(step), solve_rate=_rate(solve_rate))
                if not new and program not in held_out:
                    raise ValueError("a problem stands in it twice")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StorageError(f"the stored problem buffer is damaged ({error})") from error
        return buffer


def _rate(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    raise ValueError(f"{value!r} is no solve rate")
