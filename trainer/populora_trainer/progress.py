"""A run in a terminal: progress while it trains, Ctrl-C, and what remains to be said at the end."""

import asyncio
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from populora_api import ALONE, PopulationRun, Services, cluster_only_fields
from populora_trainer.diagnostics.endpoint import Endpoint
from populora_trainer.diagnostics.records import RunStatus, StepMetrics
from populora_trainer.diagnostics.report import render
from populora_trainer.diagnostics.report_data import read_run
from populora_trainer.interrupts import Interrupts
from populora_trainer.nano.registry import SCHEME, builtin_notice
from populora_trainer.session import Events, open_session
from populora_trainer.storage.logs import read_log
from populora_trainer.storage.store import ObjectStore

if TYPE_CHECKING:
    from populora_trainer.ranks.group import Group

_TERMINATION_BYTES = 4096  # what Kubernetes keeps of a container's termination message


def train_in_terminal(
    manifest: PopulationRun,
    again: str,
    endpoint: Endpoint | None = None,
    from_step: int | None = None,
    allow_missing: Collection[str] = (),
    threads: int | None = None,
    services: Services = ALONE,
    leave_status: Path | None = None,
    grace_seconds: float | None = None,
    group: "Group | None" = None,
) -> int | None:
    """Train what a manifest describes, and show it.

    Args:
        manifest: with `storage.uri` set to where the run lives.
        again: the command that goes on with it, for who stops it.
        endpoint: what serves `/metrics` and `/status` once the run is open, or None; the caller closes it.
        from_step: go back to this checkpoint first.
        allow_missing: isolation layers that this machine may lack.
        threads: of torch, or None for those that the run began with.
        services: what runs elsewhere.
        leave_status: file that gets the last answer of `/status`, or None.
        grace_seconds: what the step may take after a signal; the run is then left at its last checkpoint.
        group: the ranks that compute, of which this is rank 0; None where it computes alone.

    Returns:
        The signal that stopped the run before its last step, None where it is complete.

    Raises:
        ManifestError: the manifest is wrong or cannot be trained here.
        PopuloraError: anything else that a user can act on.
    """
    console = Console(highlight=False)
    steps = manifest.spec.training.steps
    place = str(manifest.spec.storage.folder or manifest.spec.storage.uri)
    _introduce(console, manifest, place, [] if services.controlled else cluster_only_fields(manifest))
    with ExitStack() as stack:
        interrupts = stack.enter_context(
            Interrupts(
                lambda sentence: console.print(sentence),
                lambda number, sentence: _abandon(number, sentence, console, group),
                grace_seconds,
            )
        )
        if group is not None:
            group.lifeline.on_asked = interrupts.hear
            group.lifeline.watch_signals()
        view = stack.enter_context(_View(console, steps))
        session = stack.enter_context(
            open_session(
                manifest,
                events=Events(view.phase, view.step, lambda: interrupts.asked is not None, view.say),
                from_step=from_step,
                allow_missing=allow_missing,
                threads=threads,
                services=services,
                group=group,
            )
        )
        if endpoint is not None:
            endpoint.serve(session.monitor)
            view.say(f"Serving {endpoint.url}/metrics and {endpoint.url}/status")
        if session.resumed is not None:
            view.resume(session.resumed)
            if session.resumed < steps:
                view.say(f"Continuing {place} after step {session.resumed} of {steps}")
            else:
                view.say(f"{place} has done its {steps} steps; a larger training.steps would go on")
        done = asyncio.run(session.train())
        step = session.trainer.step
        _conclude(console, session.run.store, place, steps)
        if leave_status is not None:
            _leave(console, session.monitor.status(), leave_status)
    if done:
        return None
    console.print(f"Stopped after step {step} of {steps}; nothing is lost. Go on with:", soft_wrap=True)
    console.print(f"  {again}", soft_wrap=True, markup=False)
    return interrupts.asked


def _introduce(console: Console, manifest: PopulationRun, place: str, idle: list[str]) -> None:
    """Say what is trained, and which fields are of no effect here."""
    spec = manifest.spec
    who = (
        "a single agent that proposes and solves"
        if spec.mode == "SingleAgent"
        else f"{_counted(spec.population.teachers, 'teacher')} and {_counted(spec.population.students, 'student')}"
    )
    where = f"on {spec.base_model.uri}, in {escape(place)}"
    console.print(f"[bold]{manifest.metadata.name}[/bold]: {who} {where}", soft_wrap=True)
    notice = builtin_notice(spec.base_model.uri) if spec.base_model.uri.startswith(SCHEME) else ""
    if notice:
        console.print(notice, style="dim", soft_wrap=True)
    if idle:
        console.print(f"For a cluster only, without effect here: {', '.join(idle)}", style="dim", soft_wrap=True)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


_WITHOUT_LINES = ("held-out evaluation",)
"""Phases that may take minutes and print nothing until they are over."""


