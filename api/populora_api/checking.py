"""Every problem of one manifest, in the words that the command line shows.

The models decide what is wrong; the structural schema, generated from the same models, says what is allowed.
"""

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue, ValidationError

from populora_api.documents import Document, Path, show_path
from populora_api.errors import Problem
from populora_api.overrides import unknown_field
from populora_api.resource import API_VERSION, KIND, SERVER_METADATA, SKIP_RULES, PopulationRun
from populora_api.rules import broken_rules
from populora_api.schema import Schema, child_schema, properties, structural_schema

_MAX_PASSES = 32


@dataclass(frozen=True)
class _Error:
    """One of pydantic's errors at a place that the schema knows."""

    path: Path
    schema: Schema
    kind: str
    context: dict[str, Any]


def check(document: Document) -> tuple[PopulationRun | None, list[Problem]]:
    """Return the run that a document describes, or all of its problems in the order of their lines.

    Rules over several fields are checked even where other fields are wrong, unless they read a wrong one.
    """
    if document.value is None and document.problems:
        return None, document.problems
    if problem := _not_a_run(document):
        return None, [*document.problems, problem]
    value = _as_server_sees(document.value, structural_schema())
    value["metadata"] = _without(value.get("metadata"), SERVER_METADATA)
    unread = {problem.field for problem in document.problems}
    problems = list(document.problems)
    wrong = set(unread)
    run = None
    for turn in range(_MAX_PASSES):
        run, errors = _build(value)
        if run is not None:
            break
        for error in errors:
            name = show_path(error.path)
            if turn == 0 and not (error.kind == "missing" and name in unread):
                problems.append(Problem(document.where(error.path), name, _describe(error, value)))
            wrong.add(name)
        # Later turns only build a run from what is right, so that the rules can be checked too.
        for error in sorted(errors, key=lambda error: _sortable(error.path), reverse=True):
            _repair(value, error)
    if run is not None:
        shown = run.model_dump(mode="json", exclude_none=True)
        for rule in broken_rules(run.spec):
            if not any(_touches(f"spec.{field}", name) for field in rule.reads for name in wrong):
                path = ("spec", *rule.field.split("."))
                message = f"{show_value(_get(shown, path))} is not allowed: {rule.allowed}"
                problems.append(Problem(document.where(path), show_path(path), message))
    return (None if problems else run), sorted(problems, key=_line)


