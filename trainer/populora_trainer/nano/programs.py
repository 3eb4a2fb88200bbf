"""Random small Python programs with arguments to run them on and what they return.

The generator is trusted and its programs are deterministic, terminate and have no side effects, so they run in this
process. `size` sets how many statements precede a program's return.
"""

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType

from populora_trainer.nano.grammar import ALPHABET, write_program
from populora_trainer.nano.pruning import pruned, read_names

Value = int | str | list[int] | bool

DROP_UNUSED = 0.8  # share of programs that lose arguments which they do not read
MAX_INT, MAX_LIST, MAX_STRING, MAX_LOOP, MAX_LINES = 99, 8, 8, 40, 14


@dataclass(frozen=True, slots=True)
class Sample:
    """One argument list and what the program returns for it, both as canonical literal text."""

    arguments: str
    output: str


@dataclass(frozen=True, slots=True)
class Program:
    """A generated program with distinct argument lists and their outputs."""

    source: str
    samples: tuple[Sample, ...]

    @property
    def lines(self) -> int:
        """Lines of code, the `def` line included."""
        return self.source.count("\n") + 1


def random_value(rng: random.Random, kind: str) -> Value:
    """An argument of the given kind: mostly one-digit integers, short lists, short strings over `abcd`."""
    if kind == "int":
        roll = rng.random()
        if roll < 0.88:
            return rng.randint(0, 9)
        return rng.randint(10, 30) if roll < 0.96 else -rng.randint(1, 9)
    if kind == "list":
        return [rng.randint(0, 9) for _ in range(rng.choices((0, 1, 2, 3, 4, 5), (0.2, 1, 4, 5, 4, 1))[0])]
    return "".join(rng.choice(ALPHABET) for _ in range(rng.choices((1, 2, 3, 4, 5), (1, 4, 5, 4, 1))[0]))


def within_limits(value: object) -> bool:
    """Whether an output is small enough for the base: integers to 99, lists to 8 of them, strings to 8 characters."""
    if isinstance(value, bool):
        return True
    if isinstance(value, int):
        return abs(value) <= MAX_INT
    if isinstance(value, str):
        return len(value) <= MAX_STRING and value.isascii()
    return isinstance(value, list) and len(value) <= MAX_LIST and all(within_limits(item) for item in value)


class _TooLongError(ValueError):
    """A generated program would loop more often than the base should have to follow."""


def _bounded_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_LOOP:
        raise _TooLongError
    return numbers


def compile_program(source: str) -> Callable[..., object]:
    """The function `f` of a generated program (trusted source only), made to raise where a loop gets long."""
    ticks: Iterator[int] = iter(())

    def start() -> None:
        nonlocal ticks
        ticks = iter(range(MAX_LOOP))

    def tick() -> bool:
        if next(ticks, None) is None:
            raise _TooLongError
        return True

    code: CodeType = compile(source.replace("while ", "while tick() and "), "<generated>", "exec")
    namespace: dict[str, Callable[..., object]] = {"range": _bounded_range, "tick": tick}
    exec(code, namespace)  # noqa: S102 - written by this module's own grammar
    function = namespace["f"]

    def run(*values: Value) -> object:
        start()
        return function(*values)

    return run


def argument_text(values: list[Value]) -> str:
    """Canonical literal text of an argument list."""
    return ", ".join(map(repr, values))


def sample_program(source: str, kinds: list[str], rng: random.Random, count: int) -> tuple[Sample, ...] | None:
    """Run a program on random distinct arguments; None when it raises, leaves the limits or is nearly constant."""
    try:
        function = compile_program(source)
        found: dict[str, str] = {}
        for _ in range(count * 3):
            values = [random_value(rng, kind) for kind in kinds]
            text = argument_text(values)
            if text in found:
                continue
            try:
                output = function(*values)
            except IndexError:
                continue  # an empty list or string; the other arguments count
            if not within_limits(output):
                return None
            found[text] = repr(output)
            if len(found) == count:
                break
    except (ArithmeticError, LookupError, TypeError, ValueError, NameError, SyntaxError):
        return None
    if len(found) < min(count, 4) or len(set(found.values())) < 2:
        return None
    return tuple(Sample(arguments, output) for arguments, output in found.items())


def further_samples(program: Program, rng: random.Random, count: int) -> tuple[Sample, ...]:
    """The program's samples and new ones up to `count`; fewer where random arguments keep leaving the limits."""
    names = {int: "int", str: "str", list: "list"}
    kinds = [names[type(value)] for value in ast.literal_eval(f"({program.samples[0].arguments},)")]
    found = {sample.arguments: sample for sample in program.samples}
    for _ in range(count * 4):
        if len(found) >= count:
            break
        values = [random_value(rng, kind) for kind in kinds]
        arguments = argument_text(values)
        try:
            output = compile_program(program.source)(*values)
        except (ArithmeticError, LookupError, TypeError, ValueError, NameError):
            continue
        if within_limits(output):
            found.setdefault(arguments, Sample(arguments, repr(output)))
    return tuple(found.values())


def random_program(rng: random.Random, size: int, count: int, wide: bool = False) -> Program:
    """Draw programs of about `size` statements until one passes, with `count` samples (a few less if rare)."""
    while True:
        source, kinds = write_program(rng, size, wide)
        function = pruned(source)
        used = read_names(*function.body)
        pairs = list(zip(function.args.args, kinds, strict=True))
        if rng.random() < DROP_UNUSED:
            pairs = [(argument, kind) for argument, kind in pairs if argument.arg in used] or pairs
        function.args.args, kinds = [argument for argument, _ in pairs], [kind for _, kind in pairs]
        source = ast.unparse(function)
        if source.count("\n") >= MAX_LINES:
            continue
        samples = sample_program(source, kinds, rng, count)
        if samples is not None:
            return Program(source, samples)
