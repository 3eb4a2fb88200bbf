import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.diagnostics.complexity import Complexity, measure

# Decision points by the definitions of McCabe (1976) as radon's documentation lists them, counted by hand.
DECISIONS = [
    ("return a", 0),
    ("if a:\n        return 1\n    return 2", 1),
    ("if a:\n        return 1\n    elif a > 2:\n        return 2\n    else:\n        return 3", 2),
    ("return 1 if a else 2", 1),
    ("for x in a:\n        pass", 1),
    ("for x in a:\n        pass\n    else:\n        pass", 2),
    ("while a:\n        a -= 1", 1),
    ("return a and b or c", 2),
    ("return a and b and c", 2),
    ("return [x for x in a if x if x > 1]", 3),
    ("return {x: y for x in a for y in x}", 2),
    ("try:\n        pass\n    except KeyError:\n        pass\n    except ValueError:\n        pass", 2),
    ("try:\n        pass\n    except KeyError:\n        pass\n    else:\n        pass\n    finally:\n        pass", 2),
    ("assert a", 1),
    ("with a as b:\n        pass", 0),
    (
        "match a:\n        case 1: a\n        case [x, *y]: a\n        case _: a",
        2,
    ),
    ("match a:\n        case x if x > 1:\n            pass", 1),
    ("return sorted(a, key=lambda x: -x)", 0),
]


@pytest.mark.parametrize(("body", "decisions"), DECISIONS)
def test_cyclomatic_complexity_is_one_more_than_the_decision_points(body, decisions):
    assert measure(f"def f(a, b=0, c=0):\n    {body}").cyclomatic == 1 + decisions


def test_a_small_program_has_the_numbers_counted_by_hand():
    program = '''
def f(items, n):
    """Docstring."""
    # a comment
    total = 0

    for item in items:
        if item > n and item % 2 == 0:
            total += item; n = n + 1
    return total
'''
    # def, total = 0, for, if, total +=, n =, return;   module > def > for > if > and > (%2 == 0) > % > item > load
    assert measure(program) == Complexity(ast_depth=8, cyclomatic=4, loc=7, variables=4)


def test_the_papers_example_has_the_papers_depth():
    example = "def f(number):\n    return number * 3"
    assert measure(example) == Complexity(ast_depth=5, cyclomatic=1, loc=2, variables=1)


def test_the_identity_program_is_the_floor():
    assert measure("def f(a):\n    return a") == Complexity(ast_depth=4, cyclomatic=1, loc=2, variables=1)


@pytest.mark.parametrize(
    ("expression", "depth"),
    [
        ("a", 4),
        ("1", 3),
        ("a + 1", 5),
        ("-a", 5),
        ("a.b", 5),
        ("a[0]", 5),
        ("a[1 + 2]", 5),
        ("a[b + 2]", 6),
        ("f(a)", 5),
        ("[f(a)]", 6),
    ],
)
def test_the_depth_is_that_of_pythons_own_tree(expression, depth):
    program = f"def f(a):\n    return {expression}"
    # The longest chain of opening brackets in the dump is the longest path, with the module's as the first.
    level = deepest = 0
    for character in ast.dump(ast.parse(program)):
        level += (character == "(") - (character == ")")
        deepest = max(deepest, level)
    assert measure(program).ast_depth == deepest - 1 == depth


def test_only_names_bound_to_values_are_variables():
    program = """
import math
from os import path as p
class C:
    def m(self): return self
def f(a, *rest, k=1, **options):
    with a as b, a as (c, d):
        [e for e in a]
    try:
        (g := 1)
    except ValueError as h:
        pass
    match a:
        case {"x": i, **j}: pass
        case [*l] | (1 as l): pass
    a.attribute = a[0] = 3
"""
    names = {"self", "a", "rest", "k", "options", "b", "c", "d", "e", "g", "h", "i", "j", "l"}
    assert measure(program).variables == len(names)


@pytest.mark.parametrize("program", ["def f(a) return", "\x00", "(" * 3000, "-" * 20000 + "1", "\ud800"])
def test_text_that_is_not_python_has_no_complexity(program):
    assert measure(program) is None


def test_an_empty_program_measures_nothing():
    assert measure("") == Complexity(0, 1, 0, 0)


@st.composite
def bodies(draw, indent=1, level=0):
    """Lines of a function body with its decisions, logical lines and variables, counted as it grows."""
    lines, decisions, loc, names = [], 0, 0, set()
    pad = "    " * indent
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["assign", "if", "for", "comment"] if level < 2 else ["assign"]))
        name = draw(st.sampled_from("pqrs"))
        if kind == "comment":
            lines += [f"{pad}# {name}", ""]
        elif kind == "assign":
            lines.append(f"{pad}{name}   = 1 # {name}")
            loc += 1
            names.add(name)
        else:
            inner = draw(bodies(indent + 1, level + 1))
            lines += [f"{pad}if a:" if kind == "if" else f"{pad}for {name} in a:", *inner[0], f"{pad}    pass"]
            decisions += 1 + inner[1]
            loc += 2 + inner[2]
            names |= inner[3] | ({name} if kind == "for" else set())
    return lines, decisions, loc, names


@given(bodies())
def test_the_measures_count_what_was_put_in(body):
    lines, decisions, loc, names = body
    found = measure("\n".join(["def f(a):", *lines, "    return a"]))
    assert (found.cyclomatic, found.loc, found.variables) == (1 + decisions, 2 + loc, 1 + len(names))


@given(bodies())
def test_layout_and_comments_change_nothing(body):
    plain = "\n".join(["def f(a):", *body[0], "    return a"])
    assert measure("# head\n\n" + plain.replace("\n", "\n\n").replace("    ", "\t") + "\n# tail") == measure(plain)
