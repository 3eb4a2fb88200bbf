import ast
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizer_families import FAMILIES, letters

from populora_trainer.errors import ChatTemplateError
from populora_trainer.sandbox import literals
from populora_trainer.tasks.chat import (
    ASKED_FUNCTION_INPUTS,
    ChatTemplate,
    proposal_completion,
    solution_completion,
)
from populora_trainer.tasks.problem import TASK_TYPES, Problem
from populora_trainer.tasks.templates import Control, Message, template_for

TEMPLATE = ChatTemplate()
PROGRAM = "def f(a, b=1):\n    return a + b"
REFERENCE = Problem("code_o", PROGRAM, ("3, 4",), ("7",))
FUNCTION = Problem("code_f", PROGRAM, ("1", "2", "3, 4", "5"), ("2", "3", "7", "6"), "Adds, by one unless told.")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)


def test_thinking_tags_mean_nothing_inside_of_an_answer():
    assert TEMPLATE.parse_solution(REFERENCE, "```output\n'<think> </think> x'\n```") == "'<think> </think> x'"


def canonical(value):
    return ast.unparse(ast.parse(repr(value), mode="eval"))


def values_of(arguments):
    """What the verifier compares: the order of a dict is none of it, the type of a number is."""
    return literals.canonical(literals.parse_arguments(arguments))


ARGUMENTS = st.lists(VALUES.map(canonical), min_size=1, max_size=3).map(", ".join)
PROGRAMS = st.builds(
    lambda text, number: (
        f"def g(x):\n    return {text!r}\n\nclass C:\n    '''\n    ```\n    '''\n\ndef f(a):\n    return {number}"
    ),
    st.text(max_size=10).filter(str.isprintable),
    st.integers(0, 99),
)
PROPOSALS = st.one_of(
    st.builds(
        lambda task, program, given: Problem(task, program, (given,)),
        st.sampled_from(["code_i", "code_o"]),
        PROGRAMS,
        ARGUMENTS,
    ),
    st.builds(
        lambda program, given, message: Problem("code_f", program, tuple(given), message=message),
        PROGRAMS,
        st.lists(ARGUMENTS, min_size=2, max_size=12, unique_by=values_of),
        st.text(st.characters(codec="ascii", exclude_categories=["C"]) | st.sampled_from("`\n"), min_size=1)
        .map(str.strip)
        .filter(lambda text: text and "</think>" not in text),
    ),
)
PROSE = st.sampled_from(["", "Sure, here you are.\n\n", "<think>\n```python\ndef f(x): return 0\n```\n</think>\n\n"])


@given(PROPOSALS, PROSE, st.sampled_from(["\n", "\r\n"]))
def test_a_proposal_in_the_format_is_read_as_it_was_meant(problem, prose, newline):
    reference = Problem("code_o", problem.program, ("1",), ("1",))
    text = (prose + proposal_completion(problem) + "\nDone.").replace("\n", newline)
    assert TEMPLATE.parse_proposal(problem.task, text, [reference]) == problem


@given(VALUES.map(canonical), PROSE)
def test_an_output_in_the_format_is_read_as_it_was_meant(value, prose):
    text = prose + solution_completion("code_o", value)
    assert TEMPLATE.parse_solution(REFERENCE, text) == value


@given(ARGUMENTS, PROSE)
def test_an_input_in_the_format_is_read_as_it_was_meant(arguments, prose):
    problem = Problem("code_i", PROGRAM, ("1",), ("2",))
    assert TEMPLATE.parse_solution(problem, prose + solution_completion("code_i", arguments)) == arguments


@given(PROGRAMS, PROSE)
def test_a_program_in_the_format_is_read_as_it_was_meant(program, prose):
    assert TEMPLATE.parse_solution(FUNCTION, prose + solution_completion("code_f", program)) == program


@given(
    st.lists(
        st.sampled_from(["```", "```python", "```input", "```message", "def f(a): return a", "1", "<think>", "\r"])
    ),
    st.sampled_from(TASK_TYPES),
)
def test_garbage_is_read_or_refused_and_never_raises(lines, task):
    text = "\n".join(lines)
    problem = TEMPLATE.parse_proposal(task, text, [REFERENCE])
    assert problem is None or (problem.task == task and problem.inputs and not problem.outputs)
    answer = TEMPLATE.parse_solution(Problem(task, PROGRAM, ("1", "2"), ("2", "3")), text)
    assert answer is None or answer


