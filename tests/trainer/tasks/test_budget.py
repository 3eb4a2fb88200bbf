"""No prompt is longer than the limit, whatever teachers have written, and what fits stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_families import FAMILIES

from populora_trainer.nano.tokenizer import build_tokenizer
from populora_trainer.tasks.budget import proposal_prompt, shortest_limit
from populora_trainer.tasks.buffer import IDENTITY
from populora_trainer.tasks.problem import TASK_TYPES, Problem
from populora_trainer.tasks.templates import template_for

FOR_ALL = {"qwen": FAMILIES["qwen"], "mistral": FAMILIES["mistral"], "nano": build_tokenizer}
REFERENCES = st.lists(
    st.builds(
        lambda name, program, given, output: Problem(
            "code_o", f"def f(x):\n    {name} = {'1' * program}\n    return x", ("2" * given,), ("3" * output,)
        ),
        st.sampled_from(["a", "b", "c"]),
        *[st.sampled_from([1, 30, 400, 3000])] * 3,
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module")
def tools():
    made = {name: make() for name, make in FOR_ALL.items()}
    return {name: (template_for(tokenizer, "file:///base"), tokenizer) for name, tokenizer in made.items()}


@pytest.mark.parametrize("family", FOR_ALL)
@given(references=REFERENCES, task=st.sampled_from(TASK_TYPES), room=st.sampled_from([0, 50, 600, 10**6]))
def test_a_prompt_keeps_its_limit_and_as_many_references_as_fit(tools, family, references, task, room):
    template, tokenizer = tools[family]
    limit = shortest_limit(template, tokenizer, [task])[0] + room
    kept, prompt = proposal_prompt(template, tokenizer, task, references, limit)
    assert len(prompt) <= limit
    assert prompt == template.encode(tokenizer, template.propose(task, kept))
    assert (kept, prompt) == proposal_prompt(template, tokenizer, task, references, limit)
    if kept == [IDENTITY]:
        alone = [template.encode(tokenizer, template.propose(task, [one])) for one in references]
        assert all(len(ids) > limit for ids in alone)
        return
    rest = iter(references)
    assert all(one in rest for one in kept), "the references are not in the order in which they were drawn"
    if len(kept) < len(references):
        assert len(template.encode(tokenizer, template.propose(task, references))) > limit


def test_the_shortest_limit_names_what_needs_it(tools):
    template, tokenizer = tools["nano"]
    long = Problem("code_i", "def f(x):\n    return x", ("1",), ("1" * 300,))
    assert shortest_limit(template, tokenizer, ["code_o", "code_f"])[1].startswith("the shortest prompt for a code_")
    needed, what = shortest_limit(template, tokenizer, ["code_o"], [IDENTITY, long])
    assert (what, needed > 150) == ("the longest held-out code_i problem", True)
