"""From the runs' metrics to docs/results.md: a table, a plot with spread, and what each claim comes to."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from conditions import CONDITIONS, POPULATION

matplotlib.use("svg")
import matplotlib.pyplot as plt
from scipy import stats

MEASURES = ("ast_depth", "cyclomatic", "loc", "variables")


@dataclass(frozen=True)
class Outcome:
    """One finished run.

    Attributes:
        metrics: the objects of metrics.jsonl.
        reference_first, reference_last: the frozen base's solve rate on the problems of the first and last tenth.
    """

    condition: str
    title: str
    seed: int
    metrics: Sequence[dict[str, Any]]
    reference_first: float
    reference_last: float

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The training steps, without the record of the state before them."""
        return [record for record in self.metrics if record["step"] > 0]

    @property
    def held_out(self) -> list[tuple[int, dict[str, Any]]]:
        """The evaluations with their steps."""
        return [(record["step"], record["held_out"]) for record in self.metrics if "held_out" in record]

    def gain(self, kind: str) -> float:
        """Change of the held-out solve rate, "solve_rate" (sampled) or "greedy", over the run."""
        return self.held_out[-1][1][kind]["overall"] - self.held_out[0][1][kind]["overall"]

    def complexity_change(self, measure: str) -> float:
        """Change of a complexity measure of what teachers wrote, from the first to the last tenth of the steps."""
        first, last = tenths(self.steps)
        return mean(record["complexity"][measure] for record in last) - mean(
            record["complexity"][measure] for record in first
        )

    @property
    def minutes(self) -> float:
        """Wall time of its steps, on one thread."""
        return math.fsum(record["seconds"]["total"] for record in self.steps) / 60

    @property
    def best_student(self) -> float:
        """Final held-out solve rate of the solver with the best rating, so not chosen by the held-out problems."""
        rates = self.held_out[-1][1]["members"]
        ratings = self.metrics[-1]["ratings"]
        return rates[max(rates, key=lambda name: (ratings[name]["lcb"], name))]


def tenths(records: Sequence[dict[str, Any]]) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
    """Return the first and the last tenth of the steps."""
    size = max(1, len(records) // 10)
    return records[:size], records[-size:]


def mean(values: Any) -> float:
    """Return the mean of the values that were measured."""
    return statistics.fmean(value for value in values if value is not None)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half width of Student's 95 % interval over seeds."""
    if len(values) < 2:
        return values[0], math.inf
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), spread * float(stats.t.ppf(0.975, len(values) - 1))


def verdict(values: Sequence[float]) -> str:
    """Judge the claim that the values are above zero: the interval over seeds lies above it, below it, or around it."""
    centre, half = interval(values)
    word = "agree" if centre - half > 0 else "disagree" if centre + half < 0 else "not decided"
    return f"{word} ({signed(centre)} ± {half:.3f}, n = {len(values)})"


def signed(value: float) -> str:
    """Return a number with its sign."""
    return f"{value:+.3f}"


def write_results(outcomes: Sequence[Outcome], folder: Path, missing: Sequence[str] = ()) -> Path:
    """Write results.md and results.svg of complete runs, naming those that are `missing`; returns the first's path."""
    folder.mkdir(parents=True, exist_ok=True)
    by_condition: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_condition.setdefault(outcome.condition, []).append(outcome)
    plot(by_condition, folder / "results.svg")
    text = "\n".join(
        [
            "# Does it learn?",
            "",
            f"Written by `make reproduce` (benchmarks/learning): {len(outcomes)} runs of "
            f"{outcomes[0].steps[-1]['step']} steps, {len({one.seed for one in outcomes})} seeds a condition, whose "
            f"steps took {math.fsum(one.minutes for one in outcomes):.0f} minutes in all, on a thread each; on "
            "`builtin://nano-raw`: the embedded base tuned on careless answers, a designed handicap that leaves "
            "reinforcement learning more to elicit.",
            "",
            *(["**Not complete.** Missing are:", "", *(f"- {line}" for line in missing), ""] if missing else []),
            "Every teacher makes as many proposals a step as the single agent, every student as many rollouts, and "
            "each adapter takes one update. The population as a whole makes four times as many of both, so its archive "
            "would fill faster even if its teachers were no better. ± is half of Student's 95 % interval over "
            "seeds. Complexity is that of the programs that teachers wrote; those of code_f are drawn from the buffer.",
            "",
            *arms(),
            "",
            "![Held-out solve rate, difficulty, complexity and coverage over the steps](results.svg)",
            "",
            *table(by_condition),
            "",
            "## What must hold in every condition",
            "",
            "Held-out solve rate at temperature 1 rises by more than its standard error. Per run: the change over two "
            "evaluations of the same problems, beside the standard error of the difference if both were independent.",
            "",
            *must_hold(outcomes),
            "",
            "## What the paper says beyond that",
            "",
            *claims(by_condition),
            "",
        ]
    )
    path = folder / "results.md"
    path.write_text(text, encoding="utf-8")
    return path


def arms() -> list[str]:
    """Return what differs between the conditions; nothing else does."""
    rows = [
        f"All conditions but Absolute Zero's recipe share one reward scheme. This is all in which they differ from "
        f"{POPULATION.title}:",
        "",
        "| condition | field | why |",
        "|---|---|---|",
    ]
    for condition in CONDITIONS:
        rows += [f"| {condition.title} | `{field}` | {reason} |" for field, reason in condition.differs.items()]
    return rows


