"""The pretraining corpus: documents of the compact formats over generated programs, held-out programs left out.

A chunk of documents follows from (seed, chunk number) alone. A document is a shared prefix (the task token and the
program) and branches; a branch is what one prompt adds to the prefix, then its answer, then `<eos>`. So every answer
stands in exactly the form in which it is asked later.
"""

import ast
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from populora_trainer.nano.programs import (
    Program,
    Sample,
    argument_text,
    compile_program,
    random_program,
    random_value,
)
from populora_trainer.randomness import choices
from populora_trainer.tasks.compact import (
    EOS,
    function_prompt,
    function_proposal_completion,
    input_prompt,
    output_prompt,
    proposal_completion,
    propose_prompt,
)
from populora_trainer.tasks.held_out import normalised_hash
from populora_trainer.tasks.problem import TaskType
from populora_trainer.tasks.templates import Parts

DRILL_ARGUMENTS: tuple[tuple[str, ...], ...] = (
    *(("x",), ("n",), ("a",), ("b",), ("y",), ("x", "y"), ("a", "b"), ("n", "x")),
    *(("v", "x"), ("s", "n")),  # a list or a string that the program does not read
)
IDENTITY = "def f(x):\n    return x"
# statements before the return: what is solved is spread wide, what is proposed is mostly short with a long tail
SOLVE_SIZES = ((0, 1, 2, 3, 4, 5, 6), (0.12, 0.25, 0.25, 0.17, 0.11, 0.06, 0.04))
PROPOSE_SIZES = ((0, 1, 2, 3, 4, 5), (0.36, 0.34, 0.17, 0.08, 0.03, 0.02))
WIDE = 0.15  # share of programs with two-digit constants and longer expressions
EASY_SIZES = ((0, 1, 2, 3, 4), (0.48, 0.34, 0.12, 0.04, 0.02))
EASY = 0.6  # share of code_f problems and proposals over easy programs
KINDS = ("output", "input", "function", "propose", "propose_function", "drill")
BROAD_MIX = (0.36, 0.17, 0.21, 0.14, 0.04, 0.08)  # while the learning rate is flat
FINAL_MIX = (0.35, 0.14, 0.27, 0.15, 0.04, 0.05)  # while it falls: more code_f, which lags behind
FULL_MESSAGE = 0.7  # share of code_f problems whose message names all that the program does
MAX_MESSAGE_WORDS = 4
SLOPPY_FUNCTION = 0.7  # a sloppy code_f answer is rarer by this factor


@dataclass(frozen=True, slots=True)
class Branch:
    """One question behind a shared prefix and its answer, `<eos>` included."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Document:
    """A shared prefix and the branches behind it; the text of branch k is `prefix + question + answer`."""

    prefix: str
    branches: tuple[Branch, ...]


def message_of(source: str, rng: random.Random | None = None) -> str:
    """What a program does in a few hint words, from its syntax tree; with a generator, a random few of them."""
    words: list[str] = []
    operators = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "div", ast.Mod: "mod"}
    calls = {"len", "sum", "max", "min", "abs", "sorted", "range", "str", "list"}
    methods = {"append", "count", "join", "upper", "replace"}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.For():
                nested = any(isinstance(child, ast.For) for part in node.body for child in ast.walk(part))
                words.append("nested" if nested else "loop")
            case ast.While():
                words.append("while")
            case ast.If():
                words.append("else" if node.orelse else "if")
            case ast.BinOp(op=operator) | ast.AugAssign(op=operator):
                words.append(operators.get(type(operator), ""))
            case ast.Call(func=ast.Name(id=name)) if name in calls:
                words.append(name)
            case ast.Call(func=ast.Attribute(attr=name)) if name in methods:
                words.append(name)
            case ast.Subscript(slice=ast.Slice(step=None)):
                words.append("slice")
            case ast.Subscript(slice=ast.Slice()):
                words.append("reverse")
            case ast.Subscript():
                words.append("index")
            case ast.ListComp():
                words.append("filter" if node.generators[0].ifs else "map")
            case ast.Return(value=ast.Compare()):
                words.append("compare")
            case _:
                pass
    known = [word for word in dict.fromkeys(words) if word]
    if rng is not None and len(known) > 1:
        keep = set(rng.sample(known, rng.randint(1, min(len(known), MAX_MESSAGE_WORDS))))
        known = [word for word in known if word in keep]
    return " ".join(known[:MAX_MESSAGE_WORDS])


def contrasting(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples, the first of every output before the repetitions."""
    first = {sample.output: sample for sample in reversed(samples)}
    return sorted(samples, key=lambda sample: first[sample.output] is not sample)


