"""Documents that carry their own checksum: canonical JSON with the sha256 of itself without that field."""

import json
from collections.abc import Mapping

from populora_trainer.errors import StorageError
from populora_trainer.population.members import JsonValue
from populora_trainer.storage.store import sha256

_SEAL = "sha256"


def seal(body: Mapping[str, JsonValue]) -> bytes:
    """Return the document's bytes; equal bodies give equal bytes."""
    return _canonical({**body, _SEAL: sha256(_canonical(body))})


def unseal(data: bytes, place: str, *, kind: str, version: int) -> tuple[dict[str, JsonValue], str]:
    """Return the body of a document that `seal` wrote, and its seal.

    Args:
        data: the document's bytes.
        place: where they were read, for messages.
        kind: what the document is, e.g. "a checkpoint's manifest".
        version: the value of the field `format` that is read.

    Raises:
        StorageError: it is no such document, of another format, or its content is not what was sealed.
    """
    try:
        body = json.loads(data)
        found = body.pop(_SEAL)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise StorageError(f"{place} is damaged: it is not {kind}") from error
    if body.get("format") != version:
        raise StorageError(f"{place} has the format {body.get('format')!r}; this version reads format {version}")
    try:
        expected = sha256(_canonical(body))
    except (ValueError, RecursionError) as error:  # JSON readers take numbers that are none
        raise StorageError(f"{place} is damaged: it is not {kind}") from error
    if found != expected:
        raise StorageError(f"{place} is damaged: its content has the sha256 {expected}, expected {found}")
    return body, expected


def _canonical(body: Mapping[str, JsonValue]) -> bytes:
    return json.dumps(body, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"
