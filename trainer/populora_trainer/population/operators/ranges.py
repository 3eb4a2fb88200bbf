"""Checks of operators' parameters."""

import math

import torch

from populora_trainer.errors import OperatorError

LARGEST = torch.finfo(torch.float32).max


def require(
    name: str,
    value: float,
    low: float,
    high: float = LARGEST,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Refuse a parameter that is not a number between low and high, both allowed unless open.

    Factors are computed in float32, so no parameter may be larger than its numbers.

    Raises:
        OperatorError: naming the parameter, its value and the range.
    """
    too_low = value <= low if open_low else value < low
    too_high = value >= high if open_high else value > high
    if math.isnan(value) or too_low or too_high:
        allowed = f"above {low:g}" if open_low else f"{low:g} or more"
        allowed += f" and below {high:g}" if open_high else f" and at most {high:g}"
        raise OperatorError(f"{name} is {value:g}; it must be a finite number, {allowed}")
