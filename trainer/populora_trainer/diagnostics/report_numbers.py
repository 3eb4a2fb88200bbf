"""A report's numbers as an object: what `populora report --json` prints."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from populora_trainer.diagnostics.report_charts import Point
from populora_trainer.diagnostics.report_curves import SECTIONS, SPEED, points_of
from populora_trainer.diagnostics.report_data import RunData, number
from populora_trainer.diagnostics.report_tables import best_members

MEAN_SHARE = 5  # first and last means are over this part of a run's steps
MEAN_LIMIT = 10  # and over at most this many


class CurveSummary(TypedDict):
    """One curve in numbers. The means are over the first and the last steps, `mean_steps` of them."""

    points: int
    first: float
    last: float
    mean: float
    first_mean: float
    last_mean: float
    mean_steps: int
    minimum: float
    maximum: float
    best: "Best | None"


class Best(TypedDict):
    """The highest value of a curve on which more is better."""

    value: float
    step: int


class RunSummary(TypedDict):
    """One run in numbers."""

    name: str
    location: str
    settings: dict[str, str]
    steps: int
    seconds: float
    curves: dict[str, CurveSummary]
    ratings: dict[str, dict[str, float]]
    best_members: dict[str, str]
    problems: int
    held_out_proposals: int
    births: int
    notes: list[str]


def summarise(runs: Iterable[RunData]) -> list[RunSummary]:
    """Return the numbers behind the page."""
    return [_summary(run) for run in runs]


def _summary(run: RunData) -> RunSummary:
    specs = [spec for _, specs in SECTIONS for spec in specs]
    curves = {}
    for curve in (curve for spec in (*specs, SPEED) for curve in spec.curves):
        points = points_of(run, curve.path)
        if points:
            curves[curve.key] = _in_numbers(points, curve.rising)
    ratings = next((line["ratings"] for line in reversed(run.metrics) if isinstance(line.get("ratings"), Mapping)), {})
    known = ratings if isinstance(ratings, Mapping) else {}
    return {
        "name": run.name,
        "location": run.location,
        "settings": dict(run.card),
        "steps": int(max((number(line, "step") or 0 for line in run.metrics), default=0)),
        "seconds": math.fsum(number(line, "seconds", "total") or 0.0 for line in run.metrics),
        "curves": curves,
        "ratings": {
            str(name): {key: number(known, name, key) or 0.0 for key in ("mu", "sigma", "lcb")} for name in known
        },
        "best_members": best_members(known),
        "problems": run.proposals,
        "held_out_proposals": run.held_out,
        "births": sum(1 for one in run.relatives.values() if one.operator),
        "notes": list(run.notes),
    }


def _in_numbers(points: Sequence[Point], rising: bool) -> CurveSummary:
    values = [value for _, value in points]
    window = min(MEAN_LIMIT, max(1, len(values) // MEAN_SHARE))
    top = max(range(len(values)), key=values.__getitem__)
    return {
        "points": len(values),
        "first": values[0],
        "last": values[-1],
        "mean": math.fsum(values) / len(values),
        "first_mean": math.fsum(values[:window]) / window,
        "last_mean": math.fsum(values[-window:]) / window,
        "mean_steps": window,
        "minimum": min(values),
        "maximum": max(values),
        "best": {"value": values[top], "step": int(points[top][0])} if rising else None,
    }
