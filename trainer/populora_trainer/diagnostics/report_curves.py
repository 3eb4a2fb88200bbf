"""Which numbers of a run are drawn over its steps: in which chart, under which heading, in which words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from populora_trainer.diagnostics.report_charts import Format, Point, percent, plain
from populora_trainer.diagnostics.report_data import RunData, number


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


def _roles(key: str) -> tuple[Curve, ...]:
    return tuple(Curve(f"{key}.{role}", f"{role}s", (key, role)) for role in ("teacher", "student"))


def _rates(prefix: str, *path: str) -> tuple[Curve, ...]:
    return tuple(Curve(f"{prefix}.{task}", task, (*path, task), True) for task in ("code_o", "code_i", "code_f"))


_BY_TEACHERS = "Mean over the valid programs that teachers wrote in the step; code_f's are drawn from the buffer."
_COMPLEXITY = (
    ("ast_depth", "AST depth", f"Levels of the syntax tree below its root. {_BY_TEACHERS}"),
    ("cyclomatic", "Cyclomatic complexity", f"One more than the decision points (McCabe). {_BY_TEACHERS}"),
    ("loc", "Lines of code", f"Logical lines, without comments and blank lines. {_BY_TEACHERS}"),
    ("variables", "Variables", f"Different names that are bound to values. {_BY_TEACHERS}"),
)

SECTIONS: tuple[tuple[str, tuple[Spec, ...]], ...] = (
    (
        "Solving",
        (
            Spec(
                "Held-out solve rate, %",
                "Fixed problems whose programs no training saw: progress of the students, with one standard error.",
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
        "Complexity of what teachers write",
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
                "Policy entropy by role, nats a token",
                "How undecided the members of each role are: a fall to zero means that they always say the same.",
                _roles("entropy"),
                least_span=0.1,
                apart=True,
            ),
            Spec(
                "Response length by role, tokens",
                "Mean length of the teachers' proposals and of the students' solutions.",
                _roles("response_tokens"),
                least_span=1.0,
                apart=True,
            ),
        ),
    ),
)
SPEED = Spec(
    "Tokens a second",
    "Tokens worked through over the step's wall time.",
    (Curve("tokens_per_second", "tokens a second", ("tokens_per_second",)),),
)


def taken_apart(spec: Spec, runs: Sequence[RunData]) -> list[Spec]:
    """Return the charts that a spec becomes: one, or for several runs one for each curve where they would tangle."""
    if len(runs) == 1 or not spec.apart:
        return [spec]
    return [
        replace(
            spec,
            title=spec.title.replace("by type", f"on {curve.label}").replace("by role", f"of the {curve.label}"),
            curves=(curve,),
        )
        for curve in spec.curves
    ]


def points_of(run: RunData, path: Sequence[str]) -> tuple[Point, ...]:
    """Return (step, value) of every metrics line that has a number at the path."""
    found = ((number(line, "step"), number(line, *path)) for line in run.metrics)
    return tuple((step, value) for step, value in found if step is not None and value is not None)
