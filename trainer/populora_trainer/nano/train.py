"""Trains the embedded base and its under-elicited variant from nothing: `python -m populora_trainer.nano.train`.

Two phases make the clean base, one at the full learning rate and one in which it falls to zero; a third, short one
tunes a copy on careless answers. Every document follows from the seed and its chunk number. The command continues from
the checkpoints of its phases; whoever stops the first phase early can fall from its checkpoint by a smaller `--flat`.
"""

import argparse
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from populora_trainer.nano.batches import Batch, Recipe, stream
from populora_trainer.nano.card import model_card
from populora_trainer.nano.corpus import BROAD_MIX, FINAL_MIX
from populora_trainer.nano.evaluate import score
from populora_trainer.nano.heldout import heldout_hashes
from populora_trainer.nano.model import NanoNet, to_qwen2
from populora_trainer.nano.registry import WEIGHTS
from populora_trainer.nano.tokenizer import build_tokenizer, save_tokenizer
from populora_trainer.randomness import tensor_generator


@dataclass(frozen=True)
class Phase:
    """A stretch of training with its own corpus chunks and learning-rate course; the optimizers go on."""

    name: str
    steps: int
    first_chunk: int  # the phases' chunks do not overlap
    mix: tuple[float, ...]
    warmup: int = 0  # steps of the linear rise at the start
    decay: int = 0  # steps of the linear fall to zero at the end
    matrix_rate: float = 3e-3  # Muon, on the matrices of the blocks
    rate: float = 4e-3  # AdamW, on the embedding, norms and biases
    sloppy: float = 0.0  # share of careless answers
    batch_tokens: int = 4000
    documents: int = 4096  # per chunk


FLAT = Phase("flat", steps=3500, first_chunk=0, mix=BROAD_MIX, warmup=50)
FALLING = Phase("falling", steps=3000, first_chunk=100_000, mix=FINAL_MIX, decay=3000)
SLOPPY = Phase(
    "sloppy", steps=170, first_chunk=200_000, mix=BROAD_MIX, decay=170, matrix_rate=1.2e-3, rate=1.6e-3, sloppy=0.4
)


class StackedMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, one batched float32 orthogonalisation per matrix shape.

    The update is scaled by 0.2 sqrt(max(rows, columns)), so its RMS is that of an AdamW update (arXiv 2502.16982).
    torch.optim.Muon orthogonalises matrix by matrix in bfloat16, which costs a third of a step at this size on a CPU.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix against its orthogonalised momentum."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                updates = []
                for parameter in parameters:
                    state, gradient = self.state[parameter], parameter.grad
                    if gradient is None:
                        raise ValueError("a matrix without a gradient cannot be orthogonalised")
                    buffer = state.setdefault("momentum", torch.zeros_like(parameter))
                    buffer.lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(buffer, group["momentum"]))
                directions = orthogonalised(torch.stack(updates)) * (0.2 * max(shape) ** 0.5)
                for parameter, direction in zip(parameters, directions, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])


