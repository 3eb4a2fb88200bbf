"""YAML text to plain values, each with the line it stands in, read as kubectl reads it.

kubectl resolves scalars by YAML 1.1 as Go spells it, which differs from PyYAML: `5e-5` is a number, `12:30` and dates
are text. Nothing here raises for bad text; what is wrong comes back as problems.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

import yaml
from pydantic import JsonValue

from populora_api.errors import Problem

Path: TypeAlias = tuple[str | int, ...]
"""Where a value is: field names and list indices from the document's root."""

MAX_BYTES = 1 << 18
MAX_VALUES = 20_000
MAX_DEPTH = 64

_INT = re.compile(r"[-+]?(0[bB][01_]+|0[oO]?[0-7_]+|0[xX][0-9a-fA-F_]+|[1-9][0-9_]*|0)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BOOLS = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "on", "On", "ON", "true", "True", "TRUE"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "off", "Off", "OFF", "false", "False", "FALSE"), False),
}
_SURROGATE = re.compile("[\ud800-\udfff]")
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_TAG = "tag:yaml.org,2002:"
_PLAIN = "?"


@dataclass
class Document:
    """One YAML document.

    Attributes:
        source: the file's name as it is shown.
        line: first line of the document, counted from 1.
        value: its content as JSON values.
        lines: the line of every value; of a field, the line of its name.
        overridden: for values that do not come from the file, where they come from.
        problems: what could not be read.
    """

    source: str
    line: int
    value: JsonValue = None
    lines: dict[Path, int] = field(default_factory=dict)
    overridden: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def where(self, path: Path) -> str:
        """Return `FILE:LINE` of the value, or of the nearest value around it."""
        while path and path not in self.lines and path not in self.overridden:
            path = path[:-1]
        return self.overridden.get(path) or f"{self.source}:{self.lines.get(path, self.line)}"

    def override(self, path: Path, source: str) -> None:
        """Note that the value comes from elsewhere than the file."""
        self.lines = {known: line for known, line in self.lines.items() if known[: len(path)] != path}
        self.overridden = {known: text for known, text in self.overridden.items() if known[: len(path)] != path}
        self.overridden[path] = source


class _Composer(yaml.SafeLoader):
    """Builds nodes only; plain scalars get the tag `?` and are resolved by `_Reader`."""

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth > MAX_DEPTH:
            problem = f"it nests too deeply, at most {MAX_DEPTH} levels are allowed"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: tuple[bool, bool]) -> str:
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else f"{_TAG}str"
        return f"{_TAG}seq" if kind is yaml.SequenceNode else f"{_TAG}map"


class _UnreadableError(Exception):
    """Stops reading a document: (line, field, message)."""

    def __init__(self, line: int, field: str, message: str):
        self.line, self.field, self.message = line, field, message


def read_documents(text: bytes, source: str) -> tuple[list[Document], list[Problem]]:
    """Read all YAML documents of a file; empty documents are left out.

    Args:
        text: the file's bytes.
        source: the name to show in problems.

    Returns:
        The documents, and the problems because of which the rest of the file could not be read.
    """
    if len(text) > MAX_BYTES:
        return [], [Problem(source, "", f"this file is too large: at most {MAX_BYTES} bytes are allowed")]
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        return [], [Problem(f"{source}:{line}", "", "this is no UTF-8 text: a manifest is a YAML text file")]
    documents: list[Document] = []
    try:
        for node in _compose(_without_tabs(decoded)):
            documents.append(_Reader(source, node).document)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        reason = " ".join(part for part in (error.context, error.problem) if part)
        return documents, [Problem(f"{source}:{line}", "", f"this is no YAML: {reason}")]
    except yaml.reader.ReaderError as error:
        line = decoded.count("\n", 0, error.position) + 1
        return documents, [Problem(f"{source}:{line}", "", "this is no YAML: a control character is not allowed")]
    return documents, []


def read_value(text: str) -> JsonValue:
    """Read one YAML value such as the right side of `--set`.

    Raises:
        ValueError: with what is wrong; a text without any value, such as an empty one, is wrong too.
    """
    documents, problems = read_documents(text.encode("utf-8", "surrogateescape"), "")
    problems += [problem for document in documents for problem in document.problems]
    if problems:
        raise ValueError(problems[0].message)
    if len(documents) > 1:
        raise ValueError("several YAML documents are not allowed: one value")
    if not documents:
        raise ValueError("there is no value: null is allowed, which takes the field away so that its default holds")
    return documents[0].value


def write_yaml(value: JsonValue) -> str:
    """Return plain values as YAML that kubectl and `read_documents` read back as they are."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


_LINE_BREAKS = frozenset("\x85\u2028\u2029")


# The same dumper in C where PyYAML was built with it: a controller writes a manifest for every look at a run.
_Safe: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_Safe):  # type: ignore[misc,valid-type]
    """Quotes the texts that Go's YAML takes for numbers or booleans and PyYAML does not, such as `1e3` and `y`."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    style: str | None = None
    if not _LINE_BREAKS.isdisjoint(text):
        # Only double quotes write these as escapes; anywhere else YAML folds them as it does any line break.
        style = '"'
    elif any(_READERS[kind](text) is not _NO_MATCH for kind in ("null", "bool", "int", "float")):
        style = "'"
    node: yaml.Node = dumper.represent_scalar(f"{_TAG}str", text, style=style)
    return node


_Dumper.add_representer(str, _represent_text)


