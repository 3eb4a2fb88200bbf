import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from populora_api.documents import MAX_VALUES, read_documents, read_value, show_path, write_yaml


def problems_of(text: str) -> list[str]:
    documents, problems = read_documents(text.encode(), "f")
    return [str(problem) for problem in [*problems, *(p for document in documents for p in document.problems)]]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # What sigs.k8s.io/yaml (go-yaml v2), and with it kubectl, makes of plain scalars.
        ("5e-5", 5e-5),
        ("1e3", 1000),
        ("5.0", 5),
        (".5", 0.5),
        ("-1", -1),
        ("+1", 1),
        ("1_000", 1000),
        ("0x1f", 31),
        ("0o17", 15),
        ("017", 15),
        ("0b11", 3),
        ("08", 8),
        ("yes", True),
        ("y", True),
        ("Off", False),
        ("n", False),
        ("TRUE", True),
        ("tRUE", "tRUE"),
        ("~", None),
        ("null", None),
        ("NULL", None),
        ("'4'", "4"),
        ('"yes"', "yes"),
        ("12:30:45", "12:30:45"),
        ("2026-01-31", "2026-01-31"),
        ("1.2.3", "1.2.3"),
        ("1e", "1e"),
        ("0x", "0x"),
        ("!!str 4", "4"),
        ("!!int '4'", 4),
        ("hf://Qwen/Qwen2.5-Coder-7B@main", "hf://Qwen/Qwen2.5-Coder-7B@main"),
        ("[a, 1, {b: 2}]", ["a", 1, {"b": 2}]),
        ("9223372036854775807", 2**63 - 1),
        ("9223372036854775808", float(2**63)),
    ],
)
def test_scalars_are_read_as_kubectl_reads_them(text, value):
    read = read_value(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", [".nan", ".inf", "-.Inf", "1e999", "9" * 5000, "0x" + "f" * 5000])
def test_a_number_that_json_cannot_say_is_refused(text):
    with pytest.raises(ValueError, match="is not allowed: a finite number"):
        read_value(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "f:3: a: given twice, first in line 1: once is allowed"),
        ("a:\n  b: {c: 1, c: 2}", "f:2: a.b.c: given twice, first in line 2: once is allowed"),
        ("a: &x [*x]", "f:1: a[0]: an alias inside its own anchor is not allowed"),
        ("a: !!python/object:os.system x", "f:1: a: 'x' with the tag !!python/object:os.system is not"),
        ("a: !mine {b: 1}", "f:1: a: the tag !mine is not allowed"),
        ("a: !!binary aGk=", "f:1: a: 'aGk=' with the tag !!binary is not allowed"),
        ("a: !!int four", "f:1: a: 'four' with the tag !!int is not allowed"),
        ("? [a]\n: 1", "f:1: a mapping or list as a field name is not allowed: text"),
        ('a: "\\ud800"', "f:1: a: half of a surrogate pair is not allowed: Unicode text"),
        ("a: 1\n b: 2", "f:2: this is no YAML: mapping values are not allowed here"),
        ("a:\n  - b\n  c: d", "f:3: this is no YAML: while parsing a block collection expected <block end>"),
        ("a: *x", "f:1: this is no YAML: found undefined alias 'x'"),
        ("a: @x", "f:1: this is no YAML: while scanning for the next token found character '@'"),
        ("a: \x07", "f:1: this is no YAML: a control character is not allowed"),
        ("\n" + "[" * 3000, "f:2: this is no YAML: it nests too deeply, at most 64 levels are allowed"),
        ("a:\n" + "- " * 66 + "b", "f:2: this is no YAML: it nests too deeply"),
        ("a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 70)), "f:1: this nests too deeply"),
        ("<<: 4\na: 1", "f:1: << takes a mapping or a list of mappings"),
    ],
)
def test_what_cannot_be_read_is_a_problem_with_its_line(text, problem):
    assert any(found.startswith(problem) for found in problems_of(text)), problems_of(text)


def test_an_alias_bomb_stops_at_a_limit():
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for level in range(1, 9):
        text += f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n"
    (problem,) = problems_of(text)
    assert f"more than {MAX_VALUES} values" in problem


def test_anchors_and_merge_keys_work_as_kubectl_has_them():
    (document,), problems = read_documents(b"a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]", "f")
    assert problems == []
    assert document.value == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": [{"x": 1, "y": 2}, {"x": 1, "y": 2}],
    }


def test_documents_before_an_error_are_kept_and_empty_ones_left_out():
    documents, problems = read_documents(b"a: 1\n---\n---\n# nothing\n---\nb: 2\n---\nc: [", "f")
    assert [document.value for document in documents] == [{"a": 1}, {"b": 2}]
    assert [document.line for document in documents] == [1, 6]
    assert len(problems) == 1


def test_a_byte_order_mark_and_windows_line_ends_are_read():
    (document,), problems = read_documents(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n", "f")
    assert (document.value, problems) == ({"a": 1, "b": 2}, [])
    assert document.where(("b",)) == "f:2"


def test_a_place_is_that_of_the_nearest_value_around_it():
    (document,), _ = read_documents(b"a:\n  b:\n    - c: 1\n    - d: 2\n", "f")
    assert document.where(("a", "b", 1, "d")) == "f:4"
    assert document.where(("a", "b", 1, "missing", "deeper")) == "f:4"
    assert document.where(("a", "b", 7)) == "f:2"
    assert document.where(()) == "f:1"


def test_paths_are_shown_as_kubernetes_shows_them():
    assert show_path(("spec", "operators", 0, "weight")) == "spec.operators[0].weight"
    assert show_path(("spec", "nodeSelector", "nvidia.com/gpu")) == "spec.nodeSelector[nvidia.com/gpu]"


text = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["1e3", "y", "N", "08", "0x", "~", "", "12:30", "2026-01-01", ".5", ".nan", "yes", "a: b", "- x", "#", "<<", "é"]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(text.filter(lambda key: key != "<<"), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
@example({"\x85": "next line"})
@example({"text": "a\x85b\u2028c\u2029d"})
def test_what_is_written_is_read_back(value):
    (document,), problems = read_documents(write_yaml({"value": value}).encode(), "f")
    assert problems == []
    assert document.problems == []
    assert _same(document.value["value"], value)


def _same(read, written):
    if isinstance(written, float) and not isinstance(read, bool):
        return isinstance(read, (int, float)) and math.isclose(read, written, rel_tol=0, abs_tol=0)
    if isinstance(written, list):
        return len(read) == len(written) and all(map(_same, read, written))
    if isinstance(written, dict):
        return read.keys() == written.keys() and all(_same(read[key], written[key]) for key in written)
    return type(read) is type(written) and read == written


@given(st.binary(max_size=200))
def test_no_bytes_make_it_raise(data):
    read_documents(data, "f")


@given(st.text(alphabet="ab:-[]{}&*!<>|?'\"#%@`,\n \t0.~", max_size=60))
def test_no_text_makes_it_raise(data):
    read_documents(data.encode(), "f")


def test_json_may_be_indented_by_tabs_as_kubectl_takes_it():
    documents, problems = read_documents(b'{\n\t"a": {\n\t\t"b": [1, "x"]\n\t}\n}\n', "run.json")
    assert (documents[0].value, problems) == ({"a": {"b": [1, "x"]}}, [])
    assert documents[0].where(("a", "b")) == "run.json:3"
    _, problems = read_documents(b"a:\n\tb: 1\n", "run.yaml")
    assert "this is no YAML" in problems[0].message
