"""Time steps of state-space layers that transformers clamps in one form of the recurrence and not in the other."""

from functools import partial

import torch
from torch import Tensor, nn


def clamp_time_steps(model: nn.Module) -> None:
    """Let layers with a `time_step_limit` (Zamba2, Nemotron-H) clamp their time step token by token, too.

    A layer projects its input to (gate, convolution, dt) and computes with softplus(dt + dt_bias). Over a whole prompt
    transformers clamps that to the limit, over a single token with a cache it does not. Here dt itself is clamped, to
    where softplus(dt + dt_bias) meets the limit, which changes nothing over a prompt.
    """
    for layer in model.modules():
        limit = getattr(layer, "time_step_limit", None)
        projection, bias = getattr(layer, "in_proj", None), getattr(layer, "dt_bias", None)
        if limit is None or not isinstance(projection, nn.Module) or not isinstance(bias, Tensor):
            continue
        low, high = (_before_softplus(value) for value in limit)
        if low > -torch.inf or high < torch.inf:
            projection.register_forward_hook(partial(_clamp, bias=bias, low=low, high=high))


def _clamp(layer: nn.Module, args: object, output: Tensor, *, bias: Tensor, low: float, high: float) -> Tensor:
    rest, dt = output[..., : -len(bias)], output[..., -len(bias) :]
    shift = bias.float()
    return torch.cat([rest, dt.clamp((low - shift).to(dt.dtype), (high - shift).to(dt.dtype))], dim=-1)


def _before_softplus(value: float) -> float:
    """Return x with softplus(x) = value."""
    return float(torch.tensor(value, dtype=torch.float64).expm1().log())