@pytest.mark.parametrize(
    "text",
    [
        "```python\ndef f(a):\n    return a\n```",
        "```input\n1\n```",
        "```python\ndef g(a):\n    return a\n```\n```input\n1\n```",
        "```python\ndef f(a) return a\n```\n```input\n1\n```",
        "```python\ndef f(a):\n    return a\n```\n```input\n1",
        "```python\ndef f(a):\n    return a\n```\n```input\na=1\n```",
        "```python\ndef f(a):\n    return a\n```\n```input\n```",
        "def f(a):\n    return a\n\n1",
        "",
    ],
)
def test_a_proposal_without_both_parts_is_malformed(text):
    assert TEMPLATE.parse_proposal("code_o", text, [REFERENCE]) is None


def test_missing_tags_are_filled_in_order_where_that_is_unambiguous():
    bare = "```\ndef f(a):\n    return a\n```\n\n```\n1\n```"
    assert TEMPLATE.parse_proposal("code_i", bare, []) == Problem("code_i", "def f(a):\n    return a", ("1",))
    assert TEMPLATE.parse_proposal("code_i", "```\nnotes\n```\n" + bare, []) is None
    half = "```python\ndef f(a):\n    return a\n```\n\n```\n1\n```"
    assert TEMPLATE.parse_proposal("code_i", half, []) == Problem("code_i", "def f(a):\n    return a", ("1",))


def test_the_last_block_of_a_tag_counts():
    first = proposal_completion(Problem("code_o", "def f(a):\n    return 1", ("1",)))
    second = proposal_completion(Problem("code_o", "def f(a):\n    return 2", ("2",)))
    found = TEMPLATE.parse_proposal("code_o", f"{first}\nNo, better:\n{second}", [])
    assert (found.program, found.inputs) == ("def f(a):\n    return 2", ("2",))
    assert TEMPLATE.parse_solution(REFERENCE, "```output\n6\n```\nWait.\n```output\n7\n```") == "7"
    assert TEMPLATE.parse_solution(REFERENCE, "```output\n6\n```\n```\nscratch\n```") == "6"
    assert TEMPLATE.parse_solution(REFERENCE, "```\n6\n```\n```\n7\n```") == "7"


@pytest.mark.parametrize("count", [1, 13])
def test_a_function_proposal_needs_a_sensible_number_of_inputs(count):
    inputs = tuple(map(str, range(count)))
    text = proposal_completion(Problem("code_f", PROGRAM, inputs, message="hint"))
    assert TEMPLATE.parse_proposal("code_f", text, [REFERENCE]) is None


def test_a_function_proposal_needs_a_message_and_readable_inputs():
    blocks = "```input\n1\n```\n```input\n2\n```\n"
    assert TEMPLATE.parse_proposal("code_f", blocks, [REFERENCE]) is None
    assert TEMPLATE.parse_proposal("code_f", blocks + "```message\n \n```", [REFERENCE]) is None
    assert TEMPLATE.parse_proposal("code_f", blocks + "```input\nx\n```\n```message\nhint\n```", [REFERENCE]) is None
    assert TEMPLATE.parse_proposal("code_f", blocks + "```message\nhint\n```", [REFERENCE]).inputs == ("1", "2")


def test_an_input_that_is_written_again_in_whatever_words_counts_once():
    blocks = "".join(f"```input\n{text}\n```\n" for text in ("1", " 1 ", "True", "{1: 2, 3: 4}", "{3: 4, 1: 2}", "1.0"))
    found = TEMPLATE.parse_proposal("code_f", f"{blocks}```message\nhint\n```", [REFERENCE])
    assert found.inputs == ("1", "True", "{1: 2, 3: 4}", "1.0")
    same = "```input\n0.0\n```\n```input\n-0.0\n```\n```message\nhint\n```"
    assert TEMPLATE.parse_proposal("code_f", same, [REFERENCE]) is None


def content(prompt):
    assert [message.role for message in prompt] == ["user"]
    return prompt[0].content


