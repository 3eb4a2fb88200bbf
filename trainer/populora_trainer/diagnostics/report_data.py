"""A run's files as the report needs them, read from a run that may still be training."""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import yaml

from populora_trainer.errors import PopuloraError, StorageError
from populora_trainer.population.lineage import Relative, family
from populora_trainer.population.members import order_key
from populora_trainer.storage.logs import LOG_NAMES, LogName, log_key, read_log
from populora_trainer.storage.run import open_store
from populora_trainer.storage.store import ObjectStore

HARDEST = 12
_HELD_BACK = 256
_CALLS = 3
_SHOWN_LINES = 5

Record = Mapping[str, object]

# What the run card shows: a label and where the value stands in the manifest's spec.
_CARD: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Mode", ("mode",)),
    ("Base model", ("baseModel", "uri")),
    ("Teachers", ("population", "teachers")),
    ("Students", ("population", "students")),
    ("Seed", ("population", "seed")),
    ("LoRA rank", ("adapter", "rank")),
    ("LoRA alpha", ("adapter", "alpha")),
    ("Steps", ("training", "steps")),
    ("Learning rate", ("training", "learningRate")),
    ("Teachers' learning rate", ("training", "teacherLearningRate")),
    ("Weight decay", ("training", "weightDecay")),
    ("Frozen teachers", ("training", "freezeTeachers")),
    ("Problems per match-up", ("tasks", "problemsPerMatchup")),
    ("Rollouts per problem", ("training", "rolloutsPerProblem")),
    ("Whitening", ("training", "whitening")),
    ("Rewards", ("rewards", "preset")),
    ("Novelty penalty", ("tasks", "noveltyPenalty")),
    ("Seed problems", ("tasks", "seedProblems")),
    ("Evolution every", ("evolution", "everySteps")),
)
_OFF_AT_0 = ("Weight decay", "Novelty penalty", "Seed problems")


@dataclass(frozen=True, slots=True)
class SolvedProblem:
    """A problem as the report shows it; what its record lacks is empty.

    Attributes:
        solve_rate: in (0, 1].
        task, step, teacher, student, program, message: as in `records.ProblemRecord`.
        calls: the first inputs with their outputs; of code_f those that the student saw.
        hidden: of code_f the first inputs, with their outputs, that judged its program.
    """

    solve_rate: float
    task: str
    step: int
    teacher: str
    student: str
    program: str
    calls: tuple[tuple[str, str], ...]
    hidden: tuple[tuple[str, str], ...]
    message: str


@dataclass(frozen=True, slots=True)
class RunData:
    """What a report shows of one run.

    Attributes:
        name: the manifest's name, or the folder's.
        location: where it was read.
        card: label and value of the run's main settings.
        metrics: lines of metrics.jsonl in order of steps, one a step.
        matrix: (student's place, teacher's place) to (sum of solve rates, valid problems).
        proposals: lines of problems.jsonl that were read.
        held_out: those of them whose program is kept for evaluation.
        hardest: solved problems with the lowest solve rates, hardest first.
        relatives: everybody that evolution.jsonl names.
        notes: what is missing, as sentences.
    """

    name: str
    location: str
    card: tuple[tuple[str, str], ...]
    metrics: list[Record]
    matrix: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)
    proposals: int = 0
    held_out: int = 0
    hardest: list[SolvedProblem] = field(default_factory=list)
    relatives: Mapping[str, Relative] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load_run(place: str | Path) -> RunData:
    """Read the run in a folder or under a URI; what is missing or damaged becomes a note where the rest can be shown.

    Raises:
        PopuloraError: there is no such folder, or it holds neither run.yaml nor metrics.jsonl.
    """
    store = open_store(str(place))
    if not store.exists("run.yaml") and not store.exists("metrics.jsonl"):
        raise PopuloraError(f"{place}: not a run, it holds neither run.yaml nor metrics.jsonl.")
    return read_run(store, str(place))


def read_run(store: ObjectStore, place: str) -> RunData:
    """Read the run in a store, which is called `place` in the report."""
    notes = [
        f"{name} is missing: {meaning}."
        for name, meaning in (
            ("run.yaml", "the settings are not known"),
            ("metrics.jsonl", "there are no curves"),
            ("matchups.jsonl", "there is no solve matrix"),
            ("problems.jsonl", "no problems can be shown"),
        )
        if not store.exists(name)
    ]
    manifest = _manifest(store, notes)
    damaged: dict[LogName, list[int]] = {name: [] for name in LOG_NAMES}
    by_step: dict[float, Record] = {}
    for record in read_log(store, "metrics", damaged["metrics"].append):
        step = number(record, "step")
        if step is not None:
            by_step[step] = record
    metrics = [by_step[step] for step in sorted(by_step)]
    if not metrics:
        notes.append("No step has been completed yet.")
    proposals, held_out, hardest = _hardest(read_log(store, "problems", damaged["problems"].append))
    matrix = _matrix(read_log(store, "matchups", damaged["matchups"].append))
    relatives = _family(read_log(store, "evolution", damaged["evolution"].append), notes)
    notes += [_left_out(log_key(log), lines) for log, lines in damaged.items() if lines]
    return RunData(
        name=str(_at(manifest, "metadata", "name") or PurePath(store.location).name),
        location=place,
        card=_card(manifest),
        metrics=metrics,
        matrix=matrix,
        proposals=proposals,
        held_out=held_out,
        hardest=hardest,
        relatives=relatives,
        notes=tuple(notes),
    )


