"""What the tests measure on the way, as lines of text. Imported by name."""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any


class Figures:
    """Seconds of the steps of runs, beside each other, and single figures."""

    def __init__(self) -> None:
        self._steps: dict[str, list[Mapping[str, float]]] = {}
        self._others: dict[str, str] = {}

    def add_steps(self, name: str, metrics: Iterable[Mapping[str, Any]]) -> None:
        """Add a run by the lines of its metrics.jsonl."""
        self._steps[name] = [record["seconds"] for record in metrics if record["step"]]

    def add(self, name: str, text: str) -> None:
        """Add a single figure with its unit."""
        self._others[name] = text

    def lines(self) -> list[str]:
        """Return the median seconds of each phase of a step, a line a run, and the single figures."""
        lines = []
        for name, steps in self._steps.items():
            phases = dict.fromkeys(phase for step in steps for phase in step)
            middle = {phase: median(step.get(phase, 0.0) for step in steps) for phase in phases}
            parts = "  ".join(f"{phase} {seconds:.2f}" for phase, seconds in middle.items())
            lines.append(f"Seconds of a step ({name}, median of {len(steps)}): {parts}")
        return lines + [f"{name}: {text}" for name, text in self._others.items()]
