"""Named random draws: every draw of a run follows from (run seed, step, member, purpose) and from nothing else.

Two processes that ask for the same name get the same numbers, whatever was drawn before, so a resumed run needs no
stored generator state.
"""

import hashlib
import random

import torch


def draw(seed: int, *name: int | str) -> int:
    """Return the 63-bit seed of one named draw, e.g. `draw(seed, step, member, "solve")`."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *name))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def tensor_generator(seed: int, *name: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator seeded by the named draw."""
    return torch.Generator(device=device).manual_seed(draw(seed, *name))


def choices(seed: int, *name: int | str) -> random.Random:
    """Return a `random.Random` seeded by the named draw, for choices among Python objects."""
    return random.Random(draw(seed, *name))
