import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from populora_trainer.nano.batches import chunk_batches, collate
from populora_trainer.nano.train import Settings, StackedMuon, Trainer, export, orthogonalised, train
from populora_trainer.randomness import tensor_generator

TINY = Settings(steps=6, warmup=2, decay=2, batch_tokens=600, documents=24)


def test_newton_schulz_brings_singular_values_near_one():
    matrices = torch.randn(3, 24, 60, generator=tensor_generator(0, "matrices"))
    for shaped in (matrices, matrices.transpose(1, 2)):
        values = torch.linalg.svdvals(orthogonalised(shaped))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_stacked_muon_agrees_with_torch():
    first = torch.nn.Parameter(torch.randn(16, 40, generator=tensor_generator(1, "weights")))
    second = torch.nn.Parameter(first.detach().clone())
    mine = StackedMuon([first], lr=0.02)
    theirs = torch.optim.Muon([second], lr=0.02, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        gradient = torch.randn(16, 40, generator=tensor_generator(step, "gradients"))
        first.grad, second.grad = gradient.clone(), gradient.clone()
        mine.step()
        theirs.step()
    torch.testing.assert_close(first, second, rtol=0.05, atol=4e-3)  # torch iterates in bfloat16


def test_the_rate_rises_stays_and_falls_to_almost_nothing():
    trainer = Trainer(Settings(steps=10, warmup=2, decay=4))
    factors = []
    for trainer.step in range(10):
        factors.append(trainer.factor())
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_training_lowers_the_loss():
    trainer = Trainer(Settings(steps=30, warmup=5, decay=10))
    batch = collate(chunk_batches(0, 0, 24, 2000, frozenset())[0])
    losses = [trainer.update(batch) for _ in range(30)]
    assert losses[-1] < losses[0] / 2


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    whole = Trainer(TINY)
    train(whole, tmp_path / "whole.pt", evaluate_every=0, save_every=100)
    part = Trainer(TINY)
    for batch in chunk_batches(TINY.seed, 0, TINY.documents, TINY.batch_tokens, heldout())[:3]:
        part.update(collate(batch))
    part.save(tmp_path / "part.pt")
    resumed = Trainer(TINY)
    resumed.load(tmp_path / "part.pt")
    train(resumed, tmp_path / "resumed.pt", evaluate_every=0, save_every=100)
    assert resumed.step == whole.step == 6
    for name, tensor in whole.net.state_dict().items():
        torch.testing.assert_close(resumed.net.state_dict()[name], tensor, rtol=0, atol=0)


def heldout():
    from populora_trainer.nano.heldout import heldout_hashes

    return heldout_hashes()


def test_an_exported_folder_holds_the_weights_in_bfloat16(tmp_path):
    net = copy.deepcopy(Trainer(TINY).net)
    export(net, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    torch.testing.assert_close(loaded.model.embed_tokens.weight, net.embedding.detach().bfloat16(), rtol=0, atol=0)