def show_value(value: JsonValue) -> str:
    """Return a short text for a value in a message."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)} item" + ("" if len(value) == 1 else "s")
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def allowed_values(schema: Schema) -> str:
    """Say in a few words which values a schema allows."""
    if schema.get("x-kubernetes-int-or-string"):
        return str(schema["x-kubernetes-validations"][0]["message"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    kind = schema.get("type")
    if kind == "boolean":
        return "true or false"
    if kind in ("integer", "number"):
        return ("an integer" if kind == "integer" else "a number") + _range_of(schema)
    if kind == "string":
        return _text_of(schema)
    if kind == "array":
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        count = f"{least} to {most} items" if least else f"at most {most} items"
        return f"a list of {count}, each {allowed_values(schema['items'])}"
    fields = ", ".join(properties(schema))
    return f"a mapping with the fields {fields}" if fields else "a mapping"


def _range_of(schema: Schema) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is None:
        return "" if most is None else f" of at most {most}"
    if not schema.get("exclusiveMinimum") and not schema.get("exclusiveMaximum"):
        return f" of at least {least}" if most is None else f" from {least} to {most}"
    text = f" above {least}" if schema.get("exclusiveMinimum") else f" of at least {least}"
    if most is not None:
        text += f" and below {most}" if schema.get("exclusiveMaximum") else f" and at most {most}"
    return text


def _text_of(schema: Schema) -> str:
    most = schema.get("maxLength")
    length = f"at most {most} characters" if most else "of any length"
    if rules := schema.get("x-kubernetes-validations"):
        return f"{rules[0]['message']}, {length}"
    if schema.get("format") == "date-time":
        return "a time such as 2026-01-31T12:00:00Z"
    return f"text of {length}" if most else "text"


def _not_a_run(document: Document) -> Problem | None:
    """Say why a document is no PopulationRun of this version at all, or return None."""
    value = document.value
    if not isinstance(value, dict):
        return Problem(document.where(()), "", f"{show_value(value)} is not allowed: a {KIND} is a mapping")
    for name, expected in (("kind", KIND), ("apiVersion", API_VERSION)):
        if (found := value.get(name)) != expected:
            what = "missing" if found is None else f"{show_value(found)} is not allowed"
            return Problem(document.where((name,)), name, f"{what}: {expected}")
    return None


def _build(value: dict[str, Any]) -> tuple[PopulationRun | None, list[_Error]]:
    try:
        text = json.dumps(value)
        return PopulationRun.model_validate_json(text, context=SKIP_RULES, by_alias=True, by_name=False), []
    except ValidationError as error:
        found: dict[Path, _Error] = {}
        for item in error.errors(include_url=False, include_input=False):
            unknown = item["type"] == "extra_forbidden"
            path, schema = _locate(item["loc"], keep_unknown=unknown)
            found.setdefault(path, _Error(path, schema, item["type"], item.get("ctx", {})))
        # A list whose items are wrong counts as too short as well.
        inner = {path[:depth] for path in found for depth in range(len(path))}
        return None, [error for path, error in found.items() if path not in inner]


def _locate(location: tuple[int | str, ...], keep_unknown: bool) -> tuple[Path, Schema]:
    """Return the part of pydantic's location that names a field, and the schema there (of the parent if unknown)."""
    schema = structural_schema()
    path: Path = ()
    for part in location:
        child = child_schema(schema, part)
        if child is None:
            return ((*path, part) if keep_unknown else path), schema
        path, schema = (*path, part), child
    return path, schema


def _describe(error: _Error, value: dict[str, Any]) -> str:
    if error.kind == "extra_forbidden":
        return unknown_field(error.schema, str(error.path[-1]))
    if error.kind == "missing":
        return f"missing: {allowed_values(error.schema)}"
    if error.kind == "unique":
        return f"{error.context['repeated']} is given twice: once is allowed"
    return f"{show_value(_get(value, error.path))} is not allowed: {allowed_values(error.schema)}"


def _repair(value: dict[str, Any], error: _Error) -> None:
    """Take a wrong value away, or put a valid one where a required one is missing."""
    *parents, last = error.path
    container: Any = _get(value, parents)
    if error.kind == "missing":
        container[last] = deepcopy(error.schema.get("example", {}))
    elif isinstance(container, dict):
        container.pop(last, None)
    else:
        del container[last]


def _as_server_sees(value: Any, schema: Schema | None) -> Any:
    """Return a copy without the fields whose value is null: the API server drops them and fills in the default."""
    if schema is None or schema.get("x-kubernetes-preserve-unknown-fields"):
        return deepcopy(value)
    if isinstance(value, dict):
        children = ((key, item, child_schema(schema, key)) for key, item in value.items())
        return {key: _as_server_sees(item, child) for key, item, child in children if item is not None or child is None}
    if isinstance(value, list):
        return [_as_server_sees(item, child_schema(schema, index)) for index, item in enumerate(value)]
    return value


def _without(mapping: Any, keys: frozenset[str]) -> Any:
    return {key: item for key, item in mapping.items() if key not in keys} if isinstance(mapping, dict) else mapping


def _get(value: Any, path: Iterable[str | int]) -> Any:
    for part in path:
        value = value[int(part)] if isinstance(value, list) else value.get(part)
        if value is None:
            return None
    return value


def _touches(one: str, other: str) -> bool:
    """Whether one field is the other or contains it."""
    shorter, longer = sorted((one, other), key=len)
    return longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}["))


def _sortable(path: Path) -> tuple[tuple[bool, int | str], ...]:
    return tuple((isinstance(part, int), part) for part in path)


def _line(problem: Problem) -> int:
    line = problem.source.rpartition(":")[2]
    return int(line) if line.isdigit() else 0
