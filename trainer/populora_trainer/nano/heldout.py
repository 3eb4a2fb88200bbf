"""The held-out problems of the embedded bases: fixed, shipped with them, their programs unseen in any training.

`heldout.jsonl` holds one problem a line, three per program (code_o, code_i, code_f) in shuffled order of programs, so
that any prefix is a fair sample. Pretraining rejects every program that equals one of these up to variable names. So
does self-play on an embedded base: all of them, however many problems a run is evaluated on.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from populora_trainer.nano.corpus import IDENTITY, SOLVE_SIZES, WIDE, contrasting, message_of
from populora_trainer.nano.programs import Program, further_samples, random_program
from populora_trainer.nano.registry import SCHEME
from populora_trainer.randomness import choices
from populora_trainer.tasks.held_out import NOTHING_HELD_OUT, HeldOutPrograms, normalised_hash
from populora_trainer.tasks.problem import TASK_TYPES, Problem

HELDOUT_PATH = Path(__file__).with_name("heldout.jsonl")
HELDOUT_SEED = 20_260_516
NATURAL, HARD = 320, 80  # programs from the corpus distribution, and longer ones beyond it
HARD_SIZES = ((3, 4, 5, 6), (1.0, 1.0, 1.0, 1.0))
FIRST_INPUTS, FUNCTION_INPUTS = 4, 6  # a code_f student sees half of its pairs


@cache
def load_heldout() -> tuple[Problem, ...]:
    """Return the shipped held-out problems with their outputs."""
    return tuple(_read(HELDOUT_PATH.read_text(encoding="utf-8")))


@cache
def heldout_hashes() -> frozenset[str]:
    """Return the normalised hashes of the held-out programs."""
    return HeldOutPrograms.of({problem.program for problem in load_heldout()}).digests


def held_out_programs(base_uri: str) -> HeldOutPrograms:
    """Return the programs that training on a base may not see: those of the embedded bases, of another base none."""
    return HeldOutPrograms(heldout_hashes()) if base_uri.startswith(SCHEME) else NOTHING_HELD_OUT


def _read(text: str) -> Iterator[Problem]:
    for line in text.splitlines():
        fields = json.loads(line)
        yield Problem(
            task=fields["task"],
            program=fields["program"],
            inputs=tuple(fields["inputs"]),
            outputs=tuple(fields["outputs"]),
            message=fields["message"],
        )


def build_heldout(seed: int = HELDOUT_SEED) -> list[Problem]:
    """Draw the held-out problems: programs distinct up to variable names, six samples each for code_f."""
    rng = choices(seed, "held-out programs")
    identity = normalised_hash(IDENTITY)  # proposals may start from it, so it is no secret
    programs: dict[str, Program] = {}
    for count, sizes, wide in ((NATURAL, SOLVE_SIZES, WIDE), (HARD, HARD_SIZES, 0.5)):
        wanted = len(programs) + count
        while len(programs) < wanted:
            program = random_program(rng, rng.choices(*sizes)[0], FIRST_INPUTS, wide=rng.random() < wide)
            digest = normalised_hash(program.source)
            if digest != identity:
                programs.setdefault(digest, program)
    ordered = list(programs.values())
    rng.shuffle(ordered)
    return [problem for program in ordered for problem in _problems(program)]


def _problems(program: Program) -> Iterator[Problem]:
    first = program.samples[0]
    rng = choices(HELDOUT_SEED, "further inputs", program.source)
    samples = contrasting(further_samples(program, rng, FUNCTION_INPUTS))
    for task in TASK_TYPES:
        if task == "code_f":
            inputs, outputs = (sample.arguments for sample in samples), (sample.output for sample in samples)
            yield Problem(task, program.source, tuple(inputs), tuple(outputs), message_of(program.source))
        else:
            yield Problem(task, program.source, (first.arguments,), (first.output,))


def heldout_text(problems: list[Problem]) -> str:
    """One JSON object a line."""
    fields = ("task", "program", "inputs", "outputs", "message")
    return "".join(json.dumps({name: getattr(problem, name) for name in fields}) + "\n" for problem in problems)
