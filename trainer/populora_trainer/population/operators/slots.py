"""The loop over module slots that all operators share, with its checks."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from populora_trainer.errors import OperatorError
from populora_trainer.population.factors import Factors, Pair, check_fit


def per_slot(make: Callable[..., Pair], *parents: Factors) -> Factors:
    """Make a child slot by slot: `make(pair)` or `make(pair1, pair2)`, in the parents' order.

    The result is cast to the parents' dtype. Values are checked as each slot is read and written, while they are in
    the processor's cache.

    Raises:
        OperatorError: the parents do not fit together, or a value of a parent or of the child is not finite.
    """
    check_fit(*parents)
    child: Factors = {}
    for path in parents[0]:
        pairs = tuple(parent[path] for parent in parents)
        for number, pair in enumerate(pairs, start=1):
            _require_finite(pair, f"parent {number}", path, "every value must be finite")
        made = make(*pairs)
        made = Pair(made.A.to(pairs[0].A.dtype), made.B.to(pairs[0].B.dtype))
        _require_finite(made, "the child", path, "the parents' values or a parameter are too large")
        child[path] = made
    return child


def working(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype that operators compute in: float32, or float64 where it is float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _require_finite(pair: Pair, whose: str, path: str, rule: str) -> None:
    for name, tensor in zip(("lora_A", "lora_B"), pair, strict=True):
        # A norm is not finite if an element isn't; it may overflow where none does, so then the elements decide.
        if not math.isfinite(torch.linalg.vector_norm(tensor).item()) and not torch.isfinite(tensor).all():
            raise OperatorError(f"{whose}: {path}.{name} holds NaN or infinity; {rule}")
