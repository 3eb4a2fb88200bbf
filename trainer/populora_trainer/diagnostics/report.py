"""The report of one or several runs: a self-contained HTML page, and its numbers as an object."""

import importlib.resources
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypedDict

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from populora_trainer.diagnostics.report_charts import (
    COLOURS,
    Format,
    Life,
    Point,
    Series,
    line_chart,
    lineage_chart,
    matrix_chart,
    percent,
    plain,
    stacked_chart,
)
from populora_trainer.diagnostics.report_data import RunData, load_run, number, place
from populora_trainer.population.lineage import Relative
from populora_trainer.population.members import order_key

MEAN_SHARE = 5  # first and last means are over this part of a run's steps
MEAN_LIMIT = 10  # and over at most this many
MOST_LIVES = 240
MOST_RATING_LINES = 80
RETENTION_STEPS = 10


Rating = tuple[float, float, float]  # step, mu, sigma


class Curve(NamedTuple):
    """One number that a run logs every step: its key in `--json`, its legend, and where it stands in a metrics line."""

    key: str
    label: str
    path: tuple[str, ...]
    rising: bool = False  # more is better, so "best" means something


@dataclass(frozen=True, slots=True)
class Spec:
    """A chart over steps.

    Attributes:
        title: with the unit.
        sentence: what it shows and how to read it.
        curves: what is drawn.
        show: formats the values.
        least_span: what the value axis spans at least.
        apart: several runs get a chart for each curve, because together they would be a tangle.
    """

    title: str
    sentence: str
    curves: tuple[Curve, ...]
    show: Format = plain
    least_span: float = 0.0
    apart: bool = False


def _rates(prefix: str, *path: str) -> tuple[Curve, ...]:
    return tuple(Curve(f"{prefix}.{task}", task, (*path, task), True) for task in ("code_o", "code_i", "code_f"))


_COMPLEXITY = (
    ("ast_depth", "AST depth", "Syntax nodes on the longest path of the mean valid program."),
    ("cyclomatic", "Cyclomatic complexity", "One more than the decision points of the mean valid program (McCabe)."),
    ("loc", "Lines of code", "Logical lines of the mean valid program, without comments and blank lines."),
    ("variables", "Variables", "Different names that the mean valid program binds to values."),
)

SECTIONS: tuple[tuple[str, tuple[Spec, ...]], ...] = (
    (
        "Solving",
        (
            Spec(
                "Held-out solve rate, %",
                "Fixed problems that no training saw: progress of the students, with one standard error around it.",
                (
                    Curve("held_out", "sampled", ("held_out", "solve_rate", "overall"), True),
                    Curve("held_out_greedy", "greedy", ("held_out", "greedy", "overall"), True),
                ),
                percent,
                0.1,
            ),
            Spec(
                "Held-out solve rate by type, %",
                "The sampled rate, asking for outputs (code_o), inputs (code_i) or programs (code_f).",
                _rates("held_out", "held_out", "solve_rate"),
                percent,
                0.1,
                apart=True,
            ),
            Spec(
                "Training solve rate, %",
                "Share of rollouts that solve the teachers' problems of the step: the problems change, so it is a "
                "balance of power and no measure of progress.",
                (Curve("solve_rate", "solve rate", ("solve_rate", "overall"), True),),
                percent,
                0.1,
            ),
            Spec(
                "Training solve rate by type, %",
                "The balance of power, asking for outputs (code_o), inputs (code_i) or programs (code_f).",
                _rates("solve_rate", "solve_rate"),
                percent,
                0.1,
                apart=True,
            ),
            Spec(
                "Difficulty for the frozen base, % solved",
                "Share of the step's problems that the untrained base solves: lower means harder, on a fixed scale.",
                (Curve("reference_solve_rate", "frozen base", ("reference_solve_rate",)),),
                percent,
                0.1,
            ),
        ),
    ),
    (
        "Rewards",
        (
            Spec(
                "Mean reward",
                "Teachers earn most where few rollouts solve a valid problem, students where theirs do; the two pull "
                "against each other.",
                (
                    Curve("reward.teacher", "teachers", ("reward", "teacher"), True),
                    Curve("reward.student", "students", ("reward", "student"), True),
                ),
            ),
            Spec(
                "Valid proposals, %",
                "Share of proposals that parse, run, repeat themselves and keep the limits.",
                (Curve("valid_rate", "valid", ("valid_rate",), True),),
                percent,
                0.1,
            ),
        ),
    ),
    (
        "Complexity of the problems",
        tuple(
            Spec(title, sentence, (Curve(f"complexity.{key}", title, ("complexity", key)),), least_span=0.5)
            for key, title, sentence in _COMPLEXITY
        ),
    ),
    (
        "Exploration",
        (
            Spec(
                "Archive coverage, %",
                "Share of 4,096 cells of the space of programs, by complexity and kind, that hold a valid problem.",
                (Curve("coverage", "coverage", ("coverage",), True),),
                percent,
            ),
            Spec(
                "Policy entropy, nats a token",
                "How undecided the members are: a fall to zero means that they always say the same.",
                (Curve("entropy", "entropy", ("entropy",)),),
                least_span=0.1,
            ),
            Spec(
                "Response length, tokens",
                "Mean length of proposals and solutions.",
                (Curve("response_tokens", "tokens", ("response_tokens",)),),
                least_span=1.0,
            ),
        ),
    ),
)
_SPEED = Spec(
    "Tokens a second",
    "Tokens worked through over the step's wall time.",
    (Curve("tokens_per_second", "tokens a second", ("tokens_per_second",)),),
)


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
    births: int
    notes: list[str]


