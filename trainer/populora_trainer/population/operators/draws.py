"""Random tensors from the generator that an operator is given, on the device of the factors."""

import torch
from torch import Tensor

_LEVELS = 1 << 16


def normal(shape: tuple[int, ...], generator: torch.Generator, like: Tensor, out: Tensor | None = None) -> Tensor:
    """Return standard normal numbers in `like`'s dtype and on its device; in `out`, of the same kind, if given."""
    if out is not None and out.device == generator.device:
        return torch.randn(shape, generator=generator, out=out)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype).to(like.device)


def uniform(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    """Return numbers uniform on 65,536 levels, symmetric in (-1, 1), in `like`'s dtype and on its device."""
    return _levels(shape, generator, like).to(like.dtype).add_(0.5).mul_(2 / _LEVELS)


def keep(shape: tuple[int, ...], share: float, generator: torch.Generator, like: Tensor) -> tuple[Tensor, float]:
    """Return a mask that is True with probability `share`, and that probability as drawn: a multiple of 2^-16."""
    levels = max(1, round(share * _LEVELS))
    if levels == _LEVELS:
        return torch.ones(shape, dtype=torch.bool, device=like.device), 1.0
    return _levels(shape, generator, like) < levels - _LEVELS // 2, levels / _LEVELS


def choose(population: int, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` different indices below `population`, on the CPU."""
    return torch.randperm(population, generator=generator, device=generator.device)[:count].cpu()


def between(low: float, high: float, generator: torch.Generator) -> float:
    """Return one number uniform in [low, high)."""
    fraction = torch.rand((), generator=generator, device=generator.device, dtype=torch.float64)
    return low + (high - low) * float(fraction)


def integer(low: int, high: int, generator: torch.Generator) -> int:
    """Return one whole number uniform in [low, high)."""
    return int(torch.randint(low, high, (), generator=generator, device=generator.device))


def _levels(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    # 16 bits a number, four to a word, cost a fifth of torch.rand's or torch.bernoulli's time.
    size = torch.Size(shape).numel()
    words = torch.empty((size + 3) // 4, dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[:size].view(shape).to(like.device)
