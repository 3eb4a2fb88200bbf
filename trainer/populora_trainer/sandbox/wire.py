"""Cases and judgements as JSON, as they travel between a trainer and a sandbox service."""

from collections.abc import Mapping
from typing import get_args

from populora_trainer.errors import PopuloraError
from populora_trainer.sandbox.verdicts import Case, Judgement, Kind, TaskType, Verdict


class WireError(PopuloraError):
    """A JSON value is not a case or not a judgement; the message names the field and what is allowed."""


def case_to_json(case: Case) -> dict[str, object]:
    """Return a case as a JSON object; what is empty is left out."""
    record: dict[str, object] = {"id": case.id, "task": case.task, "program": case.program, "inputs": list(case.inputs)}
    if case.answer is not None:
        record["answer"] = case.answer
    if case.outputs:
        record["outputs"] = list(case.outputs)
    return record


def case_from_json(record: object) -> Case:
    """Return the case of a JSON object.

    Raises:
        WireError: it is not one, or its outputs do not match its inputs in number.
    """
    fields = _object(record, "a case", ("id", "task", "program", "inputs", "answer", "outputs"))
    task: TaskType | None = next((known for known in get_args(TaskType) if known == fields.get("task")), None)
    if task is None:
        raise WireError(f"task is {fields.get('task')!r}, allowed are {', '.join(get_args(TaskType))}")
    inputs, outputs = _texts(fields, "inputs"), _texts(fields, "outputs")
    if outputs and len(outputs) != len(inputs):
        raise WireError(f"outputs are {len(outputs)}, allowed are none or one for each of {len(inputs)} inputs")
    answer = None if fields.get("answer") is None else _text(fields, "answer")
    return Case(_text(fields, "id"), task, _text(fields, "program"), inputs, answer, outputs)


def judgement_to_json(judgement: Judgement) -> dict[str, object]:
    """Return a judgement as a JSON object."""
    return {
        "id": judgement.id,
        "verdict": str(judgement.verdict),
        "kind": judgement.kind,
        "inputs": list(judgement.inputs),
        "outputs": list(judgement.outputs),
        "detail": judgement.detail,
    }


def judgement_from_json(record: object) -> Judgement:
    """Return the judgement of a JSON object.

    Raises:
        WireError: it is not one.
    """
    fields = _object(record, "a judgement", ("id", "verdict", "kind", "inputs", "outputs", "detail"))
    kind: Kind | None = next((known for known in get_args(Kind) if known == fields.get("kind")), None)
    try:
        verdict = Verdict(_text(fields, "verdict"))
    except ValueError:
        verdict = None
    if kind is None or verdict is None:
        raise WireError(f"{fields.get('verdict')!r} of kind {fields.get('kind')!r} is no verdict of this version")
    texts = _texts(fields, "inputs"), _texts(fields, "outputs")
    return Judgement(_text(fields, "id"), verdict, kind, *texts, _text(fields, "detail"))


def _object(record: object, what: str, allowed: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(record, dict):
        raise WireError(f"{what} is a JSON object, this is {type(record).__name__}")
    unknown = [field for field in record if field not in allowed]
    if unknown:
        raise WireError(f"{what} has the unknown field {unknown[0]!r}; allowed are {', '.join(allowed)}")
    return record


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise WireError(f"{name} must be a string, this is {type(value).__name__}")
    return value


def _texts(fields: Mapping[str, object], name: str) -> tuple[str, ...]:
    values = fields.get(name, [])
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise WireError(f"{name} must be a list of strings")
    return tuple(values)