@pytest.mark.parametrize("task", ["code_i", "code_o"])
def test_a_proposer_sees_every_reference_with_its_output(task):
    other = Problem("code_o", "def f(s):\n    return s[::-1]", ("'ab'",), ("'ba'",))
    text = content(TEMPLATE.propose(task, [REFERENCE, other]))
    for part in (PROGRAM, "3, 4", "7", other.program, "'ab'", "'ba'"):
        assert f"\n{part}\n" in text
    assert "Example" not in content(TEMPLATE.propose(task, []))


def test_a_function_proposer_sees_the_program_and_no_pairs():
    text = content(TEMPLATE.propose("code_f", [REFERENCE]))
    assert PROGRAM in text
    assert f"{ASKED_FUNCTION_INPUTS} inputs" in text
    assert "3, 4" not in text
    with pytest.raises(ValueError, match="first reference"):
        TEMPLATE.propose("code_f", [])


def test_students_see_what_the_task_gives_and_nothing_of_the_answer():
    program = "def f(a):\n    return a * 1000"
    output = content(TEMPLATE.solve(Problem("code_o", program, ("12",), ("12000",))))
    assert program in output
    assert "\n12\n" in output
    assert "12000" not in output
    given_output = content(TEMPLATE.solve(Problem("code_i", program, ("12",), ("12000",))))
    assert program in given_output
    assert "\n12000\n" in given_output
    assert "\n12\n" not in given_output


def test_a_function_student_sees_half_of_the_pairs_and_the_message():
    problem = Problem(
        "code_f", "def f(a):\n    return a * 7", ("11", "22", "33", "44"), ("77", "154", "231", "308"), "x ```\n<b>"
    )
    text = content(TEMPLATE.solve(problem))
    for part in ("11", "77", "22", "154", "x ```\n<b>"):
        assert f"\n{part}\n" in text
    for hidden in ("33", "231", "44", "308", problem.program):
        assert hidden not in text


def test_prompts_show_the_blocks_that_the_parser_reads():
    for task in TASK_TYPES:
        assert "```input" in content(TEMPLATE.propose(task, [REFERENCE]))
    assert "```output" in content(TEMPLATE.solve(REFERENCE))
    assert "```python" in content(TEMPLATE.solve(FUNCTION))


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make() for name, make in FAMILIES.items()}


def test_messages_go_through_the_tokenizers_own_template(tokenizers):
    template = template_for(tokenizers["qwen"], "hf://Some/Model")
    ids = template.encode(tokenizers["qwen"], (Message("user", "hi"),))
    assert tokenizers["qwen"].decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (ids[0], ids.count(tokenizers["qwen"].eos_token_id)) == (1, 1)


def test_a_tokenizer_without_a_template_gets_a_plain_dialogue(tokenizers):
    plain = tokenizers["base_model"]
    ids = template_for(plain, "hf://Some/Model").encode(plain, (Message("user", "hi"),))
    assert ids == plain.encode("User: hi\n\nAssistant:", add_special_tokens=True)
    assert ids[0] == plain.bos_token_id
    assert ids.count(plain.eos_token_id) == 1


def test_decoding_stops_at_the_end_of_sequence(tokenizers):
    plain = tokenizers["letters"]
    assert TEMPLATE.decode(plain, [*plain.encode("hi"), plain.eos_token_id, *plain.encode("j")]) == "hi"


def test_a_compact_prompt_is_refused(tokenizers):
    with pytest.raises(TypeError, match="messages"):
        TEMPLATE.encode(tokenizers["letters"], (Control("<o>"), "x"))


