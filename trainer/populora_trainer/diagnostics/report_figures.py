"""The figures of a report: what is drawn of one or several runs, with the sentence that says how to read it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from populora_trainer.diagnostics.report_charts import (
    COLOURS,
    Life,
    Series,
    line_chart,
    lineage_chart,
    matrix_chart,
    stacked_chart,
)
from populora_trainer.diagnostics.report_curves import Spec, points_of
from populora_trainer.diagnostics.report_data import RunData, number, order, place, seniority
from populora_trainer.population.lineage import Relative

MOST_LIVES = 240
MOST_RATING_LINES = 80

Rating = tuple[float, float, float]  # step, mu, sigma


class Figure(NamedTuple):
    """A drawn chart as the page needs it."""

    title: str
    sentence: str
    svg: Markup
    legend: Sequence[tuple[str, int, int]] = ()
    wide: bool = False


def curves_figure(spec: Spec, runs: Sequence[RunData]) -> Figure:
    """Draw the curves of a spec, of all runs in one chart."""
    series, legend = [], []
    sparse = spec.curves[0].path[0] == "held_out"
    for run_index, run in enumerate(runs):
        for curve_index, curve in enumerate(spec.curves):
            points = points_of(run, curve.path)
            if not points:
                continue
            colour, dash = (run_index, curve_index) if len(runs) > 1 else (curve_index, 0)
            label = curve.label if len(runs) == 1 else run.name
            if len(runs) > 1 and len(spec.curves) > 1:
                label = f"{run.name}, {curve.label}"
            band = _stderr(run) if curve.key == "held_out" else ()
            series.append(Series(label, points, colour, dash, band, marks=sparse))
            legend.append((label, colour, dash))
    svg = line_chart(series, show=spec.show, least_span=spec.least_span)
    return Figure(spec.title, spec.sentence, svg, legend if len(legend) > 1 else ())


def population_figures(run: RunData, *, several: bool) -> list[Figure]:
    """Draw a run's ratings, its solve matrix and its lineage; titles name the run where there are several."""
    suffix = f" · {run.name}" if several else ""
    figures = []
    ratings = _ratings(run)
    for role, initial in (("Teachers", "t"), ("Students", "s"), ("Agent", "a")):
        lines = {name: points for name, points in ratings.items() if name.startswith(initial)}
        places = sorted({place(name) for name in lines}, key=order)
        ends = "A line ends where a member was replaced, and its child begins anew."
        if len(lines) > MOST_RATING_LINES:
            lines, ends = _by_place(lines), "A member that was replaced is followed by its child."
        series = [
            Series(
                name,
                tuple((step, mu) for step, mu, _ in lines[name]),
                colour=places.index(place(name)),
                band=tuple((step, mu - 3 * sigma, mu) for step, mu, sigma in lines[name]) if len(places) <= 4 else (),
            )
            for name in sorted(lines, key=order)
        ]
        figures.append(
            Figure(
                f"TrueSkill of the {role.lower()}{suffix}",
                f"Mean skill mu; the band reaches down to the lower confidence bound mu - 3 sigma, by which members "
                f"are ranked. {ends}",
                line_chart(series),
                [(name, index, 0) for index, name in enumerate(places)],
            )
        )
    rows = sorted({student for student, _ in run.matrix}, key=order)
    columns = sorted({teacher for _, teacher in run.matrix}, key=order)
    cells = {key: (total / count, count) for key, (total, count) in run.matrix.items()}
    figures.append(
        Figure(
            f"Who solves whom, %{suffix}",
            "Mean solve rate of each student on each teacher's valid problems, over the whole run; children count for "
            "the line of succession they stand in.",
            matrix_chart(rows, columns, cells, "student", "teacher") if len(cells) > 1 else Markup(""),
        )
    )
    lives, succession = _lives(run)
    births = sum(1 for one in run.relatives.values() if one.operator)
    figures.append(
        Figure(
            f"Lineage{suffix}",
            "One row a line of succession. A dot is a birth, coloured and, where there is room, named by its operator; "
            "curves come from the parents. A bar ends where the member was replaced."
            + (f" The last {MOST_LIVES} of {births} births are shown." if births > MOST_LIVES else ""),
            lineage_chart(lives, succession) if any(life.operator for life in lives) else Markup(""),
            wide=True,
        )
    )
    return figures


