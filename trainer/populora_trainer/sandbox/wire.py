"""Cases and judgements as JSON, as they travel between a trainer and a sandbox service, and as files hold them."""

import json
import re
from collections.abc import Mapping
from typing import get_args

from populora_trainer.errors import PopuloraError
from populora_trainer.sandbox.verdicts import Case, Judgement, Kind, TaskType, Verdict


class WireError(PopuloraError):
    """A JSON value is not a case or not a judgement; the message names the field and what is allowed."""


# A string, closed or cut off at the end: it always matches where it begins, so that a search is linear.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def load_bounded(body: bytes, max_values: int) -> object:
    """Return what JSON text stands for, where it is of a bounded number of values.

    The size of a text says little about the size of what it stands for: `[],` takes 3 bytes and makes a list of 56. The
    number of values is known before any of them is made.

    Args:
        body: the text.
        max_values: most values, containers and their elements alike.

    Raises:
        WireError: the text is not JSON, or stands for more values.
    """
    too_many = f"the body has more than {max_values} values"
    # Each string has at least one quote that no backslash precedes, its first; most have two.
    if body.count(b'"') - body.count(b'\\"') > 2 * max_values:
        raise WireError(too_many)
    structure = _STRING.sub(b"", body)
    if sum(structure.count(sign) for sign in (b",", b"[", b"{")) > max_values:
        raise WireError(too_many)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from None


def case_to_json(case: Case) -> dict[str, object]:
    """Return a case as a JSON object; what is empty is left out."""
    record: dict[str, object] = {"id": case.id, "task": case.task, "program": case.program, "inputs": list(case.inputs)}
    if case.answer is not None:
        record["answer"] = case.answer
    if case.outputs:
        record["outputs"] = list(case.outputs)
    return record


def case_from_json(record: object) -> Case:
    """Return the case of a JSON object; a case of one input may call it `input`.

    Raises:
        WireError: it is not one, or its outputs do not match its inputs in number.
    """
    fields = _object(record, "a case", ("id", "task", "program", "input", "inputs", "answer", "outputs"))
    task: TaskType | None = next((known for known in get_args(TaskType) if known == fields.get("task")), None)
    if task is None:
        raise WireError(f"task is {_short(fields.get('task'))}, allowed are {', '.join(get_args(TaskType))}")
    if ("input" in fields) == ("inputs" in fields):
        raise WireError("a case has either input, a string, or inputs, a list of strings")
    inputs = (_text(fields, "input"),) if "input" in fields else _texts(fields, "inputs")
    outputs = _texts(fields, "outputs")
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
        raise WireError(f"{what} has the unknown field {_short(unknown[0])}; allowed are {', '.join(allowed)}")
    return record


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise WireError(f"{name} must be a string, this is {_short(value)}")
    return value


def _texts(fields: Mapping[str, object], name: str) -> tuple[str, ...]:
    values = fields.get(name, [])
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise WireError(f"{name} must be a list of strings")
    return tuple(values)


def _short(value: object) -> str:
    return json.dumps(value)[:80]
