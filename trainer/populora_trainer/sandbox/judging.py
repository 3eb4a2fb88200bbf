"""How a case is decided: pure logic that asks for runs and never runs anything itself."""

import functools
import hashlib
import marshal
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from populora_trainer.sandbox import literals
from populora_trainer.sandbox.program import CODE, FRAME, REFUSED, SEEN
from populora_trainer.sandbox.variation import RUNS
from populora_trainer.sandbox.verdicts import REFUSED_BEFORE_RUNNING, Case, Judgement, Kind, Limits, Verdict

_DETAIL_CHARS = 200
_FROM_PROGRAM = frozenset(Verdict) - {
    Verdict.CORRECT,
    Verdict.WRONG_OUTPUT,
    Verdict.BAD_LITERAL,
    Verdict.INPUT_LIMIT,
    Verdict.NONDETERMINISTIC,
    Verdict.TIMEOUT,
}
_SEEN_VALID = Verdict.VALID + SEEN
# What a further run may end in; any other difference between two runs is the program's.
_FINAL = frozenset({Verdict.TIMEOUT, Verdict.MEMORY, Verdict.CRASHED, Verdict.NONDETERMINISTIC})


@dataclass(frozen=True, slots=True)
class Run:
    """A program with the argument lists to call it on, as canonical text."""

    program: str
    inputs: tuple[str, ...]

    @property
    def packed_inputs(self) -> bytes:
        """The argument lists as a job carries them; all share one process."""
        return _packed(self.inputs)

    def key(self, seed: int) -> int:
        """Return the 64-bit key of what varies between the runs; it follows from the run itself and the seed alone."""
        text = "\0".join([str(seed), self.program, *self.inputs])
        return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())


