import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.sandbox.policy import ALLOWED_MODULES, FORBIDDEN_ATTRIBUTES, FORBIDDEN_NAMES, check, is_plain
from populora_trainer.sandbox.verdicts import Verdict


@pytest.mark.parametrize("name", sorted(FORBIDDEN_NAMES))
def test_a_forbidden_name_is_found_by_both_checks(name: str) -> None:
    program = f"def f(x):\n    return {name}"
    assert not is_plain(program)
    finding = check(program)
    assert finding is not None
    assert finding.verdict is Verdict.FORBIDDEN_NAME
    assert "line 2" in finding.detail


@pytest.mark.parametrize("name", sorted(FORBIDDEN_ATTRIBUTES))
def test_a_forbidden_attribute_is_found_by_both_checks(name: str) -> None:
    program = f"def f(x):\n    return x.{name}"
    assert not is_plain(program)
    finding = check(program)
    assert finding is not None
    assert finding.verdict is Verdict.FORBIDDEN_NAME


@given(st.sampled_from(sorted(FORBIDDEN_NAMES | FORBIDDEN_ATTRIBUTES)), st.sampled_from("+ ([:,=.\n\t;#"))
def test_a_plain_program_has_no_finding_wherever_the_name_stands(name: str, separator: str) -> None:
    program = f"def f(x):\n    y ={separator}{name}{separator}x"
    if is_plain(program):
        with contextlib.suppress(SyntaxError):
            assert check(program) is None


@pytest.mark.parametrize("module", sorted(ALLOWED_MODULES))
def test_an_allowed_module_may_be_imported_in_every_form(module: str) -> None:
    for program in (f"import {module}", f"import {module} as m", f"def f():\n    import {module}"):
        assert check(program) is None


def test_the_dots_of_a_module_count() -> None:
    assert check("import collections.abc") is None
    for program in (
        "import json.tool",
        "import os.path",
        "from os import path",
        "from . import a",
        "import collections.x",
    ):
        finding = check(program)
        assert finding is not None
        assert finding.verdict is Verdict.FORBIDDEN_IMPORT


@pytest.mark.parametrize(
    "binding",
    [
        "def f(input): return input",
        "def f(*, input=1): return input",
        "input = 3\ndef f(): return input",
        "def f():\n    for input in []: return input",
        "def f():\n    try: pass\n    except ValueError as input: return input",
        "def input(): pass\ndef f(): return input()",
        "from math import pi as input\ndef f(): return input",
        "def f(x):\n    match x:\n        case [input, *id]: return input, id",
        "def f(x): return [(input := x), input]",
    ],
)
def test_a_program_may_bind_the_name_of_a_forbidden_builtin(binding: str) -> None:
    assert check(binding) is None
