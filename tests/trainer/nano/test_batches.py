import torch

from populora_trainer.nano.batches import Recipe, chunk_batches, collate, encode_document
from populora_trainer.nano.corpus import BROAD_MIX, Branch, Document, chunk
from populora_trainer.nano.model import NanoNet
from populora_trainer.nano.tokenizer import Lexer
from populora_trainer.randomness import tensor_generator

LEXER = Lexer()
PREFIX = "<o>def f(x):\n    return x + 3"
BRANCHES = (Branch("<in>5<out>", "8<eos>"), Branch("<in>12<out>", "15<eos>"))


def trained_looking_net() -> NanoNet:
    net = NanoNet(tensor_generator(0, "test"))
    with torch.no_grad():
        for parameter in net.blocks.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=tensor_generator(1, "test")), alpha=0.1)
    return net.eval()


@torch.no_grad()
def test_a_branch_gives_the_same_states_as_the_same_text_alone():
    net = trained_looking_net()
    packed = collate([encode_document(Document(PREFIX, BRANCHES), LEXER)])
    together = net(packed.ids, packed.positions, packed.mask)[0]
    start = len(LEXER.encode(PREFIX))
    for branch in BRANCHES:
        alone = collate([encode_document(Document(PREFIX, (branch,)), LEXER)])
        states = net(alone.ids, alone.positions, alone.mask)[0]
        length = len(LEXER.encode(branch.question + branch.answer))
        torch.testing.assert_close(together[start : start + length], states[-length:], rtol=1e-5, atol=1e-5)
        start += length


def test_only_answers_weigh_fully_and_no_branch_predicts_its_sibling():
    encoded = encode_document(Document(PREFIX, BRANCHES), LEXER)
    text = list(LEXER.ids)
    rows = zip(encoded.ids, encoded.targets, encoded.weights, strict=True)
    full = [(text[token], text[target]) for token, target, weight in rows if weight == 1]
    assert full == [("<out>", "8"), ("8", "<eos>"), ("<out>", "15"), ("15", "<eos>")]
    ends = [weight for token, weight in zip(encoded.ids, encoded.weights, strict=True) if text[token] == "<eos>"]
    assert ends == [0, 0]


def test_a_completion_without_a_question_is_weighed_from_its_first_token():
    branch = Branch("", "def f(y):\n    return y<in>1<eos>")
    encoded = encode_document(Document("<po>def f(x):\n    return x<new>", (branch,)), LEXER)
    first = list(encoded.ids).index(LEXER.ids["<new>"])
    assert encoded.weights[first] == 1
    assert encoded.targets[first] == LEXER.ids["def f("]


def test_a_chunk_becomes_batches_under_the_limit_without_losing_a_document():
    batches = chunk_batches(0, 2, Recipe(200, 1500, BROAD_MIX), frozenset())
    assert sum(map(len, batches)) == 200
    assert all(collate(batch).ids.numel() <= 1500 for batch in batches)
    expected = sorted(tuple(encode_document(one, LEXER).ids) for one in chunk(0, 2, 200, frozenset()))
    assert sorted(tuple(one.ids) for batch in batches for one in batch) == expected


def test_padding_is_never_seen():
    short, long = (encode_document(Document(PREFIX, BRANCHES[:count]), LEXER) for count in (1, 2))
    batch = collate([short, long])
    assert not batch.mask[0, : len(short.ids), len(short.ids) :].any()
    assert batch.weights[0, len(short.ids) :].sum() == 0
    assert batch.tokens == len(short.ids) + len(long.ids)
