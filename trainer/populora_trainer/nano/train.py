"""Trains the embedded base and its under-elicited variant from nothing: `python -m populora_trainer.nano.train`.

The schedule is a trapezoid: warm-up, a flat part, a linear decay to zero. The flat part does not depend on the number
of steps, so a run that was cut off there ends with settled weights when it is started again with fewer `--steps` over
its checkpoints. Every document follows from the seed and its chunk number.
"""

import argparse
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from populora_trainer.nano.batches import Batch, stream
from populora_trainer.nano.evaluate import score
from populora_trainer.nano.heldout import heldout_hashes
from populora_trainer.nano.model import NanoNet, to_qwen2
from populora_trainer.nano.registry import WEIGHTS
from populora_trainer.nano.tokenizer import build_tokenizer, save_tokenizer
from populora_trainer.randomness import tensor_generator

SLOPPY_CHUNK = 1_000_000  # chunks of the under-elicited variant, far from those of pretraining


@dataclass(frozen=True)
class Settings:
    """One training run; the defaults made the shipped weights."""

    seed: int = 0
    steps: int = 5200
    warmup: int = 50
    decay: int = 2200  # steps of the linear decay at the end
    matrix_rate: float = 3e-3  # Muon, on the matrices of the blocks
    rate: float = 4e-3  # AdamW, on the embedding, norms and biases
    batch_tokens: int = 4000
    documents: int = 4096  # per chunk
    sloppy: float = 0.0  # share of careless answers
    first_chunk: int = 0


CLEAN = Settings()
RAW = replace(
    CLEAN, steps=170, warmup=5, decay=170, matrix_rate=1.2e-3, rate=1.6e-3, sloppy=0.4, first_chunk=SLOPPY_CHUNK
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
                    state = self.state[parameter]
                    buffer = state.setdefault("momentum", torch.zeros_like(parameter))
                    buffer.lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(buffer, group["momentum"]))
                directions = orthogonalised(torch.stack(updates)) * (0.2 * max(shape) ** 0.5)
                for parameter, direction in zip(parameters, directions, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])


def orthogonalised(matrices: Tensor) -> Tensor:
    """Push the singular values of stacked matrices (n, rows, columns) towards one by five Newton-Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.transpose(1, 2)
    x = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrices else x.transpose(1, 2)


class Trainer:
    """The network, its two optimizers and the step count."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.net = NanoNet(tensor_generator(settings.seed, "initial weights"))
        matrices = [parameter for parameter in self.net.blocks.parameters() if parameter.ndim == 2]
        chosen = {id(parameter) for parameter in matrices}
        rest = [parameter for parameter in self.net.parameters() if id(parameter) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            StackedMuon(matrices, lr=settings.matrix_rate),
            torch.optim.AdamW(rest, lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.rates = [settings.matrix_rate, settings.rate]
        self.step = 0

    def factor(self) -> float:
        """Share of the full learning rate at this step."""
        settings = self.settings
        rising = (self.step + 1) / settings.warmup if settings.warmup else 1.0
        falling = (settings.steps - self.step) / settings.decay if settings.decay else 1.0
        return max(0.0, min(1.0, rising, falling))

    def update(self, batch: Batch) -> float:
        """One optimizer step on one batch; returns the weighted mean loss."""
        hidden = self.net(batch.ids, batch.positions, batch.mask)
        kept = batch.weights.flatten() > 0
        logits = functional.linear(hidden.flatten(0, 1)[kept], self.net.embedding)
        losses = functional.cross_entropy(logits, batch.targets.flatten()[kept], reduction="none")
        weights = batch.weights.flatten()[kept]
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        factor = self.factor()
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
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

    def load(self, path: Path, *, optimizers: bool = True) -> None:
        """Continue from a checkpoint, or start from its weights only."""
        state = torch.load(path, weights_only=True)
        self.net.load_state_dict(state["net"])
        if optimizers:
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step = state["step"]


def export(net: NanoNet, folder: Path) -> None:
    """Write the bfloat16 Qwen2 folder that transformers and vLLM load."""
    folder.mkdir(parents=True, exist_ok=True)
    to_qwen2(net.state_dict()).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)


def train(trainer: Trainer, checkpoint: Path, evaluate_every: int, save_every: int) -> None:
    """Run the remaining steps with a progress line every 50, a checkpoint and a short evaluation now and then."""
    settings = trainer.settings
    if trainer.step >= settings.steps:
        return
    batches = stream(
        settings.seed,
        settings.first_chunk,
        settings.documents,
        settings.batch_tokens,
        heldout_hashes(),
        settings.sloppy,
    )
    for _ in range(trainer.step):
        next(batches)  # a resumed run passes over what it has seen
    started, tokens, losses = time.monotonic(), 0, []
    while trainer.step < settings.steps:
        batch = next(batches)
        losses.append(trainer.update(batch))
        tokens += batch.tokens
        if trainer.step % 50 == 0:
            seconds = time.monotonic() - started
            print(
                f"step {trainer.step}/{settings.steps} loss {sum(losses) / len(losses):.4f} "
                f"tokens {tokens / 1e6:.2f}M {tokens / seconds:.0f}/s {seconds:.0f}s",
                flush=True,
            )
            losses.clear()
        if trainer.step % save_every == 0 or trainer.step == settings.steps:
            trainer.save(checkpoint)
        if evaluate_every and trainer.step % evaluate_every == 0 and trainer.step < settings.steps:
            report(trainer.net, 100, 1)
    batches.close()


def report(net: NanoNet, programs: int, samples: int) -> dict[str, object]:
    """Print and return the scores of the network as it is."""
    started = time.monotonic()
    scores = score(to_qwen2(net.state_dict()), build_tokenizer(), programs, samples)
    print(json.dumps(scores), f"({time.monotonic() - started:.0f}s)", flush=True)
    return scores


def main() -> None:
    """Train the clean base, then the under-elicited variant from it, and write both folders."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, default=WEIGHTS, help="gets the model folders nano and nano-raw")
    parser.add_argument("--checkpoints", type=Path, default=Path("nano-checkpoints"), help="folder to resume from")
    parser.add_argument("--seed", type=int, default=CLEAN.seed)
    parser.add_argument("--steps", type=int, default=CLEAN.steps)
    parser.add_argument("--decay", type=int, default=CLEAN.decay, help="steps of the linear decay at the end")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate-every", type=int, default=1300, help="steps between short evaluations, 0 for none")
    parser.add_argument("--save-every", type=int, default=300, help="steps between checkpoints")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    clean = replace(CLEAN, seed=options.seed, steps=options.steps, decay=options.decay)
    start: Path | None = None
    for name, settings in (("nano", clean), ("nano-raw", replace(RAW, seed=options.seed))):
        print(name, json.dumps(asdict(settings)), flush=True)
        trainer, checkpoint = Trainer(settings), options.checkpoints / f"{name}.pt"
        if checkpoint.exists():
            trainer.load(checkpoint)
        elif start is not None:
            trainer.load(start, optimizers=False)
        for block in trainer.net.blocks:
            block.compile(dynamic=True)  # fuses the elementwise work: a fifth more tokens a second
        train(trainer, checkpoint, options.evaluate_every, options.save_every)
        export(trainer.net, options.output / name)
        write_scores(options.output / name, report(trainer.net, 400, 4), settings)
        start = checkpoint


def write_scores(folder: Path, scores: dict[str, object], settings: Settings) -> None:
    """Put the scores and the settings that led to them beside the weights."""
    text = json.dumps({"settings": asdict(settings), "scores": scores}, indent=1) + "\n"
    (folder / "scores.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
