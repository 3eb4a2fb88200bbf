"""How a base's last hidden states become logits, found out by comparing with the base's own logits."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from populora_trainer.errors import BaseModelError, UnfitBaseError

# Fields by which configurations name what happens to logits after the linear layer.
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_DIVISORS = ("logits_scaling",)
_FACTORS = ("logit_scale", "lm_head_multiplier", "logits_scaling")


@dataclass(frozen=True, slots=True)
class OutputHead:
    """A linear layer, then perhaps a factor (Cohere), a divisor (Granite) or a cap (Gemma 2) on its logits.

        z = (W h + b) * factor / divisor,      logits = cap * tanh(z / cap)

    The operations are those of transformers, in the same order and dtype.
    """

    linear: nn.Module
    factor: float | None = None
    divisor: float | None = None
    cap: float | None = None

    @property
    def out_features(self) -> int:
        """Size of the vocabulary."""
        weight = self.linear.weight
        assert isinstance(weight, Tensor)
        return weight.shape[0]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., hidden) to logits (..., vocabulary)."""
        logits: Tensor = self.linear(hidden)
        if self.factor is not None:
            logits = logits * self.factor
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits


def find_output_head(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> OutputHead:
    """Return the head that maps a base's last hidden states to its logits.

    Of what the configuration names, and less of it, the closest is taken: architectures differ in what a field means.

    Args:
        hidden: (..., hidden), as the body of the model gives them.
        logits: (..., vocabulary), as the model gives them for the same input.

    Raises:
        UnfitBaseError: none of them gives these logits.
        BaseModelError: the logits are not finite.
    """
    linear = model.get_output_embeddings()
    name = type(model).__name__
    if not isinstance(linear, nn.Module) or not isinstance(getattr(linear, "weight", None), Tensor):
        raise UnfitBaseError(f"baseModel.uri: {name} has no output head with a weight, which the update computes with")
    if not torch.isfinite(logits).all():
        raise BaseModelError(
            f"baseModel.uri: the logits of {name} are not finite: its weights hold NaN or infinity, or overflow in "
            f"{str(logits.dtype).removeprefix('torch.')}"
        )
    with torch.no_grad():
        head = min(_candidates(linear, model), key=lambda head: difference(head(hidden), logits))
        if difference(head(hidden), logits) <= rounding(logits.dtype):
            return head
    raise UnfitBaseError(
        f"baseModel.uri: the logits of {name} are not its output head applied to its last hidden states; allowed are "
        f"bases without more than a factor ({', '.join(_FACTORS)}) or a cap ({', '.join(_CAPS)}) on their logits"
    )


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of what is expected."""
    difference = torch.linalg.vector_norm(found.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()))


def rounding(dtype: torch.dtype) -> float:
    """Return by how much two computations of the same values may differ, as `difference` measures it."""
    return 1e-4 if dtype == torch.float32 else 0.02


def _candidates(linear: nn.Module, model: PreTrainedModel) -> Iterator[OutputHead]:
    config = model.config.get_text_config()

    def named(fields: tuple[str, ...]) -> list[float]:
        values = [getattr(config, name, None) for name in fields]
        return [float(value) for value in values if isinstance(value, int | float) and value not in (0, 1)]

    scales: list[dict[str, float]] = [{"divisor": value} for value in named(_DIVISORS)]
    scales += [{"factor": value} for value in named(_FACTORS)]
    caps = named(_CAPS)
    for cap in (*caps, None):
        for scale in (*scales, {}):
            yield OutputHead(linear, cap=cap, **scale)