class CorpusGenerator:
    """Draws documents; programs whose normalised hash is in `held_out` never occur, not even as references.

    `mix` holds the shares of the kinds in `KINDS`; `sloppy` is the share of deliberately careless answers, for the
    under-elicited variant.
    """

    def __init__(
        self,
        rng: random.Random,
        held_out: Collection[str],
        mix: Sequence[float] = BROAD_MIX,
        sloppy: float = 0.0,
    ) -> None:
        self.rng = rng
        self.held_out = held_out
        self.mix = mix
        self.sloppy = sloppy

    def document(self) -> Document:
        """One document of a random kind."""
        kind = self.rng.choices(KINDS, self.mix)[0]
        makers: dict[str, Callable[[], Document]] = {
            "output": self.output,
            "input": self.input,
            "function": self.function,
            "propose": self.propose,
            "propose_function": self.propose_function,
            "drill": self.drill,
        }
        return makers[kind]()

    def program(self, sizes: tuple[Sequence[int], Sequence[float]], count: int) -> Program:
        """A random program that is not held out."""
        rng = self.rng
        while True:
            size = rng.choices(*sizes)[0]
            program = random_program(rng, size, count, wide=rng.random() < WIDE)
            if normalised_hash(program.source) not in self.held_out:
                return program

    def output(self) -> Document:
        """code_o with several inputs of one program."""
        return self._outputs(self.program(SOLVE_SIZES, self.rng.randint(3, 7)))

    def input(self) -> Document:
        """code_i with several outputs of one program."""
        return self._inputs(self.program(SOLVE_SIZES, self.rng.randint(3, 6)))

    def function(self) -> Document:
        """code_f: the program is the answer to a message and two or three pairs, whose outputs differ if they can."""
        rng = self.rng
        program = self.program(self.proposed_sizes(), 6)
        shown = contrasting(program.samples)[: rng.choice((2, 3, 3))]
        message = message_of(program.source, None if rng.random() < FULL_MESSAGE else rng)
        answer = program.source
        if rng.random() < self.sloppy * SLOPPY_FUNCTION:
            answer = self.program(PROPOSE_SIZES, 4).source
        return _single(function_prompt([(one.arguments, one.output) for one in shown], message), answer)

    def propose(self) -> Document:
        """A new program and an input, given a reference; sometimes the new program is one edit away from it."""
        rng = self.rng
        sizes = self.proposed_sizes()
        program = self.program(sizes, 4)
        reference = IDENTITY
        roll = rng.random()
        if roll < 0.3:
            reference = self.edited(program.source) or IDENTITY
        elif roll < 0.9:
            reference = self.program(sizes, 4).source
        task: TaskType = "code_o" if rng.random() < 0.5 else "code_i"
        completion = proposal_completion(program.source, program.samples[0].arguments)
        return _single(propose_prompt(task, reference), completion)

    def propose_function(self) -> Document:
        """Inputs, those first that give different outputs, and the complete message for a given program."""
        rng = self.rng
        if rng.random() < 0.05:
            values = [random_value(rng, rng.choice(("int", "list", "str"))) for _ in range(6)]
            program = Program(IDENTITY, tuple(Sample(repr(value), repr(value)) for value in values))
        else:
            program = self.program(self.proposed_sizes(), rng.choice((4, 5, 6, 6, 6)))
        inputs = [sample.arguments for sample in contrasting(program.samples)]
        completion = function_proposal_completion(inputs, message_of(program.source))
        return _single(propose_prompt("code_f", program.source), completion)

    def proposed_sizes(self) -> tuple[Sequence[int], Sequence[float]]:
        """Sizes for one document about a program that a teacher could propose."""
        return EASY_SIZES if self.rng.random() < EASY else PROPOSE_SIZES

    def edited(self, source: str) -> str | None:
        """The program with one constant or operator changed, or None where nothing fits or the result is held out."""
        rng = self.rng
        places = [
            index
            for index, letter in enumerate(source)
            if letter in "0123456789" or source[index : index + 3] in (" + ", " - ", " * ")
        ]
        if not places:
            return None
        place = rng.choice(places)
        if source[place] == " ":
            changed = source[:place] + rng.choice((" + ", " - ", " * ")) + source[place + 3 :]
        else:
            changed = source[:place] + str(rng.randint(1, 9)) + source[place + 1 :]
        if changed == source or normalised_hash(changed) in self.held_out:
            return None
        return changed

    def drill(self) -> Document:
        """One-digit arithmetic, mostly sums and differences, with many pairs of one short program."""
        rng = self.rng
        operator = rng.choices(("+", "-", "*"), (5, 5, 1))[0]
        names = rng.choice(DRILL_ARGUMENTS)
        ints = [name for name in names if name not in ("v", "s")]
        limit = 9 if operator == "*" or rng.random() < 0.75 else 30
        constant = str(rng.randint(0, limit))
        left, right = (ints[0], ints[1]) if len(ints) == 2 and rng.random() < 0.8 else (ints[-1], constant)
        if rng.random() < 0.25:
            left, right = right, left
        source = f"def f({', '.join(names)}):\n    return {left} {operator} {right}"
        if rng.random() < 0.25:
            source = f"def f({', '.join(names)}):\n    r = {left} {operator} {right}\n    return r"
        function, found = compile_program(source), dict[str, str]()
        while len(found) < 8:
            values = [
                rng.randint(0, limit) if name in ints else random_value(rng, "list" if name == "v" else "str")
                for name in names
            ]
            output = function(*values)
            found[argument_text(values)] = repr(output)
        if normalised_hash(source) in self.held_out:
            return self.drill()
        program = Program(source, tuple(Sample(arguments, output) for arguments, output in found.items()))
        return self._outputs(program) if rng.random() < 0.7 else self._inputs(program)

    def _outputs(self, program: Program) -> Document:
        """Questions by samples; a sloppy answer is the output of another sample or the input itself."""
        rng, pairs = self.rng, []
        for sample in program.samples:
            answer = sample.output
            if rng.random() < self.sloppy:
                answer = rng.choice((*(other.output for other in program.samples), _first_argument(sample.arguments)))
            pairs.append((output_prompt(program.source, sample.arguments), answer))
        return _document(pairs)

    def _inputs(self, program: Program) -> Document:
        """Questions by distinct outputs; the answer is the first sample with that output, sloppily any sample."""
        first: dict[str, str] = {}
        for sample in program.samples:
            first.setdefault(sample.output, sample.arguments)
        pairs = []
        for output, arguments in first.items():
            answer = self.rng.choice(program.samples).arguments if self.rng.random() < self.sloppy else arguments
            pairs.append((input_prompt(program.source, output), answer))
        return _document(pairs)


def _first_argument(arguments: str) -> str:
    return repr(ast.literal_eval(f"({arguments},)")[0])


def _single(prompt: Parts, completion: str) -> Document:
    return Document("".join(prompt), (Branch("", completion + EOS),))


def _document(pairs: Sequence[tuple[Parts, str]]) -> Document:
    """Share what all prompts begin with up to the last special token of the prefix."""
    prompts = ["".join(prompt) for prompt, _ in pairs]
    start = prompts[0].rindex("<in>") if prompts[0].endswith("<out>") else prompts[0].rindex("<out>")
    branches = tuple(Branch(prompt[start:], answer + EOS) for prompt, (_, answer) in zip(prompts, pairs, strict=True))
    return Document(prompts[0][:start], branches)


def chunk(
    seed: int,
    number: int,
    size: int,
    held_out: Collection[str],
    mix: Sequence[float] = BROAD_MIX,
    sloppy: float = 0.0,
) -> list[Document]:
    """Return `size` documents, a function of the arguments; chunks of different numbers share no draws."""
    generator = CorpusGenerator(choices(seed, "corpus", number), held_out, mix, sloppy)
    return [generator.document() for _ in range(size)]