class Figure(NamedTuple):
    """A drawn chart as the page needs it."""

    title: str
    sentence: str
    svg: Markup
    legend: Sequence[tuple[str, int, int]] = ()
    wide: bool = False


def load(folders: Sequence[Path]) -> list[RunData]:
    """Read the runs; of equal names, all get their folder added.

    Raises:
        PopuloraError: a folder is not a run.
    """
    runs = [load_run(folder) for folder in folders]
    names = [run.name for run in runs]
    return [replace(run, name=f"{run.name} ({run.location})") if names.count(run.name) > 1 else run for run in runs]


def summarise(runs: Iterable[RunData]) -> list[RunSummary]:
    """Return the numbers behind the page."""
    return [_summary(run) for run in runs]


def render(runs: Sequence[RunData]) -> str:
    """Return the page: HTML that opens without a network, everything from the runs escaped."""
    sections = [
        (title, [_figure(one, runs) for spec in specs for one in _taken_apart(spec, runs)]) for title, specs in SECTIONS
    ]
    sections.append(("Population", [figure for run in runs for figure in _population(run, several=len(runs) > 1)]))
    sections.append(("Cost", [_figure(_SPEED, runs), *(_phases(run, several=len(runs) > 1) for run in runs)]))
    # Charts of what was never measured are left out, and so are sections without charts.
    kept = [(title, [figure for figure in figures if figure.svg]) for title, figures in sections]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"percent": _percent_or_dash, "plain": _plain_or_dash}
    files = importlib.resources.files("populora_trainer.diagnostics") / "templates"
    template = environment.from_string((files / "report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        runs=runs,
        summaries=summarise(runs),
        sections=[(title, figures) for title, figures in kept if figures],
        members=[(run, _members(run)) for run in runs],
        operators=[(run, _operators(run)) for run in runs],
        style=Markup((files / "report.css").read_text(encoding="utf-8")),
        script=Markup((files / "report.js").read_text(encoding="utf-8")),
    )


def _taken_apart(spec: Spec, runs: Sequence[RunData]) -> list[Spec]:
    if len(runs) == 1 or not spec.apart:
        return [spec]
    return [
        replace(spec, title=spec.title.replace("by type", f"on {curve.label}"), curves=(curve,))
        for curve in spec.curves
    ]


def _points(run: RunData, path: Sequence[str]) -> tuple[Point, ...]:
    found = ((number(line, "step"), number(line, *path)) for line in run.metrics)
    return tuple((step, value) for step, value in found if step is not None and value is not None)


def _figure(spec: Spec, runs: Sequence[RunData]) -> Figure:
    series, legend = [], []
    sparse = spec.curves[0].path[0] == "held_out"
    for run_index, run in enumerate(runs):
        for curve_index, curve in enumerate(spec.curves):
            points = _points(run, curve.path)
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


def _stderr(run: RunData) -> tuple[tuple[float, float, float], ...]:
    band = []
    for line in run.metrics:
        step, rate = number(line, "step"), number(line, "held_out", "solve_rate", "overall")
        error = number(line, "held_out", "stderr")
        if step is not None and rate is not None and error is not None:
            band.append((step, rate - error, rate + error))
    return tuple(band)


def _population(run: RunData, *, several: bool) -> list[Figure]:
    suffix = f" · {run.name}" if several else ""
    figures = []
    ratings = _ratings(run)
    for role, initial in (("Teachers", "t"), ("Students", "s"), ("Agent", "a")):
        lines = {name: points for name, points in ratings.items() if name.startswith(initial)}
        places = sorted({place(name) for name in lines}, key=_order)
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
            for name in sorted(lines, key=_order)
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
    rows = sorted({student for student, _ in run.matrix}, key=_order)
    columns = sorted({teacher for _, teacher in run.matrix}, key=_order)
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


def _by_place(lines: Mapping[str, list[Rating]]) -> dict[str, list[Rating]]:
    joined: dict[str, list[Rating]] = {}
    for name in sorted(lines, key=_order):
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
        bred = (
            f", bred by {one.operator} from {' and '.join(one.parents)} at step {one.born_step}" if one.operator else ""
        )
        end = f", replaced at step {one.died_step}" if one.died_step is not None else ", alive"
        lives.append(
            Life(
                name=one.name,
                row=place(one.name),
                born=max(start, float(one.born_step)),
                died=max(died, float(one.born_step)),
                parents=one.parents,
                operator=one.operator,
                colour=operators.index(one.operator) % (COLOURS - 1) if one.operator else COLOURS - 1,
                detail=f"{one.name}{bred}{end}",
            )
        )
    return lives, sorted({life.row for life in lives}, key=_seniority)


def _phases(run: RunData, *, several: bool) -> Figure:
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


class MemberRow(NamedTuple):
    """A living member in the table."""

    name: str
    role: str
    operator: str
    parents: str
    mu: float
    sigma: float
    lcb: float
    best: bool


def _members(run: RunData) -> list[MemberRow]:
    latest = next((line["ratings"] for line in reversed(run.metrics) if isinstance(line.get("ratings"), Mapping)), {})
    ratings = latest if isinstance(latest, Mapping) else {}
    best = set(_best(ratings).values())
    rows = []
    for name in sorted(ratings, key=_seniority):
        relative = run.relatives.get(name)
        rows.append(
            MemberRow(
                name=name,
                role=_role(name),
                operator=relative.operator if relative and relative.operator else "founder",
                parents=", ".join(relative.parents) if relative else "",
                mu=number(ratings, name, "mu") or 0.0,
                sigma=number(ratings, name, "sigma") or 0.0,
                lcb=number(ratings, name, "lcb") or 0.0,
                best=name in best,
            )
        )
    return rows


def _best(ratings: Mapping[str, object]) -> dict[str, str]:
    best: dict[str, str] = {}
    for name in ratings:
        role = _role(name)
        if role not in best or (number(ratings, name, "lcb") or 0) > (number(ratings, best[role], "lcb") or 0):
            best[role] = name
    return best


class OperatorRow(NamedTuple):
    """What became of the children of one operator."""

    operator: str
    children: int
    alive: int
    retained: float | None  # share still there RETENTION_STEPS after birth, of those born that long ago
    first_rank: float | None  # mean rank at the first round after birth: 0 the best of its role, 1 the worst
    diagnostics: dict[str, float]  # means


def _operators(run: RunData) -> list[OperatorRow]:
    children: dict[str, list[Relative]] = {}
    for one in run.relatives.values():
        if one.operator:
            children.setdefault(one.operator, []).append(one)
    last = max((number(line, "step") or 0.0 for line in run.metrics), default=0.0)
    rows = []
    for operator in sorted(children):
        of_age = [one for one in children[operator] if one.born_step + RETENTION_STEPS <= last]
        kept = [one for one in of_age if one.died_step is None or one.died_step > one.born_step + RETENTION_STEPS]
        ranks = [
            (one.ranks[0][1] - 1) / (one.ranks[0][2] - 1)
            for one in children[operator]
            if one.ranks and one.ranks[0][2] > 1
        ]
        measured: dict[str, list[float]] = {}
        for one in children[operator]:
            for name, values in _measured(one.diagnostics).items():
                measured.setdefault(name, []).append(sum(values) / len(values))
        rows.append(
            OperatorRow(
                operator=operator,
                children=len(children[operator]),
                alive=sum(one.died_step is None for one in children[operator]),
                retained=len(kept) / len(of_age) if of_age else None,
                first_rank=sum(ranks) / len(ranks) if ranks else None,
                diagnostics={name: sum(values) / len(values) for name, values in measured.items()},
            )
        )
    return rows


def _measured(diagnostics: Mapping[str, object]) -> dict[str, list[float]]:
    """Return the numbers in a child's diagnostics by name, of all its parents together."""
    found: dict[str, list[float]] = {}
    for name, value in diagnostics.items():
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, Mapping):
                for inner, numbers in _measured(entry).items():
                    found.setdefault(inner, []).extend(numbers)
            elif isinstance(entry, int | float):
                found.setdefault(name, []).append(float(entry))
    return found


def _summary(run: RunData) -> RunSummary:
    specs = [spec for _, specs in SECTIONS for spec in specs]
    curves = {}
    for curve in (curve for spec in (*specs, _SPEED) for curve in spec.curves):
        points = _points(run, curve.path)
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
        "best_members": _best(known),
        "problems": run.proposals,
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


def _role(name: str) -> str:
    return {"t": "teacher", "s": "student"}.get(name[:1], "agent")


def _order(name: str) -> tuple[str, int, int]:
    try:
        return order_key(name)
    except (ValueError, IndexError):
        return name, 0, 0


def _seniority(name: str) -> tuple[bool, tuple[str, int, int]]:
    """Teachers first, then by number."""
    return _role(name) != "teacher", _order(name)


def _percent_or_dash(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _plain_or_dash(value: float | None) -> str:
    return "–" if value is None else plain(value)