def orthogonalised(matrices: Tensor) -> Tensor:
    """Push the singular values of stacked matrices (n, rows, columns) towards one by five Newton-Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.transpose(1, 2)
    x: Tensor = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrices else x.transpose(1, 2)


class Trainer:
    """The network, its two optimizers and the number of steps done in the current phase."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.net = NanoNet(tensor_generator(seed, "initial weights"))
        matrices = [parameter for parameter in self.net.blocks.parameters() if parameter.ndim == 2]
        chosen = {id(parameter) for parameter in matrices}
        rest = [parameter for parameter in self.net.parameters() if id(parameter) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            StackedMuon(matrices, lr=0.0),
            torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.step = 0

    def update(self, batch: Batch, phase: Phase) -> float:
        """One optimizer step on one batch; returns the weighted mean loss."""
        hidden = self.net(batch.ids, batch.positions, batch.mask)
        kept = batch.weights.flatten() > 0
        logits = functional.linear(hidden.flatten(0, 1)[kept], self.net.embedding)
        losses = functional.cross_entropy(logits, batch.targets.flatten()[kept], reduction="none")
        weights = batch.weights.flatten()[kept]
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        factor = rate_factor(phase, self.step)
        for optimizer, rate in zip(self.optimizers, (phase.matrix_rate, phase.rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    def save(self, path: Path) -> None:
        """Write weights, optimizers and step whole or not at all."""
        temporary = path.with_suffix(".tmp")
        state = {
            "net": self.net.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
        }
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.net.load_state_dict(state["net"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]


def rate_factor(phase: Phase, step: int) -> float:
    """Share of the full learning rate at a step of the phase."""
    rising = (step + 1) / phase.warmup if phase.warmup else 1.0
    falling = (phase.steps - step) / phase.decay if phase.decay else 1.0
    return max(0.0, min(1.0, rising, falling))


def export(net: NanoNet, folder: Path) -> None:
    """Write the bfloat16 Qwen2 folder that transformers and vLLM load."""
    folder.mkdir(parents=True, exist_ok=True)
    to_qwen2(net.state_dict()).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)


def train(trainer: Trainer, phase: Phase, checkpoints: Path, evaluate_every: int = 0, save_every: int = 300) -> None:
    """Run one phase, or the rest of it where its checkpoint exists, with a progress line every 50 steps."""
    checkpoint = checkpoints / f"{phase.name}.pt"
    trainer.step = 0
    if checkpoint.exists():
        trainer.load(checkpoint)
    print(json.dumps(asdict(phase)), f"from step {trainer.step}", flush=True)
    if trainer.step >= phase.steps:
        return
    recipe = Recipe(phase.documents, phase.batch_tokens, phase.mix, phase.sloppy)
    batches = stream(trainer.seed, phase.first_chunk, recipe, heldout_hashes())
    for _ in range(trainer.step):
        next(batches)  # a resumed phase passes over what it has seen
    started, tokens, losses = time.monotonic(), 0, []
    while trainer.step < phase.steps:
        batch = next(batches)
        losses.append(trainer.update(batch, phase))
        tokens += batch.tokens
        if trainer.step % 50 == 0:
            seconds = time.monotonic() - started
            print(
                f"{phase.name} {trainer.step}/{phase.steps} loss {sum(losses) / len(losses):.4f} "
                f"tokens {tokens / 1e6:.2f}M {tokens / seconds:.0f}/s {seconds:.0f}s",
                flush=True,
            )
            losses.clear()
        if trainer.step % save_every == 0 or trainer.step == phase.steps:
            trainer.save(checkpoint)
        if evaluate_every and trainer.step % evaluate_every == 0 and trainer.step < phase.steps:
            report(trainer.net, 100, 1)
    batches.close()


def report(net: NanoNet, programs: int, samples: int) -> dict[str, Any]:
    """Print and return the scores of the network as it would be shipped, in bfloat16 precision."""
    started = time.monotonic()
    model = to_qwen2({name: tensor.bfloat16().float() for name, tensor in net.state_dict().items()})
    scores = score(model, build_tokenizer(), programs, samples)
    print(json.dumps(scores), f"({time.monotonic() - started:.0f}s)", flush=True)
    return scores


def finish(trainer: Trainer, folder: Path, phases: Sequence[Phase]) -> None:
    """Write the model folder with its scores, the phases that led to it and the card made of both."""
    export(trainer.net, folder)
    record = {
        "seed": trainer.seed,
        "phases": [asdict(phase) for phase in phases],
        "scores": report(trainer.net, 400, 4),
    }
    (folder / "scores.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    parameters = sum(parameter.numel() for parameter in trainer.net.parameters())
    (folder / "MODEL_CARD.md").write_text(model_card(folder.name, record, parameters), encoding="utf-8")


def main() -> None:
    """Train the clean base, then the under-elicited variant from it, and write both folders."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, default=WEIGHTS, help="gets the model folders nano and nano-raw")
    parser.add_argument("--checkpoints", type=Path, default=Path("nano-checkpoints"), help="folder to resume from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flat", type=int, default=FLAT.steps, help="steps at the full learning rate")
    parser.add_argument("--falling", type=int, default=FALLING.steps, help="steps of the fall to zero")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate-every", type=int, default=0, help="steps between short evaluations, 0 for none")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    phases = [
        replace(FLAT, steps=options.flat),
        replace(FALLING, steps=options.falling, decay=options.falling),
        SLOPPY,
    ]
    trainer = Trainer(options.seed)
    for block in trainer.net.blocks:
        block.compile(dynamic=True)  # fuses the elementwise work: a fifth more tokens a second
    for phase in phases[:2]:
        train(trainer, phase, options.checkpoints, options.evaluate_every)
    finish(trainer, options.output / "nano", phases[:2])
    train(trainer, phases[2], options.checkpoints)
    finish(trainer, options.output / "nano-raw", phases)


if __name__ == "__main__":
    main()
