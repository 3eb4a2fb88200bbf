"""HTTP answers of an API server as the controller's errors."""

import json
from collections.abc import Mapping
from typing import Any

from populora_operator.cluster.port import (
    AlreadyExistsError,
    ClusterError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NamespaceTerminatingError,
    NotFoundError,
    QuotaExceededError,
    TooManyRequestsError,
    UnavailableError,
)

_MESSAGE_LENGTH = 2000
_UNTYPED = "failed to create typed patch object"
"""How the API server answers, with code 500, to an applied object with a field that its kind does not have."""


def from_answer(code: int, body: bytes, headers: Mapping[str, str], *, creating: bool = False) -> ClusterError:
    """Return the error that an answer stands for.

    Args:
        code: HTTP status, 400 or above.
        body: a Status object, or whatever a proxy on the way wrote.
        headers: of the answer.
        creating: the request was conditional on the object's absence, so that a conflict means it is there.
    """
    status = _status(body)
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or body[:_MESSAGE_LENGTH].decode("utf-8", "replace") or f"HTTP {code}")
    details = status.get("details") or {}
    kind = _class(code, reason, message, details, creating)
    return kind(message[:_MESSAGE_LENGTH], code=code, reason=reason, retry_after=_retry_after(headers, details))


def _class(code: int, reason: str, message: str, details: Mapping[str, Any], creating: bool) -> type[ClusterError]:
    match code:
        case 404:
            return NotFoundError
        case 409:
            return AlreadyExistsError if creating or reason == "AlreadyExists" else ConflictError
        case 410:
            return GoneError
        case 403:
            if any(cause.get("reason") == "NamespaceTerminating" for cause in details.get("causes") or ()):
                return NamespaceTerminatingError
            return QuotaExceededError if "exceeded quota" in message else ForbiddenError
        case 400 | 422:
            return InvalidError
        case 429:
            return TooManyRequestsError
        case 500 if message.startswith(_UNTYPED):
            return InvalidError
        case _:
            return UnavailableError if code >= 500 else ClusterError


def _status(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and value.get("kind") == "Status" else {}


def _retry_after(headers: Mapping[str, str], details: Mapping[str, Any]) -> float | None:
    for text in (headers.get("Retry-After"), details.get("retryAfterSeconds")):
        try:
            if text is not None:
                return max(0.0, float(text))
        except ValueError:
            continue
    return None