class _View:
    """A line for every step, and below them a bar with the phase that is going on."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._done = 0
        self._waits: set[str] = set()
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=steps)

    def __enter__(self) -> "_View":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def resume(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def phase(self, name: str) -> None:
        if not self._console.is_terminal and name in _WITHOUT_LINES and name not in self._waits:
            self._waits.add(name)
            self.say(f"{name.capitalize()} ...")
        self._progress.update(self._task, description=name)

    def step(self, metrics: StepMetrics) -> None:
        """Print what a step brought."""
        held_out, seeding = metrics.get("held_out"), metrics.get("seeding")
        if seeding is not None:
            self.say(
                f"        seed problems by the base: {seeding['kept']} of {seeding['wanted']} wanted, "
                f"from {seeding['proposals']} proposals"
            )
        if metrics["step"]:
            if self._done % 20 == 0:
                self._console.print("  step  solve   valid  teacher student  lines  tok/s  seconds", style="bold")
            self._done += 1
            self.say(
                f"{metrics['step']:>6}  {_share(metrics['solve_rate']['overall'])}  {_share(metrics['valid_rate'])}"
                f"  {_signed(metrics['reward']['teacher'])}   {_signed(metrics['reward']['student'])}"
                f"  {_number(metrics['complexity']['loc'])}  {metrics['tokens_per_second'] or 0:>6,.0f}"
                f"  {metrics['seconds']['total']:>6.1f}"
            )
        if held_out is not None:
            greedy = held_out.get("greedy")
            self.say(
                f"        held-out problems: {_share(held_out['solve_rate']['overall']).strip()} sampled"
                f" (± {_share(held_out.get('stderr')).strip()})"
                + (f", {_share(greedy['overall']).strip()} greedy" if greedy else "")
            )
        self._progress.update(self._task, completed=metrics["step"])


def _conclude(console: Console, store: ObjectStore, place: str, steps: int) -> None:
    """Print where the run stands and write its report."""
    records = [record for record in read_log(store, "metrics") if record.get("step")]
    if not records:
        return
    table = Table(title=f"{escape(place)}: {records[-1]['step']} of {steps} steps", title_justify="left", box=None)
    for heading in ("", "first", "last"):
        table.add_column(heading, justify="left" if not heading else "right")
    tenth = max(1, len(records) // 10)
    first, last = records[:tenth], records[-tenth:]
    for label, path in (
        ("solve rate in training", ("solve_rate", "overall")),
        ("valid proposals", ("valid_rate",)),
        ("teacher's reward", ("reward", "teacher")),
        ("student's reward", ("reward", "student")),
        ("lines of code", ("complexity", "loc")),
        ("AST depth", ("complexity", "ast_depth")),
        ("archive coverage", ("coverage",)),
        ("tokens a second", ("tokens_per_second",)),
    ):
        table.add_row(label, _mean_at(first, path), _mean_at(last, path))
    evaluations = [record for record in read_log(store, "metrics") if "held_out" in record]
    if len(evaluations) > 1:
        for label, kind in (("sampled", "solve_rate"), ("greedy", "greedy")):
            ends = (_mean_at([evaluations[end]], ("held_out", kind, "overall")) for end in (0, -1))
            table.add_row(f"held-out solve rate, {label}", *ends)
    console.print(table)
    if len(evaluations) > 1:
        console.print(
            "Teachers are paid for problems that students mostly fail, so the solve rate in training is a balance of "
            "power and may fall while students improve; progress is the rate on the held-out problems, which stay.",
            style="dim",
            soft_wrap=True,
        )
    store.put("report.html", render([read_run(store, place)]).encode())
    console.print(f"Report: {place}/report.html", soft_wrap=True, markup=False)


def _leave(console: Console, status: RunStatus, path: Path) -> None:
    """Write the status where it outlives this process; without the members where it would be cut.

    A run that is done stays done where this cannot be written.
    """
    text = json.dumps(status, separators=(",", ":"))
    if len(text.encode()) > _TERMINATION_BYTES:
        text = json.dumps({**status, "members": []}, separators=(",", ":"))
    try:
        # A termination log is a mount point, so no other file can take its name.
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        console.print(
            f"--leave-status {path}: cannot be written: {error.strerror or error}", soft_wrap=True, markup=False
        )


def _abandon(number: int, sentence: str, console: Console, group: "Group | None") -> None:
    """End all processes of the run at once, which goes on at its last checkpoint as after a kill."""
    if group is not None:
        group.lifeline.end(128 + number, sentence)
    # The signal may have come in the middle of a line to the same stream, which allows no second one inside.
    show_cursor = "\r\x1b[K\x1b[?25h" if console.is_terminal else ""
    with suppress(OSError):
        os.write(sys.stdout.fileno(), f"{show_cursor}{sentence}\n".encode())
    os._exit(128 + number)


def _at(record: Mapping[str, object], path: Sequence[str]) -> float | None:
    """Return the number at a path of a metrics object, None where there is none."""
    value: object = record
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _mean_at(records: Sequence[Mapping[str, object]], path: Sequence[str]) -> str:
    values = [value for record in records if (value := _at(record, path)) is not None]
    return f"{fmean(values):,.3f}" if values else "-"


def _share(value: float | None) -> str:
    return "     -" if value is None else f"{100 * value:5.1f}%"


def _signed(value: float | None) -> str:
    return "     -" if value is None else f"{value:+6.3f}"


def _number(value: float | None) -> str:
    return "    -" if value is None else f"{value:5.2f}"
