"""`--set path=value`: changes to a manifest before it is checked."""

import re
from difflib import get_close_matches

from pydantic import JsonValue

from populora_api.documents import Document, Path, read_value, show_path
from populora_api.errors import Problem
from populora_api.schema import Schema, child_schema, properties, structural_schema

_PART = re.compile(r"([^.\[\]]+)((?:\[[0-9]+\])*)")


SHOWN = 120
"""Characters of an override that a problem repeats."""


def apply_override(document: Document, override: str) -> list[Problem]:
    """Change the document's value in place and return what is wrong with the override.

    Args:
        document: a manifest whose value is a mapping.
        override: `PATH=VALUE`. PATH is dotted, with list indices as `[0]` or `.0`; one that begins with no field of the
            resource means a field of spec. VALUE is YAML; `null` takes the field away, so that its default holds. No
            VALUE at all is refused, as a shell's variable that is not set leaves none.
    """
    source = f"--set {override if len(override) <= SHOWN else override[:SHOWN] + '...'}"
    name, equals, text = override.partition("=")
    path = _parse(name.strip())
    if not equals or path is None:
        return [Problem(source, "", "this is not of the form PATH=VALUE, such as training.steps=20")]
    try:
        value = read_value(text)
    except ValueError as error:
        return [Problem(source, show_path(path), str(error))]

    schema: Schema | None = structural_schema()
    parent: JsonValue = document.value
    for depth, part in enumerate(path):
        here, last = path[: depth + 1], depth == len(path) - 1
        assert schema is not None
        if isinstance(parent, list):
            index = int(part) if str(part).isdigit() else -1
            if not 0 <= index < len(parent) + last:
                items = f"{len(parent)} item" + ("" if len(parent) == 1 else "s")
                return [Problem(source, show_path(here), f"the list has {items}: an index counted from 0 is allowed")]
            path = (*path[:depth], index, *path[depth + 1 :])
            schema = schema.get("items", {})
            if last:
                parent[index : index + 1] = [] if value is None else [value]
            else:
                parent = parent[index]
        elif isinstance(parent, dict):
            key = str(part)
            known = child_schema(schema, key)
            if known is None and not schema.get("x-kubernetes-preserve-unknown-fields"):
                return [Problem(source, show_path(here), _elsewhere(here) or unknown_field(schema, key))]
            schema = known or {"x-kubernetes-preserve-unknown-fields": True}
            if last and value is None:
                parent.pop(key, None)
            elif last:
                parent[key] = value
            else:
                if parent.get(key) is None:
                    parent[key] = _copy(schema.get("default", [] if schema.get("type") == "array" else {}))
                parent = parent[key]
        else:
            return [Problem(source, show_path(here), f"{show_path(path[:depth])} is no mapping or list")]
    document.override(path, source)
    return []


def unknown_field(schema: Schema, key: str) -> str:
    """Say that a mapping has no field of this name, and which it has."""
    fields = list(properties(schema))
    if not fields:
        return "unknown field: there are no fields here"
    lowered = {field.lower(): field for field in fields}
    close = get_close_matches(key.lower().replace("_", "").replace("-", ""), lowered, n=1, cutoff=0.6)
    if close:
        return f"unknown field: did you mean {lowered[close[0]]}?"
    return f"unknown field: {', '.join(fields)} are allowed"


def _parse(text: str) -> Path | None:
    """Split `operators[0].weight` into its parts, from the root; None where it is no path."""
    path: list[str | int] = []
    for part in text.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            return None
        path.append(match[1])
        path.extend(int(index) for index in re.findall(r"[0-9]+", match[2]))
    if path[0] not in properties(structural_schema()):
        path.insert(0, "spec")
    return tuple(path)


def _elsewhere(path: Path) -> str | None:
    """Say where the field is, if it was named without the fields around it, as in `teachers=8`."""
    *parents, key = path
    if parents != ["spec"]:
        return None
    for name, schema in properties(properties(structural_schema())["spec"]).items():
        if str(key) in properties(schema):
            return f"unknown field: did you mean spec.{name}.{key}?"
    return None


def _copy(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