@functools.lru_cache(maxsize=256)  # all runs of a program have the same
def _packed(inputs: tuple[str, ...]) -> bytes:
    values = [literals.parse_arguments(arguments, len(arguments)) for arguments in inputs]
    return marshal.dumps(literals.pack(values))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run, or all runs so far, came to.

    Attributes:
        verdict: of the program.
        outputs: one canonical output per input where the verdict is valid.
        detail: one line for people.
        varies: whether the program saw what differs between varied runs.
    """

    verdict: Verdict
    outputs: tuple[str, ...] = ()
    detail: str = ""
    varies: bool = False


def read_record(record: bytes, nonce: bytes, run: Run, number: int, limits: Limits) -> Outcome:
    """Return what a program's process wrote about itself in run `number`; anything not well-formed is a crash.

    The program shares that process and may have written the record. It can only misstate its own result: the record
    is a verdict and canonical literals, and nothing in it is executed.
    """
    garbled = Outcome(Verdict.CRASHED, detail="the process ended without a well-formed result")
    if not record.startswith(nonce):
        return garbled
    try:
        head, _, text = record[len(nonce) :].decode().partition("\n")
    except UnicodeDecodeError:
        return garbled
    varies = number > 0 and head == _SEEN_VALID
    if not varies and head not in _FROM_PROGRAM:
        return garbled
    verdict = Verdict.VALID if varies else Verdict(head)
    if verdict is not Verdict.VALID:
        return Outcome(verdict, detail=_printable(text))
    outputs = tuple(text.split("\n"))
    if len(outputs) != len(run.inputs) + (number > 0) or not all(
        literals.is_canonical(output, limits.max_output_chars) for output in outputs
    ):
        return garbled
    if not number:
        return Outcome(verdict, outputs)
    *outputs_backwards, again = outputs
    if again != outputs_backwards[-1]:
        return Outcome(Verdict.NONDETERMINISTIC, detail=_differ("two calls", outputs_backwards[-1], again))
    return Outcome(verdict, tuple(outputs_backwards[::-1]), varies=varies)


@dataclass(slots=True)
class Program:
    """A program on its way to its runs.

    Attributes:
        source: its text.
        tried: whether it was given to a compilation; without code, its runs compile it themselves.
        code: the marshalled code object.
        refusal: why it is not to be run.
    """

    source: str
    tried: bool = False
    code: bytes | None = None
    refusal: Outcome | None = None


def read_compiled(record: bytes, nonce: bytes, programs: Sequence[Program]) -> None:
    """Note in the programs what the process that compiled them wrote, as far as it came.

    Code is handed on as it is, since only an isolated child may load it.
    """
    if not record.startswith(nonce):
        return
    position = len(nonce)
    for program in programs:
        if len(record) < position + FRAME.size:
            return
        kind, size = FRAME.unpack_from(record, position)
        position += FRAME.size
        payload = record[position : position + size]
        position += size
        if len(payload) < size:
            return
        if kind == CODE:
            program.code = payload
        elif kind == REFUSED:
            head, _, text = payload.decode(errors="replace").partition("\n")
            if head in REFUSED_BEFORE_RUNNING:
                program.refusal = Outcome(Verdict(head), detail=_printable(text))


def join(known: Outcome, further: Outcome) -> Outcome:
    """Return what a run and those before it come to, which were valid."""
    if further.verdict is Verdict.VALID and further.outputs == known.outputs:
        return Outcome(Verdict.VALID, known.outputs, varies=known.varies or further.varies)
    if further.verdict in _FINAL:
        return further
    if further.verdict is not Verdict.VALID:
        return Outcome(Verdict.NONDETERMINISTIC, detail=f"a further run ends in {further.verdict}: {further.detail}")
    pairs = [pair for pair in zip(known.outputs, further.outputs, strict=True) if pair[0] != pair[1]]
    return Outcome(Verdict.NONDETERMINISTIC, detail=_differ("two runs", *pairs[0]))


def needs_run(number: int, known: Outcome) -> bool:
    """Say whether run `number` is to be made after those before it: two of every valid program, or all."""
    return known.verdict is Verdict.VALID and (number < 2 or (known.varies and number < RUNS))


def judge(case: Case, limits: Limits) -> Generator[Run, Outcome, Judgement]:
    """Decide a case: yields the runs it needs, is sent their outcomes, returns the judgement."""
    inputs = case.inputs
    outputs = case.outputs
    if outputs and len(outputs) != len(inputs):
        raise ValueError(f"case {case.id}: {len(outputs)} outputs for {len(inputs)} inputs")
    if case.answer is not None and (refused := _refuse_answer(case, limits)):
        return refused
    if not outputs:
        if (case.task == "code_f" and not inputs) or (case.task != "code_f" and len(inputs) != 1):
            wanted = "at least one input" if case.task == "code_f" else "exactly one input"
            return _judgement(case, Verdict.BAD_LITERAL, "invalid", detail=f"{case.task} needs {wanted}")
        if len(inputs) > limits.max_inputs:
            detail = f"inputs are {len(inputs)}, allowed are {limits.max_inputs}"
            return _judgement(case, Verdict.INPUT_LIMIT, "invalid", (), detail=detail)
        if len(case.program) > limits.max_program_chars:
            return _judgement(case, Verdict.INPUT_LIMIT, "invalid", detail=_too_long("program", limits))
        try:
            inputs = tuple([_canonical_arguments(text, limits) for text in inputs])
        except (literals.NotLiteral, literals.TooLarge) as error:
            return _judgement(case, _literal_verdict(error), "invalid", detail=f"input: {error}")
        outcome = yield Run(case.program, inputs)
        if outcome.verdict is not Verdict.VALID:
            return _judgement(case, outcome.verdict, "invalid", inputs, detail=outcome.detail)
        outputs = outcome.outputs
    if case.answer is None:
        return _judgement(case, Verdict.VALID, "valid", inputs, outputs)

    if case.task == "code_o":
        value = literals.parse_literal(case.answer, limits.max_output_chars)
        given = Outcome(Verdict.VALID, (literals.canonical(value, limits.max_output_chars),))
    elif case.task == "code_i":
        arguments = _canonical_arguments(case.answer, limits)
        if (arguments,) == inputs:
            given = Outcome(Verdict.VALID, outputs)
        else:
            given = yield Run(case.program, (arguments,))
    else:
        given = yield Run(case.answer, inputs)
    if given.verdict is not Verdict.VALID:
        # code_i runs the problem's program, so that only a code_f answer can be refused before it runs.
        kind: Kind = "malformed" if case.task == "code_f" and given.verdict in REFUSED_BEFORE_RUNNING else "wrong"
        return _judgement(case, given.verdict, kind, inputs, detail=given.detail)
    if given.outputs == outputs:
        return _judgement(case, Verdict.CORRECT, "correct", inputs, outputs)
    pairs = [pair for pair in zip(given.outputs, outputs, strict=True) if pair[0] != pair[1]]
    detail = _short(f"{len(pairs)} of {len(outputs)} outputs differ: gives {pairs[0][0]}, not {pairs[0][1]}")
    return _judgement(case, Verdict.WRONG_OUTPUT, "wrong", inputs, given.outputs, detail)


def _refuse_answer(case: Case, limits: Limits) -> Judgement | None:
    """Refuse an answer that is not even of the right form, before anything runs."""
    answer = case.answer or ""
    if case.task == "code_f":
        if len(answer) > limits.max_program_chars:
            return _judgement(case, Verdict.INPUT_LIMIT, "malformed", detail=_too_long("answer", limits))
        return None
    try:
        if case.task == "code_o":
            literals.canonical(literals.parse_literal(answer, limits.max_output_chars), limits.max_output_chars)
        else:
            _canonical_arguments(answer, limits)
    except (literals.NotLiteral, literals.TooLarge) as error:
        return _judgement(case, _literal_verdict(error), "malformed", detail=f"answer: {error}")
    return None


def _canonical_arguments(text: str, limits: Limits) -> str:
    arguments = literals.parse_arguments(text, limits.max_output_chars)
    return literals.canonical_arguments(arguments, limits.max_output_chars)


def _literal_verdict(error: ValueError) -> Verdict:
    return Verdict.INPUT_LIMIT if isinstance(error, literals.TooLarge) else Verdict.BAD_LITERAL


def _too_long(what: str, limits: Limits) -> str:
    return f"{what} longer than {limits.max_program_chars} characters"


def _printable(text: str) -> str:
    return "".join([character if character.isprintable() else " " for character in text[:_DETAIL_CHARS]])


def _differ(what: str, one: str, other: str) -> str:
    return _short(f"{what} give {one} and {other}")


def _short(text: str) -> str:
    return text if len(text) <= _DETAIL_CHARS else text[: _DETAIL_CHARS - 3] + "..."


def _judgement(
    case: Case,
    verdict: Verdict,
    kind: Kind,
    inputs: tuple[str, ...] | None = None,
    outputs: tuple[str, ...] = (),
    detail: str = "",
) -> Judgement:
    return Judgement(case.id, verdict, kind, case.inputs if inputs is None else inputs, outputs, detail)