def _without_tabs(text: str) -> str:
    """Return JSON with spaces for tabs, which YAML allows nowhere but in text; other text stays as it is.

    No text of JSON contains a tab, so that each is indentation.
    """
    if "\t" not in text or not text.lstrip().startswith(("{", "[")):
        return text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text.replace("\t", " ")


def _compose(text: str) -> Iterator[yaml.Node]:
    """Yield the root node of every document that has content."""
    loader = _Composer(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            # Only what is not written is empty: a quoted or tagged text without characters is a value.
            if node is not None and not (isinstance(node, yaml.ScalarNode) and (node.tag, node.value) == (_PLAIN, "")):
                yield node
    finally:
        loader.dispose()


class _Reader:
    """Turns one document's nodes into values and remembers their lines."""

    def __init__(self, source: str, root: yaml.Node):
        self.document = Document(source, root.start_mark.line + 1)
        self._count = 0
        self._open: list[int] = []
        try:
            self.document.value = self._read(root, ())
        except _UnreadableError as stop:
            self._report(stop.line, stop.field, stop.message)

    def _report(self, line: int, field: str, message: str) -> None:
        self.document.problems.append(Problem(f"{self.document.source}:{line}", field, message))

    def _read(self, node: yaml.Node, path: Path) -> JsonValue:
        line = node.start_mark.line + 1
        self.document.lines.setdefault(path, line)
        self._count += 1
        if self._count > MAX_VALUES:
            raise _UnreadableError(line, "", f"more than {MAX_VALUES} values (aliases count each time) are not allowed")
        if len(path) > MAX_DEPTH:
            raise _UnreadableError(line, "", f"this nests too deeply: at most {MAX_DEPTH} levels are allowed")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            raise _UnreadableError(line, show_path(path), "an alias inside its own anchor is not allowed")
        self._open.append(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                self._refuse_tag(node, path, "seq")
                return [self._read(item, (*path, index)) for index, item in enumerate(node.value)]
            self._refuse_tag(node, path, "map")
            return self._mapping(node, path)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.Node, path: Path) -> dict[str, JsonValue]:
        read: dict[str, JsonValue] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._report(line, show_path(path), "a mapping or list as a field name is not allowed: text")
                continue
            key = _SURROGATE.sub("?", key_node.value)
            if key == "<<" and not key_node.style:
                merged.extend(value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node])
                continue
            here = (*path, key)
            if key in read:
                first = self.document.lines[here]
                self._report(line, show_path(here), f"given twice, first in line {first}: once is allowed")
                continue
            self.document.lines[here] = line
            read[key] = self._read(value_node, here)
        for other in merged:
            value = self._read(other, path)
            if not isinstance(value, dict):
                self._report(other.start_mark.line + 1, show_path(path), "<< takes a mapping or a list of mappings")
                continue
            read = {**value, **read}
        return read

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> JsonValue:
        line = node.start_mark.line + 1
        kinds = ("null", "bool", "int", "float", "str") if node.tag == _PLAIN else (node.tag.removeprefix(_TAG),)
        for kind in kinds:
            if kind in _READERS and (value := _READERS[kind](node.value)) is not _NO_MATCH:
                if isinstance(value, float) and not math.isfinite(value):
                    self._report(line, show_path(path), f"{node.value[:60]} is not allowed: a finite number")
                    return None
                if isinstance(value, str) and _SURROGATE.search(value):
                    self._report(line, show_path(path), "half of a surrogate pair is not allowed: Unicode text")
                    return None
                return value
        self._report(
            line, show_path(path), f"{node.value[:60]!r} with the tag {_short(node.tag)} is not allowed: no tag"
        )
        return None

    def _refuse_tag(self, node: yaml.Node, path: Path, kind: str) -> None:
        if node.tag != f"{_TAG}{kind}":
            self._report(
                node.start_mark.line + 1, show_path(path), f"the tag {_short(node.tag)} is not allowed: no tag"
            )


def _short(tag: str) -> str:
    """Return a tag as it was written."""
    return tag.replace(_TAG, "!!", 1) if tag.startswith(_TAG) else tag


def show_path(path: Path) -> str:
    """Return `spec.evolution.operators[0].weight` for a path; names with dots are in brackets too."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) or "." in part else f".{part}" if text else part
    return text


class _NoMatch(Enum):
    """Says that a scalar's text is of another type."""

    NO_MATCH = auto()


_NO_MATCH = _NoMatch.NO_MATCH


def _read_int(text: str) -> int | float | _NoMatch:
    if not _INT.fullmatch(text):
        return _NO_MATCH
    digits = text.replace("_", "").lower()
    if re.fullmatch(r"[-+]?0[0-7]+", digits):
        digits = re.sub(r"^([-+]?)0", r"\g<1>0o", digits)
    try:
        value = int(digits, 0)
        # The API server reads longer integers as floats, and 400 digits as an error.
        return value if abs(value) < 2**63 else float(value)
    except ValueError:  # 0x without digits, or more digits than Python converts
        return _NO_MATCH
    except OverflowError:
        return math.inf


def _read_float(text: str) -> float | int | _NoMatch:
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", ""))
    if not _FLOAT.fullmatch(text):
        return _NO_MATCH
    value = float(text.replace("_", ""))
    # kubectl hands 5.0 and 1e3 to the API server as the JSON numbers 5 and 1000, which are integers.
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


_READERS: dict[str, Callable[[str], JsonValue | _NoMatch]] = {
    "null": lambda text: None if text in _NULLS else _NO_MATCH,
    "bool": lambda text: _BOOLS.get(text, _NO_MATCH),
    "int": _read_int,
    "float": _read_float,
    "str": lambda text: text,
}