def phases_figure(run: RunData, *, several: bool) -> Figure:
    """Draw what a step's time goes to."""
    names: list[str] = []
    for line in run.metrics:
        seconds = line.get("seconds")
        names += [name for name in (seconds if isinstance(seconds, Mapping) else ()) if name not in (*names, "total")]
    steps = [(number(line, "step"), line) for line in run.metrics if number(line, "seconds", "total")]
    series = [
        Series(
            name,
            tuple((step, number(line, "seconds", name) or 0.0) for step, line in steps if step is not None),
            colour=index,
        )
        for index, name in enumerate(names)
    ]
    return Figure(
        f"Seconds a step, by phase{f' · {run.name}' if several else ''}",
        "Wall time of the phases of a training step, stacked.",
        stacked_chart(series),
        [(name, index, 0) for index, name in enumerate(names)],
    )


def _stderr(run: RunData) -> tuple[tuple[float, float, float], ...]:
    band = []
    for line in run.metrics:
        step, rate = number(line, "step"), number(line, "held_out", "solve_rate", "overall")
        error = number(line, "held_out", "stderr")
        if step is not None and rate is not None and error is not None:
            band.append((step, rate - error, rate + error))
    return tuple(band)


def _by_place(lines: Mapping[str, list[Rating]]) -> dict[str, list[Rating]]:
    joined: dict[str, list[Rating]] = {}
    for name in sorted(lines, key=order):
        joined.setdefault(place(name), []).extend(lines[name])
    return {name: sorted(points) for name, points in joined.items()}


def _ratings(run: RunData) -> dict[str, list[Rating]]:
    found: dict[str, list[Rating]] = {}
    for line in run.metrics:
        step, ratings = number(line, "step"), line.get("ratings")
        for name, rating in ratings.items() if isinstance(ratings, Mapping) else ():
            mu, sigma = number(rating, "mu"), number(rating, "sigma")
            if step is not None and mu is not None and sigma is not None:
                found.setdefault(str(name), []).append((step, mu, sigma))
    return found


def _lives(run: RunData) -> tuple[list[Life], list[str]]:
    ratings = _ratings(run)
    last = max((points[-1][0] for points in ratings.values()), default=0.0)
    born = sorted((one for one in run.relatives.values() if one.operator), key=lambda one: one.born_step)
    shown = {one.name for one in born[-MOST_LIVES:]}
    start = float(born[-MOST_LIVES].born_step) if len(born) > MOST_LIVES else 0.0
    operators = sorted({one.operator for one in born})
    founders = {name: Relative(name) for name in ratings if name not in run.relatives}
    lives = []
    for one in [*run.relatives.values(), *founders.values()]:
        died = float(one.died_step) if one.died_step is not None else last
        if (one.operator and one.name not in shown) or died < start:
            continue
        bred = f", bred by {one.operator} from {' and '.join(one.parents)}" if one.operator else ""
        end = f"to {one.died_step - 1}" if one.died_step is not None else "on, alive"
        lives.append(
            Life(
                name=one.name,
                row=place(one.name),
                born=max(start, float(one.born_step)),
                died=max(died, float(one.born_step)),
                parents=one.parents,
                operator=one.operator,
                colour=operators.index(one.operator) % (COLOURS - 1) if one.operator else COLOURS - 1,
                detail=f"{one.name}{bred}, from step {one.born_step} {end}",
            )
        )
    return lives, sorted({life.row for life in lives}, key=seniority)
