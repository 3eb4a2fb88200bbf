import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.sandbox.literals import canonical, parse_arguments
from populora_trainer.tasks.parsing import (
    Block,
    argument_list,
    defines_entry,
    fenced_blocks,
    literal_text,
    normalised,
    parse_source,
)

LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(0, 9) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```python\nx = 1\n```", [Block("python", "x = 1")]),
        ("Sure! Here it is:\n```python\nx = 1\n```\nHope it helps.", [Block("python", "x = 1")]),
        ("```Python\r\nx = 1\r\ny = 2\r\n```\r\n", [Block("python", "x = 1\ny = 2")]),
        ("```\n7\n```", [Block("", "7")]),
        ("``` input \n7\n```", [Block("input", "7")]),
        ("```python title=a\n7\n```", [Block("python", "7")]),
        ("  ```output\n[1]\n  ```", [Block("output", "[1]")]),
        ("```a\n1\n```\n```b\n2\n```", [Block("a", "1"), Block("b", "2")]),
        ("````message\n```\ncode\n```\n````", [Block("message", "```\ncode\n```")]),
        ("```input\n```", [Block("input", "")]),
        ("no block at all", []),
        ("inline ```x``` is no fence", []),
        ("<think>```output\n1\n```</think>```output\n2\n```", [Block("output", "2")]),
        ("reasoning ```output\n1\n```\n</think>\n```output\n2\n```", [Block("output", "2")]),
    ],
)
def test_fenced_blocks_are_found_in_what_models_write(text, blocks):
    assert fenced_blocks(text) == blocks


@pytest.mark.parametrize("text", ["```python\nx = 1", "```a\n1\n```\n```b\n2", "<think>still thinking ```\n1\n```"])
def test_an_answer_that_was_cut_off_has_no_blocks(text):
    assert fenced_blocks(text) is None


@pytest.mark.parametrize("text", ["```" + " " * 200_000 + "`", "`" * 200_000, "```\n" * 50_000, "</think> " * 50_000])
def test_long_lines_take_no_more_than_linear_time(text):
    fenced_blocks(text)


@given(st.text(alphabet=st.sampled_from("`abc \n\r<think>/~"), max_size=60))
def test_garbage_never_raises(text):
    fenced_blocks(text)
    argument_list(text)
    literal_text(text)
    normalised(text)


@given(st.text(max_size=40))
def test_arbitrary_text_never_raises(text):
    fenced_blocks(text)
    argument_list(text)
    literal_text(text)
    normalised(text)
    defines_entry(text)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000,
        "-" * 20000 + "1",
        "[" * 90 + "]" * 90,
        "\x00",
        "\ud800",
        "1" * 5000,
        "0x" + "f" * 9000,
        "lambda: " * 3000,
    ],
)
def test_text_made_to_break_a_parser_breaks_nothing(text):
    normalised(text)
    argument_list(text)
    literal_text(text)


@given(st.lists(LITERALS, min_size=1, max_size=3))
def test_argument_lists_keep_their_values(values):
    text = ", ".join(map(repr, values))
    parsed = argument_list(text)
    assert parsed is not None
    call = ast.parse(f"g({parsed})", mode="eval").body
    assert repr([ast.literal_eval(argument) for argument in call.args]) == repr(values)
    assert argument_list(parsed) == parsed


@given(LITERALS)
def test_literals_keep_their_values(value):
    parsed = literal_text(repr(value))
    assert parsed is not None
    assert repr(ast.literal_eval(parsed)) == repr(value)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("3,[1,2]", "3, [1, 2]"),
        ('"a"', "'a'"),
        ("(1, 2)", "(1, 2)"),
        ("1,\n2,\n", "1, 2"),
        ("1 # the first", "1"),
        ("set()", "set()"),
        ("{2, 1, 2}", "{1, 2}"),
        ("{'b': 0x10, 'a': -0.0}", "{'b': 16, 'a': -0.0}"),
        ("1 + 2j, b'a'", "(1+2j), b'a'"),
    ],
)
def test_an_argument_list_has_one_spelling(text, canonical):
    assert argument_list(text) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "1), (2",
        "1)(2",
        "1).x(2",
        "a=1",
        "*a",
        "**a",
        "x for x in y",
        "1) or f(5",
        "1 2",
        ")",
        "",
        "x",
        "g(1)",
        "1 + 1",
        "1], [2",
        "1e999",
    ],
)
def test_what_is_no_list_of_literal_arguments_is_refused(text):
    assert argument_list(text) is None


@pytest.mark.parametrize(
    "text", ["", " ", "1), (2", "x = 1", "1; 2", "a:", "1\n2", "hello", "f(1)", "[x]", "{1: [2]}.get(1)"]
)
def test_what_is_not_one_literal_is_refused(text):
    assert literal_text(text) is None


@given(st.lists(LITERALS, min_size=1, max_size=3))
def test_what_is_well_formed_here_is_what_the_verifier_reads(values):
    text = argument_list(", ".join(map(repr, values)))
    assert text is not None
    assert repr(parse_arguments(text)) == repr(tuple(values))
    assert literal_text(repr(values)) == canonical(values, as_written=True)


def test_the_length_of_a_value_is_no_matter_of_form():
    long = repr("x" * 9000)
    assert (argument_list(long), literal_text(long)) == (long, long)


def test_normalisation_forgets_layout_and_keeps_names():
    one = "def f(a):  # comment\n\n    return (a+1)\n"
    two = "def f( a ):\n\treturn a + 1"
    assert normalised(one) == normalised(two)
    assert normalised(one) != normalised(two.replace("a", "b"))
    assert normalised("def f(s): return 'x'") == normalised('def f(s):\n  return "x"')
    assert normalised("  not python  ") == "not python"


@given(st.sampled_from(["def f(a):\n    return a\n", "class C:\n    x = 1\n\ndef f(a):\n    return C.x + a\n"]))
def test_normalisation_is_idempotent(program):
    assert normalised(normalised(program)) == normalised(program)


def test_helpers_and_classes_beside_the_entry_are_allowed():
    assert defines_entry(
        "import math\n\nclass A:\n    def m(self): pass\n\ndef g(x): return x\n\ndef f(a): return g(a)"
    )
    assert not defines_entry("def g(a): return a")
    assert not defines_entry("class A:\n    def f(self): return 1")
    assert not defines_entry("def f(a) return a")


def test_a_wrong_escape_is_no_warning(recwarn):
    assert parse_source("def f(a):\n    return '\\d'") is not None
    assert not recwarn.list
