"""The report of one or several runs as a self-contained HTML page.

What it is made of: `report_data` reads the runs, `report_curves` says which numbers are drawn over the steps,
`report_figures` and `report_tables` make of them what the page shows, `report_charts` draws, `report_numbers` gives the
same to scripts.
"""

import importlib.resources
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from populora_trainer.diagnostics.report_charts import percent, plain
from populora_trainer.diagnostics.report_curves import SECTIONS, SPEED, taken_apart
from populora_trainer.diagnostics.report_data import RunData, load_run
from populora_trainer.diagnostics.report_figures import curves_figure, phases_figure, population_figures
from populora_trainer.diagnostics.report_numbers import summarise
from populora_trainer.diagnostics.report_tables import member_rows, operator_rows


def load(places: Sequence[str | Path]) -> list[RunData]:
    """Read the runs, each in a folder or under a URI; of equal names, all get their place added.

    Raises:
        PopuloraError: a place holds no run.
    """
    runs = [load_run(place) for place in places]
    names = [run.name for run in runs]
    return [replace(run, name=f"{run.name} ({run.location})") if names.count(run.name) > 1 else run for run in runs]


def render(runs: Sequence[RunData]) -> str:
    """Return the page: HTML that opens without a network, everything from the runs escaped."""
    sections = [
        (title, [curves_figure(one, runs) for spec in specs for one in taken_apart(spec, runs)])
        for title, specs in SECTIONS
    ]
    sections.append(
        ("Population", [figure for run in runs for figure in population_figures(run, several=len(runs) > 1)])
    )
    sections.append(
        ("Cost", [curves_figure(SPEED, runs), *(phases_figure(run, several=len(runs) > 1) for run in runs)])
    )
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
        members=[(run, member_rows(run)) for run in runs],
        operators=[(run, operator_rows(run)) for run in runs],
        style=Markup((files / "report.css").read_text(encoding="utf-8")),
        script=Markup((files / "report.js").read_text(encoding="utf-8")),
    )


def _percent_or_dash(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _plain_or_dash(value: float | None) -> str:
    return "–" if value is None else plain(value)
