import ast
import hashlib
import random
import re
from collections import Counter

import pytest

from populora_trainer.nano.corpus import BROAD_MIX, FINAL_MIX, IDENTITY, CorpusGenerator, chunk, message_of
from populora_trainer.nano.heldout import heldout_hashes
from populora_trainer.nano.tokenizer import HINT_WORDS, Lexer
from populora_trainer.tasks.compact import EOS, SPECIAL_TOKENS, UNKNOWN, CompactTemplate
from populora_trainer.tasks.held_out import normalised_hash
from populora_trainer.tasks.problem import Problem

TEMPLATE = CompactTemplate()
SPECIAL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
DOCUMENTS = chunk(0, 5, 600, heldout_hashes())


def programs(document):
    """Every program that occurs anywhere in a document."""
    texts = [document.prefix, *(text for branch in document.branches for text in (branch.question, branch.answer))]
    pieces = [piece for text in texts for piece in SPECIAL.split(text)]
    return [piece for piece in pieces if piece.startswith("def f(")]


def run(source, arguments):
    names = {}
    exec(source, names)
    return repr(eval(f"f({arguments})", names))


def test_a_chunk_follows_from_seed_and_number_alone():
    assert chunk(0, 5, 600, heldout_hashes()) == DOCUMENTS
    assert chunk(0, 6, 50, heldout_hashes()) != DOCUMENTS[:50]
    assert chunk(1, 5, 50, heldout_hashes()) != DOCUMENTS[:50]


@pytest.mark.parametrize(
    ("mix", "digest"),
    [(BROAD_MIX, "bbeeba309c1971c92fba43d271a15d3a"), (FINAL_MIX, "fafc959c2655651eb2abc5e473cdadb4")],
)
def test_the_corpus_is_the_one_behind_the_shipped_weights(mix, digest):
    text = repr(chunk(0, 0, 200, heldout_hashes(), mix))
    assert hashlib.sha256(text.encode()).hexdigest()[:32] == digest


def test_no_held_out_program_occurs_in_any_place():
    found = [normalised_hash(program) for document in DOCUMENTS for program in programs(document)]
    assert len(found) > 500
    assert not heldout_hashes() & set(found)


def test_the_identity_program_which_proposals_start_from_is_not_held_out():
    assert any(document.prefix == f"<po>{IDENTITY}<new>" for document in DOCUMENTS)
    assert normalised_hash(IDENTITY) not in heldout_hashes()


def test_the_shown_pairs_of_a_function_differ_where_they_can():
    shown = [document.prefix.split("<msg>")[0] for document in DOCUMENTS if document.prefix.startswith("<f>")]
    outputs = [[pair.split("<out>")[1] for pair in text.split("<in>")[1:]] for text in shown]
    assert all(len(pairs) in (2, 3) for pairs in outputs)
    assert sum(len(set(pairs)) > 1 for pairs in outputs) == len(outputs)


def test_held_out_programs_would_occur_if_they_were_not_rejected():
    free = [normalised_hash(one) for document in chunk(0, 5, 600, ()) for one in programs(document)]
    assert heldout_hashes() & set(free)


def test_every_answer_is_right_and_stands_in_the_form_in_which_it_is_asked():
    kinds = Counter()
    for document in DOCUMENTS:
        token = document.prefix[: document.prefix.index(">") + 1]
        kinds[token] += 1
        for branch in document.branches:
            prompt, answer = document.prefix + branch.question, branch.answer.removesuffix(EOS)
            assert branch.answer.endswith(EOS)
            if token == "<o>":
                program, arguments = prompt.removeprefix("<o>").removesuffix("<out>").split("<in>")
                problem = Problem("code_o", program, (arguments,), (answer,))
                assert "".join(TEMPLATE.solve(problem)) == prompt
                assert run(program, arguments) == answer == TEMPLATE.parse_solution(problem, answer)
            elif token == "<i>":
                program, output = prompt.removeprefix("<i>").removesuffix("<in>").split("<out>")
                problem = Problem("code_i", program, (answer,), (output,))
                assert "".join(TEMPLATE.solve(problem)) == prompt
                assert run(program, answer) == output
            elif token == "<f>":
                pairs = [pair.split("<out>") for pair in prompt.split("<msg>")[0].split("<in>")[1:]]
                assert all(run(answer, arguments) == output for arguments, output in pairs)
            elif token in ("<po>", "<pi>"):
                reference = Problem("code_o", document.prefix[4:].removesuffix("<new>"), ("1",))
                task = "code_o" if token == "<po>" else "code_i"
                proposal = TEMPLATE.parse_proposal(task, answer, [reference])
                assert "".join(TEMPLATE.propose(task, [reference])) == prompt
                assert proposal is not None
                run(proposal.program, proposal.inputs[0])
            else:
                program = document.prefix.removeprefix("<pf>").removesuffix("<new>")
                proposal = TEMPLATE.parse_proposal("code_f", answer, [Problem("code_f", program, ("1",))])
                assert proposal is not None
                assert len(proposal.inputs) >= 4
                for arguments in proposal.inputs:
                    run(program, arguments)
    assert set(kinds) == {"<o>", "<i>", "<f>", "<po>", "<pi>", "<pf>"}


def test_the_vocabulary_covers_the_corpus():
    lexer = Lexer()
    for document in DOCUMENTS[:200]:
        text = document.prefix + "".join(branch.question + branch.answer for branch in document.branches)
        assert lexer.ids[UNKNOWN] not in lexer.encode(text)


def test_sloppy_answers_are_wrong_about_as_often_as_asked():
    wrong = total = 0
    for document in chunk(0, 9, 400, heldout_hashes(), BROAD_MIX, 0.4):
        if document.prefix.startswith("<o>"):
            for branch in document.branches:
                arguments = branch.question.removeprefix("<in>").removesuffix("<out>")
                total += 1
                wrong += run(document.prefix[3:], arguments) != branch.answer.removesuffix(EOS)
    assert 0.2 < wrong / total < 0.45


def test_drills_are_short_arithmetic_with_many_pairs():
    generator = CorpusGenerator(random.Random(0), frozenset())
    for document in (generator.drill() for _ in range(50)):
        assert document.prefix.count("\n") <= 2
        assert any(sign in document.prefix for sign in "+-*")
        assert len(document.branches) >= 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(x):\n    return x + 1", "add"),
        ("def f(v):\n    return sorted(v)[::-1]", "reverse sorted"),
        (
            "def f(v):\n    r = 0\n    for i in v:\n        if i % 2 == 0:\n            r += i\n    return r",
            "loop if add mod",
        ),
        ("def f(x):\n    return x", ""),
    ],
)
def test_a_message_names_what_the_syntax_tree_shows(source, message):
    assert sorted(message_of(source).split()) == sorted(message.split())
    assert set(message_of(source).split()) <= set(HINT_WORDS)
    assert set(message_of(source, random.Random(0)).split()) <= set(message.split())
    assert not any(token in message_of(source) for token in SPECIAL_TOKENS)
    ast.parse(source)
