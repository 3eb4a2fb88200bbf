"""An adapter's weights as values: per target module the two LoRA factors, and what can be asked of their deltas.

The delta of a module is dW = B A with B (out, rank) and A (rank, in); the model adds alpha / rank * dW. Nothing here
builds the (out, in) matrix except `delta`, which is for small modules and for tests.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from populora_trainer.errors import OperatorError


class Pair(NamedTuple):
    """The factors of one target module: A (rank, in) and B (out, rank), dW = B A."""

    A: Tensor
    B: Tensor


Factors = dict[str, Pair]
"""One adapter: module path in the base model -> its pair, in the model's order."""


def rank_of(factors: Factors) -> int:
    """Return the adapter's rank."""
    return next(iter(factors.values())).A.shape[0]


def copy_factors(factors: Factors) -> Factors:
    """Return the same values in memory of their own."""
    return {path: Pair(pair.A.clone(), pair.B.clone()) for path, pair in factors.items()}


def tensors_of(factors: Factors) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every factor, e.g. ("model.layers.0.self_attn.q_proj.lora_A", A)."""
    for path, pair in factors.items():
        yield f"{path}.lora_A", pair.A
        yield f"{path}.lora_B", pair.B


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity, or None."""
    if not tensors:
        return None
    norms = torch.stack([torch.linalg.vector_norm(tensor.detach()).double() for tensor in tensors.values()])
    if bool(torch.isfinite(norms).all()):
        return None
    for name, tensor in tensors.items():  # a norm overflows before its elements do, so the elements decide
        if not bool(torch.isfinite(tensor).all()):
            return name
    return None


def check_fit(*parents: Factors) -> None:
    """Refuse factors that no operator can take, by their shapes and dtypes; values are checked slot by slot.

    Every parent must have the same module paths, and per module the same shapes, dtype and device; every module the
    same rank.

    Raises:
        OperatorError: naming the parent, the module, what it has and what is allowed.
    """
    first = parents[0]
    if not first:
        raise OperatorError("parent 1 has no modules; an adapter needs at least one pair of factors")
    rank = rank_of(first)
    for number, parent in enumerate(parents, start=1):
        if parent.keys() != first.keys():
            odd = sorted(parent.keys() ^ first.keys())[0]
            raise OperatorError(f"parents 1 and {number} differ in module {odd}; parents must adapt the same modules")
        for path, (A, B) in parent.items():
            where = f"parent {number}, module {path}"
            if A.ndim != 2 or B.ndim != 2 or A.shape[0] != B.shape[1] or A.shape[0] != rank:
                raise OperatorError(
                    f"{where}: A is {tuple(A.shape)} and B is {tuple(B.shape)}; A must be ({rank}, in), B (out, {rank})"
                )
            if not A.is_floating_point() or A.dtype != B.dtype or A.device != B.device:
                raise OperatorError(
                    f"{where}: A is {A.dtype} on {A.device} and B is {B.dtype} on {B.device}; "
                    "both must have one floating-point dtype and one device"
                )
            other = first[path]
            if A.shape != other.A.shape or B.shape != other.B.shape:
                raise OperatorError(
                    f"{where}: A {tuple(A.shape)} and B {tuple(B.shape)} differ from parent 1's "
                    f"{tuple(other.A.shape)} and {tuple(other.B.shape)}; parents must have equal shapes"
                )
            if A.dtype != other.A.dtype or A.device != other.A.device:
                raise OperatorError(
                    f"{where}: {A.dtype} on {A.device} differs from parent 1's {other.A.dtype} on {other.A.device}"
                )


def delta(pair: Pair) -> Tensor:
    """Return dW = B A (out, in) in fp32 or better; for small modules only."""
    work = torch.promote_types(pair.A.dtype, torch.float32)
    return pair.B.to(work) @ pair.A.to(work)


def inner_product(first: Pair, second: Pair) -> Tensor:
    """Return <dW1, dW2> = tr(B1^T B2 (A2 A1^T)) as a float64 scalar, from (rank, rank) products only."""
    gram_B = first.B.double().T @ second.B.double()
    gram_A = first.A.double() @ second.A.double().T
    return (gram_B * gram_A).sum()


def delta_norm(pair: Pair) -> Tensor:
    """Return the Frobenius norm of dW as a float64 scalar."""
    return inner_product(pair, pair).clamp(min=0).sqrt()


def distance_of_a(first: Factors, second: Factors) -> float:
    """Return how far two adapters' A factors are apart: |A1 - A2| / (|A1| + |A2|) over all modules.

    0 for members that still hold the population's shared A, about 0.7 for independent ones. Training moves every
    member's A, so that no name can say who shares one: operators that mix factors measure per module (`crossovers.py`).
    """
    apart = sum(float(torch.linalg.vector_norm(first[p].A.double() - second[p].A.double()) ** 2) for p in first)
    size = sum(
        float((torch.linalg.vector_norm(first[p].A.double()) + torch.linalg.vector_norm(second[p].A.double())) ** 2)
        for p in first
    )
    return (apart / size) ** 0.5 if size else 0.0
