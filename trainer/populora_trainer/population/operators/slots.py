"""The loop over module slots that all operators share, with its checks and the child's memory."""

import contextlib
import math
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from populora_trainer.errors import OperatorError
from populora_trainer.population.factors import Factors, Pair, check_fit

_ALIGNMENT = 64  # bytes, a cache line, as torch's own allocator has it
_HUGE_PAGE = 2 << 20


@torch.no_grad()
def per_slot(make: Callable[..., Pair], *parents: Factors, transparent: bool = False) -> Factors:
    """Make a child slot by slot: `make(out, pair)` or `make(out, pair1, pair2)`, in the parents' order.

    `make` returns the slot's values: in `out`, which is the child's memory, in tensors of its own, or as tensors of a
    parent. What is not in `out` is copied there and cast to the parents' dtype. Values are checked as each slot is
    read and written, while they are in the processor's cache.

    Args:
        make: the operator in one slot; it leaves the parents as they are.
        parents: one or two.
        transparent: NaN and infinity in any value of any parent are sure to reach the child, so that the parents are
            looked at only where the child has some.

    Raises:
        OperatorError: the parents do not fit together, or a value of a parent or of the child is not finite.
    """
    check_fit(*parents)
    child = _memory_like(parents[0])
    for path, out in child.items():
        pairs = tuple(parent[path] for parent in parents)
        if not transparent:
            _require_finite_parents(pairs, path)
        for room, value in zip(out, make(out, *pairs), strict=True):
            if value is not room:
                room.copy_(value)
            copied = not transparent and any(value is tensor for pair in pairs for tensor in pair)
            if not copied and not _finite(room):
                _require_finite_parents(pairs, path)
                raise OperatorError(
                    f"the child: {path}.{'lora_A' if room is out.A else 'lora_B'} holds NaN or infinity; "
                    f"the parents' values or a parameter are too large"
                )
    return child


def working(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype that operators compute in: float32, or float64 where it is float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def room_for(out: Tensor, like: Tensor) -> Tensor:
    """Return `out` where it can hold results in `like`'s dtype as they are, else memory of its own."""
    return out if out.dtype == like.dtype else torch.empty_like(out, dtype=like.dtype)


def _memory_like(parent: Factors) -> Factors:
    """Return uninitialised factors of a parent's shapes, dtype and device, in one piece of memory."""
    first = next(iter(parent.values())).A
    sizes = [tensor.numel() * tensor.element_size() for pair in parent.values() for tensor in pair]
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    whole = _bytes(sum(padded), first.device)
    pieces = iter(torch.split(whole, padded))

    def carve(tensor: Tensor) -> Tensor:
        return next(pieces)[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)

    return {path: Pair(carve(pair.A), carve(pair.B)) for path, pair in parent.items()}


def _bytes(size: int, device: torch.device) -> Tensor:
    """Return uninitialised bytes; where they are many, from huge pages, whose first use costs a third."""
    if device.type != "cpu" or size < 4 * _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)  # unmapped when the last view of it is gone
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + size]


def _require_finite_parents(pairs: tuple[Pair, ...], path: str) -> None:
    for number, pair in enumerate(pairs, start=1):
        for name, tensor in zip(("lora_A", "lora_B"), pair, strict=True):
            if not _finite(tensor):
                raise OperatorError(f"parent {number}: {path}.{name} holds NaN or infinity; every value must be finite")


def _finite(tensor: Tensor) -> bool:
    # A norm is not finite if an element isn't; it may overflow where none does, so then the elements decide.
    return math.isfinite(torch.linalg.vector_norm(tensor).item()) or bool(torch.isfinite(tensor).all())
