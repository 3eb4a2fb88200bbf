"""Manifests on disk: read one to run it, check many, write the resolved form, compare two."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from populora_api.checking import check
from populora_api.documents import MAX_BYTES, Document, read_documents, write_yaml
from populora_api.errors import ManifestError, Problem
from populora_api.fields import shortest_numbers
from populora_api.overrides import apply_override
from populora_api.resource import KIND, PopulationRun
from populora_api.rules import IMMUTABLE

STANDARD_INPUT = "-"


def load_manifest(
    path: str | Path, overrides: Sequence[str] = (), *, output: str | Path | None = None
) -> PopulationRun:
    """Read the one PopulationRun of a file, with defaults filled in.

    Args:
        path: the YAML file; `-` is standard input.
        overrides: `PATH=VALUE` each, applied in order before the manifest is checked.
        output: folder of a local run. It takes the place of a `file://` storage.uri and of a missing storage. Another
            storage.uri stays, and one that an override gives.

    Raises:
        ManifestError: listing every problem.
    """
    return parse_manifest(read_text(path), name_of(path), overrides, output=output)


def parse_manifest(
    text: bytes, source: str, overrides: Sequence[str] = (), *, output: str | Path | None = None
) -> PopulationRun:
    """Do what `load_manifest` does for YAML that is not in a file, such as a stored run.yaml.

    Args:
        text: the YAML.
        source: the name to show in problems.
        overrides: as in `load_manifest`.
        output: as in `load_manifest`.

    Raises:
        ManifestError: listing every problem.
    """
    return _only_run(source, *read_documents(text, source), overrides, output)


def _only_run(
    source: str,
    documents: list[Document],
    problems: list[Problem],
    overrides: Sequence[str],
    output: str | Path | None,
) -> PopulationRun:
    """Return the run of the one document there is."""
    if not documents and not problems:
        problems = [_empty(source)]
    if len(documents) > 1:
        where = documents[1].where(())
        problems.append(Problem(where, "", f"{len(documents)} YAML documents are not allowed: one {KIND}"))
    if problems:
        raise ManifestError([*(problem for document in documents for problem in document.problems), *problems])
    (document,) = documents
    if isinstance(document.value, dict):
        for override in overrides:
            problems += apply_override(document, override)
        if output is not None:
            _store_at(document, Path(output).absolute().as_uri())
    run, found = check(document)
    problems += found
    if run is None or problems:
        raise ManifestError(problems)
    return run


def check_file(path: str | Path) -> tuple[list[PopulationRun], list[Problem]]:
    """Return the valid PopulationRuns of a file and every problem of it; documents of other kinds are problems."""
    documents, unreadable = read_manifest(path)
    if not documents and not unreadable:
        unreadable = [_empty(name_of(path))]
    checked = [check(document) for document in documents]
    problems = [problem for _, found in checked for problem in found]
    return [run for run, _ in checked if run is not None], [*problems, *unreadable]


def read_manifest(path: str | Path) -> tuple[list[Document], list[Problem]]:
    """Read the YAML documents of a file, `-` being standard input; a file that cannot be read is a problem."""
    try:
        return read_documents(read_text(path), name_of(path))
    except ManifestError as error:
        return [], list(error.problems)


def read_text(path: str | Path) -> bytes:
    """Return a manifest's bytes, one more than are allowed at most; a pipe gives them once only.

    Args:
        path: the file; `-` is standard input.

    Raises:
        ManifestError: it cannot be read.
    """
    try:
        if str(path) == STANDARD_INPUT:
            return sys.stdin.buffer.read(MAX_BYTES + 1)
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ManifestError([Problem(name_of(path), "", f"cannot be read: {reason}")]) from error


def name_of(path: str | Path) -> str:
    """Return what a manifest's file is called in problems."""
    return "<stdin>" if str(path) == STANDARD_INPUT else str(path)


def resolved(run: PopulationRun) -> dict[str, JsonValue]:
    """Return the run as plain values with all defaults, in the order of the models; status left out."""
    plain: dict[str, JsonValue] = shortest_numbers(run.model_dump(mode="json", exclude_none=True, exclude={"status"}))
    return plain


def resolved_yaml(run: PopulationRun) -> str:
    """Return the run as YAML with all defaults, equal for equal runs; `load_manifest` reads it back."""
    return write_yaml(resolved(run))


def identity(run: PopulationRun) -> dict[str, JsonValue]:
    """Return the fields of spec that cannot change once a run exists, by name."""
    spec = resolved(run)["spec"]
    assert isinstance(spec, dict)
    return {name: spec[name] for name in IMMUTABLE}


def leaves(value: JsonValue, path: str) -> dict[str, JsonValue]:
    """Return every field that is no mapping, by path; lists are compared as a whole."""
    if not isinstance(value, dict):
        return {path: value}
    return {name: leaf for key, item in value.items() for name, leaf in leaves(item, f"{path}.{key}").items()}


@dataclass(frozen=True)
class Change:
    """A field of spec whose value differs between a stored run and a manifest.

    Attributes:
        field: its path, e.g. `spec.population.seed`.
        before: the stored value, None where there is none.
        after: the manifest's value.
        immutable: whether the run cannot go on with it.
    """

    field: str
    before: JsonValue
    after: JsonValue
    immutable: bool

    def __str__(self) -> str:
        before, after = ("no value" if value is None else json.dumps(value) for value in (self.before, self.after))
        if self.immutable:
            return f"{self.field} is immutable: the run has {before}, the manifest says {after}"
        return f"{self.field}: {before} -> {after}"


def changes(stored: PopulationRun, manifest: PopulationRun, *, local: bool = False) -> list[Change]:
    """Return what differs in spec, immutable fields first.

    Args:
        stored: the run as it was last resolved, e.g. from run.yaml.
        manifest: the run as it is asked for now.
        local: leave storage out, since a local run's folder may be moved or named another way.
    """
    before, after = leaves(resolved(stored)["spec"], "spec"), leaves(resolved(manifest)["spec"], "spec")
    different = (field for field in {**before, **after} if before.get(field) != after.get(field))
    found = [
        Change(field, before.get(field), after.get(field), field.split(".")[1] in IMMUTABLE)
        for field in different
        if not (local and field.startswith("spec.storage."))
    ]
    return sorted(found, key=lambda change: not change.immutable)


def _empty(source: str) -> Problem:
    return Problem(source, "", f"there is no YAML in it: a {KIND} is needed")


def _store_at(document: Document, uri: str) -> None:
    """Let the run be stored in a local folder, unless its storage is of another kind or an override says where."""
    assert isinstance(document.value, dict)
    spec = document.value.get("spec")
    if not isinstance(spec, dict):
        return
    storage = spec.get("storage")
    if document.where(_STORAGE_URI).startswith("--set"):
        return
    if storage is None:
        spec["storage"] = {"uri": uri}
    elif isinstance(storage, dict) and str(storage.get("uri", "file://")).startswith("file://"):
        storage["uri"] = uri
    else:
        return
    document.override(_STORAGE_URI, "--output")


_STORAGE_URI = ("spec", "storage", "uri")