def _left_out(key: str, lines: list[int]) -> str:
    shown = ", ".join(map(str, lines[:_SHOWN_LINES])) + (", ..." if len(lines) > _SHOWN_LINES else "")
    many = len(lines) > 1
    return f"{key}: line{'s' * many} {shown} {'are' if many else 'is'} no JSON object, and left out."


def number(record: object, *path: str) -> float | None:
    """Return the number at a path of nested objects, or None where there is none."""
    value = _at(record, *path)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def place(name: str) -> str:
    """Return the line of succession that a member's name belongs to: t0 for t0-g7."""
    return name.partition("-g")[0]


def role_of(name: str) -> str:
    """Return teacher, student or agent, by a member's name."""
    return {"t": "teacher", "s": "student"}.get(name[:1], "agent")


def order(name: str) -> tuple[str, int, int]:
    """Return a sort key by number; names that no run makes are sorted as text."""
    try:
        return order_key(name)
    except (ValueError, IndexError):
        return name, 0, 0


def seniority(name: str) -> tuple[bool, tuple[str, int, int]]:
    """Teachers first, then by number."""
    return role_of(name) != "teacher", order(name)


def _at(value: object, *path: str) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _manifest(store: ObjectStore, notes: list[str]) -> object:
    if not store.exists("run.yaml"):
        return None
    try:
        return yaml.safe_load(store.get("run.yaml").decode())
    except (yaml.YAMLError, StorageError, UnicodeDecodeError):
        notes.append("run.yaml cannot be read: the settings are not known.")
        return None


def _card(manifest: object) -> tuple[tuple[str, str], ...]:
    entries = []
    for label, path in _CARD:
        value = _at(manifest, "spec", *path)
        if value is None or value is False or (label in _OFF_AT_0 and not value):
            continue
        if label == "Evolution every":
            value = f"{value} steps"
        entries.append((label, "yes" if value is True else str(value)))
    return tuple(entries)


def _matrix(matchups: Iterable[Record]) -> dict[tuple[str, str], tuple[float, int]]:
    cells: dict[tuple[str, str], tuple[float, int]] = {}
    for matchup in matchups:
        key = (place(str(matchup.get("student"))), place(str(matchup.get("teacher"))))
        tasks = matchup.get("tasks")
        for game in tasks.values() if isinstance(tasks, Mapping) else ():
            rate, valid = number(game, "solve_rate"), number(game, "valid")
            if rate is not None and valid:
                total, count = cells.get(key, (0.0, 0))
                cells[key] = (total + rate * valid, count + int(valid))
    return cells


def _hardest(problems: Iterator[Record]) -> tuple[int, int, list[SolvedProblem]]:
    """Count the problems and the held-out ones, and keep the hardest solved ones, one for each program."""
    seen, held_out, kept = 0, 0, dict[str, Record]()  # the log is not held whole
    for problem in problems:
        seen += 1
        held_out += problem.get("verdict") == "held_out"
        rate = number(problem, "solve_rate")
        if rate is None or rate <= 0 or not isinstance(problem.get("program"), str):
            continue
        program = str(problem["program"])
        if program not in kept or _hardness(problem) < _hardness(kept[program]):
            kept[program] = problem
        if len(kept) > _HELD_BACK:
            kept = {str(one["program"]): one for one in heapq.nsmallest(HARDEST, kept.values(), key=_hardness)}
    return seen, held_out, [_shown(problem) for problem in heapq.nsmallest(HARDEST, kept.values(), key=_hardness)]


def _shown(problem: Record) -> SolvedProblem:
    pairs = tuple(zip(_texts(problem, "inputs"), _texts(problem, "outputs"), strict=False))
    seen = int(number(problem, "shown") or 0) or len(pairs)
    return SolvedProblem(
        solve_rate=number(problem, "solve_rate") or 0.0,
        task=str(problem.get("task", "")),
        step=int(number(problem, "step") or 0),
        teacher=str(problem.get("teacher", "?")),
        student=str(problem.get("student", "?")),
        program=str(problem.get("program", "")),
        calls=pairs[:seen][:_CALLS],
        hidden=pairs[seen:][:_CALLS],
        message=str(problem.get("message") or ""),
    )


def _texts(record: Record, key: str) -> list[str]:
    value = record.get(key)
    return [str(entry) for entry in value] if isinstance(value, list) else []


def _hardness(problem: Record) -> tuple[float, float, float]:
    """Lowest solve rate first; among equals the more complex program, then the later one."""
    size = sum(number(problem, "complexity", name) or 0.0 for name in ("ast_depth", "cyclomatic", "loc", "variables"))
    return number(problem, "solve_rate") or 0.0, -size, -(number(problem, "step") or 0.0)


def _family(records: Iterator[Record], notes: list[str]) -> Mapping[str, Relative]:
    try:
        return family(records)
    except (KeyError, ValueError, TypeError, IndexError):
        notes.append("evolution.jsonl has lines that cannot be read: the lineage is not shown.")
        return {}
