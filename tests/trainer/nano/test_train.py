import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from populora_trainer.nano.batches import Recipe, chunk_batches, collate
from populora_trainer.nano.corpus import BROAD_MIX
from populora_trainer.nano.heldout import heldout_hashes
from populora_trainer.nano.registry import builtin_folder
from populora_trainer.nano.train import (
    FALLING,
    FLAT,
    SLOPPY,
    Phase,
    StackedMuon,
    Trainer,
    export,
    orthogonalised,
    rate_factor,
    train,
)
from populora_trainer.randomness import tensor_generator

TINY = Phase("tiny", steps=6, first_chunk=0, mix=BROAD_MIX, warmup=2, decay=2, batch_tokens=600, documents=24)


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
    phase = replace(TINY, steps=10, warmup=2, decay=4)
    factors = [rate_factor(phase, step) for step in range(10)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_training_lowers_the_loss():
    trainer = Trainer(0)
    phase = replace(TINY, steps=12, warmup=2, decay=4)
    batch = collate(chunk_batches(0, 0, Recipe(8, 800, BROAD_MIX), frozenset())[0])
    losses = [trainer.update(batch, phase) for _ in range(12)]
    assert losses[-1] < losses[0] / 2


def test_a_resumed_phase_ends_with_the_same_weights(tmp_path):
    whole, part, resumed = Trainer(0), Trainer(0), Trainer(0)
    (tmp_path / "whole").mkdir()
    train(whole, TINY, tmp_path / "whole")
    recipe = Recipe(TINY.documents, TINY.batch_tokens, TINY.mix)
    for batch in chunk_batches(0, 0, recipe, heldout_hashes())[:3]:
        part.update(collate(batch), TINY)
    part.save(tmp_path / "tiny.pt")
    train(resumed, TINY, tmp_path)
    assert resumed.step == whole.step == 6
    for name, tensor in whole.net.state_dict().items():
        torch.testing.assert_close(resumed.net.state_dict()[name], tensor, rtol=0, atol=0)


def test_an_exported_folder_holds_the_weights_in_bfloat16(tmp_path):
    net = Trainer(0).net
    export(net, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    torch.testing.assert_close(loaded.model.embed_tokens.weight, net.embedding.detach().bfloat16(), rtol=0, atol=0)


def test_the_shipped_weights_say_which_phases_made_them():
    for name, phases in (("nano", [FLAT, FALLING]), ("nano-raw", [FLAT, FALLING, SLOPPY])):
        recorded = json.loads((builtin_folder(name) / "scores.json").read_text())
        assert [Phase(**{**one, "mix": tuple(one["mix"])}) for one in recorded["phases"]] == phases
        assert recorded["seed"] == 0