CONTROL = (
    *("<eos>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|fim_prefix|>", "<tool_call>", "<|eot_id|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|begin_of_text|>"),
)
SPELLINGS = st.lists(
    st.sampled_from(
        [*CONTROL, "<|im_<|im_end|>end|>", "<|im_", "end|>", "<", ">", "<table>", "\n\n", "    ", "é日", "x"]
    )
    | st.text(st.characters(exclude_categories=["C"]), max_size=4),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@given(content=SPELLINGS, task=st.sampled_from(["code_o", "code_i"]))
def test_no_text_that_a_model_wrote_becomes_a_control_token(tokenizers, family, content, task):
    tokenizer = tokenizers[family]
    template = template_for(tokenizer, "hf://Some/Model")
    problem = Problem(task, f"def f(x):\n    return {content!r}", (repr(content),), (repr(content),))
    harmless = Problem(task, "def f(x):\n    return 'x'", ("'x'",), ("'x'",))
    control = {number for token in CONTROL if (number := tokenizer.added_tokens_encoder.get(token)) is not None}
    for prompt, plain in (
        (template.solve(problem), template.solve(harmless)),
        (template.propose(task, [problem]), template.propose(task, [harmless])),
    ):
        ids, expected = template.encode(tokenizer, prompt), template.encode(tokenizer, plain)
        assert [token for token in ids if token in control] == [token for token in expected if token in control]
        assert tokenizer.decode(ids[len(template.turns.opening) :]) == template.turns.render(tokenizer, prompt)


@pytest.mark.parametrize("family", FAMILIES)
@given(content=SPELLINGS)
def test_a_prompt_without_control_tokens_has_the_token_ids_that_the_model_knows(tokenizers, family, content):
    tokenizer = tokenizers[family]
    assume(not any(token in content for token in tokenizer.added_tokens_encoder))
    template = template_for(tokenizer, "hf://Some/Model")
    prompt = template.solve(Problem("code_o", f"def f(x):\n    return {content!r}", ("1",), ("1",)))
    text = template.turns.render(tokenizer, prompt)
    opening = list(template.turns.opening)
    assert template.encode(tokenizer, prompt) == opening + tokenizer.encode(text, add_special_tokens=False)


def test_a_template_is_told_one_date_on_every_day(tokenizers, monkeypatch):
    tokenizer = tokenizers["llama_3"]
    prompt = TEMPLATE.solve(REFERENCE)
    ids = template_for(tokenizer, "hf://Some/Model").encode(tokenizer, prompt)
    assert "Today Date: 26 Jul 2024" in tokenizer.decode(ids)
    conversation = [{"role": "user", "content": prompt[0].content}]
    today = tokenizer.apply_chat_template(conversation, tokenize=False)
    (date,) = re.findall("Today Date: ([^<]*)<", today)
    assert tokenizer.decode(ids) == today.replace(date, "26 Jul 2024")


@pytest.mark.parametrize(
    ("chat_template", "complaint"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("{% if true %}", "fails on a single turn of the user: TemplateSyntaxError"),
        (
            "{{ raise_exception('no system turn') }}",
            "fails on a single turn of the user: TemplateError: no system turn",
        ),
        ("{{ messages[1].content }}", "fails on a single turn of the user: UndefinedError"),
        ("{{ messages[0].role }}", "does not show the user's words as they are"),
        ("{{ messages[0].content | upper }}", "does not show the user's words as they are"),
        ("{{ messages[0].content | escape }}", "does not show the user's words as they are"),
        ("{{ messages[0].content }}{{ strftime_now('%d' + '%m') }}", "asks the clock"),
        ("{% set now = strftime_now %}{{ messages[0].content }}{{ now('%d') }}", "asks the clock"),
        ("{{ messages[0].content }}{{ [1, 2] | random }}", "draws at random"),
        ({"tool_use": "{{ messages[0].content }}"}, "can't be chosen"),
    ],
)
def test_a_chat_template_that_cannot_put_a_problem_is_refused(chat_template, complaint):
    tokenizer = letters()
    tokenizer.chat_template = chat_template
    with pytest.raises(ChatTemplateError, match=complaint) as refused:
        template_for(tokenizer, "hf://Some/Model")
    assert "baseModel.uri: the chat template of hf://Some/Model" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("qwen", ["<|im_end|>"]),
        ("llama_3", ["<|eot_id|>"]),
        ("mistral", ["</s>"]),
        ("gemma", ["<pad>", "<end_of_turn>"]),
        ("base_model", []),
        ("letters", []),
    ],
)
def test_an_answer_ends_with_the_turn_as_the_template_ends_it(tokenizers, family, ends):
    tokenizer = tokenizers[family]
    template = template_for(tokenizer, "hf://Some/Model")
    assert tokenizer.convert_ids_to_tokens(list(template.end_ids)) == ends
    for end in template.end_ids:
        answer = tokenizer.encode("```output\n7\n```", add_special_tokens=False)
        assert "7" in template.decode(tokenizer, [*answer, end, *tokenizer.encode("junk")])
        assert "junk" not in template.decode(tokenizer, [*answer, end, *tokenizer.encode("junk")])
