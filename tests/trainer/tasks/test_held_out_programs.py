import ast
import builtins
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.nano.corpus import IDENTITY
from populora_trainer.nano.heldout import held_out_programs, load_heldout
from populora_trainer.tasks.held_out import NOTHING_HELD_OUT, HeldOutPrograms, normalised_hash

PROGRAMS = sorted({problem.program for problem in load_heldout()})
HELD_OUT = held_out_programs("builtin://nano")


class Renaming(ast.NodeTransformer):
    """Gives variables other names, none of which occurs in the program."""

    def __init__(self, program: str, rng: random.Random) -> None:
        tree = ast.parse(program)
        names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        arguments = [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
        variables = sorted({name for name in [*names, *arguments] if name not in dir(builtins)})
        free = sorted(
            {"x", "y", "zz", "v0", "v1", "v2", "i", "len_", "sum", "list", "d", "q", "r"} - {*names, *arguments}
        )
        self.names = dict(zip(variables, rng.sample(free, len(variables)), strict=True))

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self.names.get(node.arg, node.arg))


@given(st.sampled_from(PROGRAMS), st.randoms(use_true_random=False))
def test_a_held_out_program_is_known_whatever_its_variables_are_called(program, rng):
    other = ast.unparse(ast.fix_missing_locations(Renaming(program, rng).visit(ast.parse(program))))
    assert other not in PROGRAMS or other == program or normalised_hash(other) == normalised_hash(program)
    assert other in HELD_OUT
    assert f"# mine\n{other}\n\n" in HELD_OUT


def test_the_hash_ignores_names_and_layout_and_nothing_else():
    base = normalised_hash("def f(x, v):\n    return [i + x for i in v]")
    assert normalised_hash("def f(a,w):\n\n    return [ (j+a) for j in w ]") == base
    assert normalised_hash("def f(x, v):\n    return [i - x for i in v]") != base
    assert normalised_hash("def f(v, x):\n    return [i + x for i in v]") != base
    assert normalised_hash("def f(x, y):\n    return x + x") != normalised_hash("def f(x, y):\n    return x + y")
    assert normalised_hash("def f(x):\n    return 'x'") != normalised_hash("def f(y):\n    return 'y'")


@pytest.mark.parametrize(
    "program",
    [
        IDENTITY,
        "",
        "def f(x",
        "no program at all",
        "def f(x):\n    return '\ud800'",
        "def f(x):\n    return " + "+".join(["x"] * 20_000),
        "def f(x):\n    return " + "-" * 5000 + "x",
        "def g(*a, k=1, **b):\n    global y\n    return lambda z: (k, z)\ndef f(x):\n    return g(x)",
    ],
)
def test_any_text_is_looked_up_and_none_of_these_is_held_out(program):
    assert program not in HELD_OUT


def test_a_set_of_ones_own_holds_its_programs():
    mine = HeldOutPrograms.of(["def f(a):\n    return a * 3"])
    assert "def f(zz):\n    return zz * 3" in mine
    assert "def f(a):\n    return a * 4" not in mine
    assert None not in mine


@pytest.mark.parametrize("uri", ["builtin://nano", "builtin://nano-raw"])
def test_the_embedded_bases_hold_out_every_shipped_program(uri):
    assert len(held_out_programs(uri).digests) == len(PROGRAMS)


@pytest.mark.parametrize("uri", ["hf://Some/Model@main", "file:///builtin", "s3://builtin/nano"])
def test_nothing_is_held_out_of_training_on_another_base(uri):
    assert held_out_programs(uri) == NOTHING_HELD_OUT
    assert not any(program in held_out_programs(uri) for program in PROGRAMS)
