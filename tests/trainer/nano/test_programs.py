import ast
import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from populora_trainer.nano.programs import MAX_INT, MAX_LINES, random_program
from populora_trainer.nano.pruning import pruned
from populora_trainer.sandbox import Case, SandboxPool


def run(source: str, arguments: str) -> str:
    names: dict = {}
    exec(source, names)
    return repr(eval(f"f({arguments})", names))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 6), st.booleans())
def test_samples_are_what_python_returns(seed, size, wide):
    program = random_program(random.Random(seed), size, 4, wide)
    assert len(program.samples) >= 4
    assert len({sample.output for sample in program.samples}) >= 2
    assert program.lines <= MAX_LINES
    for sample in program.samples:
        assert run(program.source, sample.arguments) == sample.output


def test_the_same_seed_writes_the_same_program():
    assert [random_program(random.Random(7), 3, 4) for _ in range(2)] == [random_program(random.Random(7), 3, 4)] * 2


def test_long_programs_use_nested_loops_branches_and_large_numbers():
    rng = random.Random(0)
    sources = [random_program(rng, 5, 4, wide=True).source for _ in range(60)]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    loops = [node for node in nodes if isinstance(node, ast.For)]
    constants = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, int)]
    assert any(isinstance(child, ast.For) for loop in loops for child in loop.body)
    assert any(isinstance(node, ast.While) for node in nodes)
    assert any(isinstance(node, ast.If) and node.orelse for node in nodes)
    assert max(constants) > 9
    assert max(source.count("\n") for source in sources) >= 9
    assert MAX_INT == 99


def test_the_verifier_accepts_what_the_generator_writes():
    rng = random.Random(3)
    programs = [random_program(rng, size, 4, wide=size > 3) for size in (0, 1, 2, 3, 4, 5) for _ in range(2)]
    cases = [Case(str(n), "code_o", one.source, (one.samples[0].arguments,)) for n, one in enumerate(programs)]
    with SandboxPool(workers=1) as pool:
        judged = asyncio.run(pool.judge(cases))
    assert [one.kind for one in judged] == ["valid"] * len(programs)
    assert [one.outputs[0] for one in judged] == [one.samples[0].output for one in programs]


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("def f(x):\n    r = x + 1\n    return x", "def f(x):\n    return x"),
        ("def f(x):\n    r = 0\n    for i in range(x):\n        r += i\n    return x", "def f(x):\n    return x"),
        (
            "def f(x):\n    r = 0\n    k = 0\n    for i in range(x):\n        k += 1\n        r += k\n    return r",
            "def f(x):\n    r = 0\n    k = 0\n    for i in range(x):\n        k += 1\n        r += k\n    return r",
        ),
        (
            "def f(x):\n    r = 0\n    while x > 0:\n        r += 1\n        x -= 1\n    return r",
            "def f(x):\n    r = 0\n    while x > 0:\n        r += 1\n        x -= 1\n    return r",
        ),
        ("def f(v):\n    v.append(1)\n    return 2", "def f(v):\n    return 2"),
        ("def f(v):\n    if v[0] > 1:\n        return v\n    v.append(1)\n    return v",) * 2,
    ],
)
def test_only_statements_that_cannot_matter_are_pruned(source, kept):
    assert ast.unparse(pruned(source)) == kept
