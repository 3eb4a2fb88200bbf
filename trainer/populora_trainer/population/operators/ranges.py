"""Checks of operators' parameters."""

import math

from populora_trainer.errors import OperatorError


def require(
    name: str,
    value: float,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Refuse a parameter that is not a finite number between low and high, both allowed unless open.

    Raises:
        OperatorError: naming the parameter, its value and the range.
    """
    too_low = value <= low if open_low else value < low
    too_high = value >= high if open_high else value > high
    if not math.isfinite(value) or too_low or too_high:
        allowed = f"above {low:g}" if open_low else f"{low:g} or more"
        if math.isfinite(high):
            allowed += f" and below {high:g}" if open_high else f" and at most {high:g}"
        raise OperatorError(f"{name} is {value:g}; it must be a finite number, {allowed}")
