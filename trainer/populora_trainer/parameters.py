"""Kinds of values that several commands take."""

import math
from typing import Any

import click


class Seconds(click.FloatRange):
    """A time within bounds; NaN, which no comparison puts outside of them, is refused too."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number.

        Raises:
            click.BadParameter: it is none, or out of bounds.
        """
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds
