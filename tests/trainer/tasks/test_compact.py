import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_families import letters

from populora_trainer.errors import PopuloraError
from populora_trainer.nano.tokenizer import build_tokenizer
from populora_trainer.sandbox import literals
from populora_trainer.tasks.compact import (
    SPECIAL_TOKENS,
    CompactTemplate,
    function_proposal_completion,
    proposal_completion,
)
from populora_trainer.tasks.problem import Problem
from populora_trainer.tasks.templates import Control, Message, template_for

PROGRAM = "def f(x, s):\n    return s * x"
TEMPLATE = CompactTemplate()
TOKENIZER = build_tokenizer()
REFERENCE = Problem("code_o", PROGRAM, ("2, 'ab'",), ("'abab'",))

values = st.recursive(
    st.integers() | st.text() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def without_tokens(text: str) -> bool:
    return "<" not in text


def test_prompts_are_the_documented_ones():
    function = Problem("code_f", PROGRAM, ("1, 'a'", "2, 'b'", "3, 'c'"), ("'a'", "'bb'", "'ccc'"), "repeat")
    assert "".join(TEMPLATE.solve(REFERENCE)) == f"<o>{PROGRAM}<in>2, 'ab'<out>"
    assert (
        "".join(TEMPLATE.solve(Problem("code_i", PROGRAM, ("2, 'ab'",), ("'abab'",)))) == f"<i>{PROGRAM}<out>'abab'<in>"
    )
    assert "".join(TEMPLATE.solve(function)) == "<f><in>1, 'a'<out>'a'<in>2, 'b'<out>'bb'<msg>repeat<prog>"
    assert "".join(TEMPLATE.propose("code_o", [REFERENCE])) == f"<po>{PROGRAM}<new>"
    assert "".join(TEMPLATE.propose("code_i", [REFERENCE])) == f"<pi>{PROGRAM}<new>"
    assert "".join(TEMPLATE.propose("code_f", [REFERENCE])) == f"<pf>{PROGRAM}<new>"


@given(st.lists(values, min_size=1, max_size=3).map(lambda one: ", ".join(map(repr, one))).filter(without_tokens))
def test_what_a_teacher_writes_is_what_is_parsed(arguments):
    for task in ("code_o", "code_i"):
        parsed = TEMPLATE.parse_proposal(task, proposal_completion(PROGRAM, arguments), [REFERENCE])
        assert parsed is not None
        assert (parsed.task, parsed.program, parsed.outputs) == (task, PROGRAM, ())
        assert eval(f"({parsed.inputs[0]},)") == eval(f"({arguments},)")


def value_of(text):
    """What the verifier compares: the order of a dict is none of it, the type of a number is."""
    return literals.canonical(literals.parse_arguments(text))


@given(st.lists(values.map(repr).filter(without_tokens), min_size=2, max_size=12, unique_by=value_of))
def test_a_function_proposal_keeps_every_input_and_the_message(inputs):
    parsed = TEMPLATE.parse_proposal("code_f", function_proposal_completion(inputs, "loop add"), [REFERENCE])
    assert parsed is not None
    assert (parsed.program, parsed.message, len(parsed.inputs)) == (PROGRAM, "loop add", len(inputs))
    again = TEMPLATE.parse_proposal("code_f", function_proposal_completion(parsed.inputs, "loop add"), [REFERENCE])
    assert again == parsed


@given(
    st.lists(st.sampled_from(["1", "True", "1.0", "0.0", "-0.0", "{1: 2, 3: 4}", "{3: 4, 1: 2}", "'a'"]), max_size=12)
)
def test_no_hidden_input_of_a_function_equals_another_whatever_is_written(inputs):
    parsed = TEMPLATE.parse_proposal("code_f", function_proposal_completion(inputs, "loop add"), [REFERENCE])
    different = {value_of(text) for text in inputs}
    if len(different) < 2:
        assert parsed is None
        return
    assert [value_of(text) for text in parsed.inputs] == list(dict.fromkeys(map(value_of, inputs)))
    shown, hidden = parsed.inputs[: parsed.shown], parsed.inputs[parsed.judged]
    assert {value_of(text) for text in shown}.isdisjoint(value_of(text) for text in hidden)
    assert len(shown) >= len(hidden) >= 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        PROGRAM,
        f"{PROGRAM}<in>",
        f"{PROGRAM}<in>1<in>2",
        f"{PROGRAM}<in>1) + g(2",
        f"{PROGRAM}<in>x=1",
        f"{PROGRAM}<in>*[1]",
        "def g(x):\n    return x<in>1",
        "def f(x:\n    return x<in>1",
        "<in>1",
    ],
)
def test_a_malformed_proposal_is_no_problem(text):
    assert TEMPLATE.parse_proposal("code_o", text, [REFERENCE]) is None


