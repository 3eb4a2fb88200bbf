import pytest
import torch
from torch.nn import functional

from populora_trainer.nano.batches import collate, encode_document
from populora_trainer.nano.corpus import Branch, Document
from populora_trainer.nano.model import HEAD_SIZE, NanoNet, to_qwen2
from populora_trainer.nano.tokenizer import Lexer
from populora_trainer.randomness import tensor_generator


@pytest.fixture
def net():
    net = NanoNet(tensor_generator(0, "test"))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=tensor_generator(number, "test")), alpha=0.05)
    return net


@torch.no_grad()
def test_the_exported_model_gives_the_same_logits(net):
    document = Document("<o>def f(x, s):\n    return s * x", (Branch("<in>2, 'ab'<out>", "'abab'<eos>"),))
    batch = collate([encode_document(document, Lexer())])
    mine = functional.linear(net(batch.ids, batch.positions, batch.mask), net.embedding)
    exported = to_qwen2(net.state_dict())(input_ids=batch.ids).logits
    torch.testing.assert_close(exported, mine, rtol=1e-4, atol=1e-4)
    assert mine.std() > 0.1


def test_the_architecture_is_one_that_a_server_supports(net):
    config = to_qwen2(net.state_dict()).config
    assert config.model_type == "qwen2"
    assert config.hidden_size // config.num_attention_heads == HEAD_SIZE == 64
    assert 1_000_000 <= sum(parameter.numel() for parameter in net.parameters()) <= 2_000_000


def test_the_same_generator_draws_the_same_weights():
    first, second = (NanoNet(tensor_generator(4, "weights")).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