def table(by_condition: dict[str, list[Outcome]]) -> list[str]:
    """Return one row a condition: mean ± half width over seeds."""
    columns: list[tuple[str, Callable[[Outcome], float]]] = [
        ("held-out T=1, start", lambda one: one.held_out[0][1]["solve_rate"]["overall"]),
        ("end", lambda one: one.held_out[-1][1]["solve_rate"]["overall"]),
        ("greedy, start", lambda one: one.held_out[0][1]["greedy"]["overall"]),
        ("end", lambda one: one.held_out[-1][1]["greedy"]["overall"]),
        ("frozen base on first problems", lambda one: one.reference_first),
        ("on last problems", lambda one: one.reference_last),
        ("lines, change", lambda one: one.complexity_change("loc")),
        ("coverage", lambda one: one.metrics[-1]["coverage"]),
        ("valid, last tenth", lambda one: mean(record["valid_rate"] for record in tenths(one.steps)[1])),
    ]
    rows = ["| condition | " + " | ".join(name for name, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for runs in by_condition.values():
        cells = []
        for _, value in columns:
            centre, half = interval([value(one) for one in runs])
            cells.append(f"{centre:.3f} ± {half:.3f}")
        rows.append(f"| {runs[0].title} | " + " | ".join(cells) + " |")
    return rows


def must_hold(outcomes: Sequence[Outcome]) -> list[str]:
    """Return one row a run: the gain against its standard error."""
    rows = ["| run | start | end | change | standard error | holds |", "|---|---|---|---|---|---|"]
    for one in outcomes:
        first, last = one.held_out[0][1], one.held_out[-1][1]
        error = math.hypot(first["stderr"], last["stderr"])
        change = one.gain("solve_rate")
        rows.append(
            f"| {one.title}, seed {one.seed} | {first['solve_rate']['overall']:.3f} | "
            f"{last['solve_rate']['overall']:.3f} | {signed(change)} | {error:.3f} | "
            f"{'yes' if change > error else 'no'} |"
        )
    return rows


def claims(by_condition: dict[str, list[Outcome]]) -> list[str]:
    """Return the paper's claims, each with what the seeds say about it at this scale."""
    population, single, frozen = (by_condition.get(name, []) for name in ("population", "single", "frozen"))
    rows = ["| claim | at this scale |", "|---|---|"]

    def row(claim: str, values: Sequence[float]) -> None:
        rows.append(f"| {claim} | {verdict(values) if values else 'no runs'} |")

    for name in ("single", "single-pooled", "absolute-zero"):
        runs = by_condition.get(name, [])
        if not runs:
            continue
        row(
            f"{runs[0].title}: drifts to easier problems (frozen base's solve rate rises)",
            [one.reference_last - one.reference_first for one in runs],
        )
    for name in ("population", "frozen"):
        runs = by_condition.get(name, [])
        if not runs:
            continue
        row(
            f"{runs[0].title}: problems get harder (frozen base's solve rate falls)",
            [one.reference_first - one.reference_last for one in runs],
        )
    for measure in MEASURES:
        row(f"Population raises {measure}", [one.complexity_change(measure) for one in population])
        row(
            f"Population ends above the single agent in {measure}'s change",
            _differences(population, single, lambda one, measure=measure: one.complexity_change(measure)),
        )
        row(
            f"Population ends above its control with frozen teachers in {measure}'s change",
            _differences(population, frozen, lambda one, measure=measure: one.complexity_change(measure)),
        )
    row(
        "Population covers more of the archive than the single agent",
        _differences(population, single, lambda one: one.metrics[-1]["coverage"]),
    )
    row(
        "Best student (by rating) is above the single agent on held-out problems",
        _differences(population, single, lambda one: one.best_student),
    )
    return rows


def _differences(left: Sequence[Outcome], right: Sequence[Outcome], value: Callable[[Outcome], float]) -> list[float]:
    """Return left minus right, paired by the seeds that both have."""
    other = {one.seed: value(one) for one in right}
    return [value(one) - other[one.seed] for one in left if one.seed in other]


def plot(by_condition: dict[str, list[Outcome]], path: Path) -> None:
    """Draw mean curves with a band from the lowest to the highest seed."""
    matplotlib.rcParams.update({"svg.hashsalt": "populora", "font.size": 9})
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.4), layout="constrained")
    panels: list[tuple[str, Callable[[Outcome], list[tuple[int, float]]]]] = [
        ("Held-out solve rate, T = 1", lambda one: [(s, r["solve_rate"]["overall"]) for s, r in one.held_out]),
        ("Held-out solve rate, greedy", lambda one: [(s, r["greedy"]["overall"]) for s, r in one.held_out]),
        ("Solve rate in training", lambda one: [(r["step"], r["solve_rate"]["overall"]) for r in one.steps]),
        ("Lines of what teachers write", lambda one: [(r["step"], r["complexity"]["loc"]) for r in one.steps]),
        ("Archive coverage", lambda one: [(r["step"], r["coverage"]) for r in one.steps]),
        ("Teacher's reward", lambda one: [(r["step"], r["reward"]["teacher"]) for r in one.steps]),
    ]
    for axis, (title, series) in zip(axes.flat, panels, strict=True):
        for runs in by_condition.values():
            curves = [dict(series(one)) for one in runs]
            band = {
                step: row
                for step in curves[0]
                if (row := [curve[step] for curve in curves if curve.get(step) is not None])
            }
            steps, values = list(band), list(band.values())
            (line,) = axis.plot(steps, [statistics.fmean(row) for row in values], label=runs[0].title, linewidth=1.4)
            axis.fill_between(
                steps, [min(row) for row in values], [max(row) for row in values], color=line.get_color(), alpha=0.15
            )
        axis.set_title(title, loc="left")
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
