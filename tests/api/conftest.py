"""A stand-in for the API server: judges a manifest by nothing but the generated CRD.

Schema checks are jsonschema's (OpenAPI 3.0 spells bounds as Draft 4 does), CEL is translated to Python. The two share
no code with the models, so agreement of the verdicts means that the CRD says what the models say.
"""

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from populora_api import custom_resource_definition

ROOT = Path(__file__).parents[2]

# Helpers that are no tests stand beside them: `bad_manifests`.
sys.path.insert(0, str(Path(__file__).parent))


class ApiServer:
    """Applies defaults and validates as kube-apiserver does for a structural schema."""

    def __init__(self) -> None:
        self.schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def admit(self, manifest: Any) -> tuple[Any, list[str]]:
        """Return the manifest with defaults and the paths of what is refused."""
        value = copy.deepcopy(manifest)
        if not isinstance(value, dict):
            return value, [""]
        unknown = list(_unknown(value, self.schema, ""))
        _drop_nulls(value, self.schema)
        _fill_defaults(value, self.schema)
        wrong = [
            _path(error.absolute_path) for error in jsonschema.Draft4Validator(_draft4(self.schema)).iter_errors(value)
        ]
        if not wrong:
            wrong = [*_repeated(value, self.schema, ""), *_broken_cel(value, self.schema, "")]
        return value, unknown + wrong


def _path(parts: Any) -> str:
    return ".".join(map(str, parts))


def _draft4(schema: Any) -> Any:
    """Spell int-or-string as a union, the one thing that Draft 4 says another way."""
    if isinstance(schema, list):
        return [_draft4(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _draft4(value) for key, value in schema.items()}
    if plain.get("x-kubernetes-int-or-string") is True:
        plain["type"] = ["integer", "string"]
    return plain


def _children(value: Any, schema: Any, path: str) -> Any:
    if isinstance(value, dict):
        for key, item in value.items():
            child = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
            if child:
                yield key, item, child, f"{path}.{key}".lstrip(".")
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield index, item, schema["items"], f"{path}.{index}"


def _unknown(value: Any, schema: Any, path: str) -> Any:
    if path == "metadata" or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, dict) and schema.get("type") == "object" and "additionalProperties" not in schema:
        yield from (f"{path}.{key}".lstrip(".") for key in value if key not in schema.get("properties", {}))
    for _, item, child, name in _children(value, schema, path):
        yield from _unknown(item, child, name)


def _drop_nulls(value: Any, schema: Any) -> None:
    for key, item, child, _ in list(_children(value, schema, "")):
        if item is None and isinstance(value, dict):
            del value[key]
        else:
            _drop_nulls(item, child)


def _fill_defaults(value: Any, schema: Any) -> None:
    if isinstance(value, dict):
        for key, child in schema.get("properties", {}).items():
            if key not in value and "default" in child:
                value[key] = copy.deepcopy(child["default"])
    for _, item, child, _ in _children(value, schema, ""):
        _fill_defaults(item, child)


def _repeated(value: Any, schema: Any, path: str) -> Any:
    kind = schema.get("x-kubernetes-list-type")
    if isinstance(value, list) and kind in ("set", "map"):
        keys = schema.get("x-kubernetes-list-map-keys", [])
        seen = [json.dumps([item.get(key) for key in keys] if kind == "map" else item) for item in value]
        if len(seen) != len(set(seen)):
            yield path
    for _, item, child, name in _children(value, schema, path):
        yield from _repeated(item, child, name)


class _View:
    """A JSON object whose fields are attributes, for translated CEL."""

    def __init__(self, fields: dict[str, Any]):
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        return view(self._fields[name])

    def __contains__(self, name: str) -> bool:
        return name in self._fields


def view(value: Any) -> Any:
    if isinstance(value, dict):
        return _View(value)
    return [view(item) for item in value] if isinstance(value, list) else value


def _re2_search(regex: str, text: str) -> bool:
    """Search as RE2 does, whose `$` is the end of the text and not the place before a last newline."""
    return bool(re.search(regex.replace("$", r"\Z"), text, re.ASCII))


def evaluate_cel(rule: str, value: Any) -> bool:
    """Evaluate the part of CEL that the rules use."""
    literals: list[str] = []

    def keep(match: re.Match[str]) -> str:
        literals.append(match[1].replace("\\\\", "\\"))
        return f"LITERALS[{len(literals) - 1}]"

    text = re.sub(r"'((?:[^'\\]|\\.)*)'", keep, rule)
    text = re.sub(r"([\w.]+)\.exists\((\w+), ([^()]*)\)", r"any(\3 for \2 in \1)", text)
    text = re.sub(r"([\w.]+)\.matches\(", r"search(\1, ", text)
    text = re.sub(r"has\(([\w.]+)\.(\w+)\)", r"('\2' in \1)", text)
    text = text.replace("||", " or ").replace("&&", " and ").replace(".startsWith(", ".startswith(")
    text = re.sub(r"!(?!=)", " not ", text).replace("size(", "len(")
    names = {"self": view(value), "LITERALS": literals, "search": lambda text, regex: _re2_search(regex, text)}
    types = {"type": type, "int": int, "string": str}
    result = eval(text, {"__builtins__": {"len": len, "any": any, **types}, **names})
    assert isinstance(result, bool), rule
    return result


def _broken_cel(value: Any, schema: Any, path: str) -> Any:
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"] and not evaluate_cel(rule["rule"], value):
            yield path + rule.get("fieldPath", "")
    for _, item, child, name in _children(value, schema, path):
        yield from _broken_cel(item, child, name)


@pytest.fixture(scope="session")
def server() -> ApiServer:
    return ApiServer()


@pytest.fixture(scope="session")
def cel() -> Callable[[str, Any], bool]:
    return evaluate_cel


@pytest.fixture
def manifest() -> dict[str, Any]:
    """A valid manifest that says no more than it must."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "manifests" / "minimal.yaml").read_text())
    del loaded["spec"]["training"]
    return loaded


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    """Write a manifest, given as text or values, and return its path."""

    def write(content: Any, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
        return path

    return write