@pytest.mark.parametrize(
    "text",
    [
        "<in>1<msg>one input leaves none to hide",
        "<in>1<in> 1<in>1<msg>nor does one that is written three times",
        "<in>1<in>2",
        "1<in>2<in>3<msg>text before the inputs",
        "<in>1<in>2<msg>two<msg>messages",
        "<in>1<in>(<msg>not an argument list",
        "<in>1<in>2<msg>a <prog> inside the message",
        "<in>1" * 13 + "<msg>too many",
    ],
)
def test_a_malformed_function_proposal_is_no_problem(text):
    assert TEMPLATE.parse_proposal("code_f", text, [REFERENCE]) is None


@pytest.mark.parametrize(
    ("task", "text", "answer"),
    [
        ("code_o", "  [1,2]", "[1, 2]"),
        ("code_o", '"a"', "'a'"),
        ("code_o", "1 2", None),
        ("code_o", "", None),
        ("code_i", "3,'a'", "3, 'a'"),
        ("code_i", "(1, 2)", "(1, 2)"),
        ("code_i", "1)(2", None),
        ("code_f", PROGRAM, PROGRAM),
        ("code_f", "def g(x):\n    return x", None),
        ("code_f", "return 1", None),
    ],
)
def test_answers_are_read_as_canonical_text_or_as_malformed(task, text, answer):
    assert TEMPLATE.parse_solution(Problem(task, PROGRAM, ("1, 'a'",), ("'a'",)), text) == answer


def test_a_proposal_needs_a_reference():
    with pytest.raises(ValueError, match="reference"):
        TEMPLATE.propose("code_o", [])


def test_decoding_stops_at_the_end_token_and_keeps_the_format():
    tokenizer = build_tokenizer()
    ids = TEMPLATE.encode(tokenizer, (PROGRAM, Control("<in>"), "2, 'ab'", Control("<eos>"), "junk", Control("<eos>")))
    assert TEMPLATE.decode(tokenizer, ids) == f"{PROGRAM}<in>2, 'ab'"
    assert TEMPLATE.decode(tokenizer, []) == ""


@given(st.text(max_size=60))
def test_any_text_can_be_encoded(text):
    tokenizer = build_tokenizer()
    ids = TEMPLATE.encode(tokenizer, (text,))
    assert all(0 <= token < len(tokenizer) for token in ids)
    assert isinstance(TEMPLATE.decode(tokenizer, ids), str)


@given(
    st.lists(
        st.sampled_from([Control(token) for token in SPECIAL_TOKENS])
        | st.lists(st.sampled_from([*SPECIAL_TOKENS, "<", ">", "o", " ", "in>", "x"]), max_size=4).map("".join),
        max_size=8,
    )
)
def test_a_token_that_a_program_spells_is_text(parts):
    ids = TEMPLATE.encode(TOKENIZER, tuple(parts))
    special = set(TOKENIZER.convert_tokens_to_ids(list(SPECIAL_TOKENS)))
    written = [TOKENIZER.convert_tokens_to_ids(part) for part in parts if isinstance(part, Control)]
    assert [token for token in ids if token in special] == written
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "".join(parts)


def test_chat_messages_are_no_compact_prompt():
    with pytest.raises(TypeError, match="chat messages"):
        TEMPLATE.encode(build_tokenizer(), (Message("user", "hello"),))


def test_the_tokenizer_decides_which_templates_are_used():
    plain = letters()
    assert template_for(build_tokenizer(), "file://somewhere").name == "compact"
    assert template_for(plain, "hf://Some/Model").name == "chat"
    with pytest.raises(PopuloraError, match="<po>"):
        template_for(plain, "builtin://nano")
