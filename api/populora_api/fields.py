"""Building blocks of the models: the strict base class and the annotated types that JSON Schema has no word for.

Each type below carries its check twice, as Python and as what the API server understands (an enum, a CEL rule, a list
type), so that the two verdicts cannot drift apart.
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, JsonValue
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Model(BaseModel):
    """A part of the resource: unknown fields refused, no coercion between types, immutable once built.

    YAML and the API server say `camelCase`; Python says `snake_case`.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
    )


@dataclass(frozen=True)
class OneOf:
    """The integer is one of a few; `Literal` would take `true` for 1."""

    values: tuple[int, ...]

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "enum": list(self.values)}

    def _check(self, value: int) -> int:
        if value not in self.values:
            raise PydanticCustomError("one_of", "not one of the allowed integers")
        return value


@dataclass(frozen=True)
class Matches:
    """The whole text matches a regular expression; `allowed` says in words what that means.

    A CEL rule rather than `pattern`, because the API server's message for a pattern shows nothing but the expression.
    The expression stays within what RE2 and Python's `re` read alike.
    """

    pattern: str
    allowed: str
    compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiled", re.compile(self.pattern, re.ASCII))

    @property
    def cel(self) -> str:
        """The same check in CEL, whose `matches` searches and so needs the anchors."""
        escaped = self.pattern.replace("\\", "\\\\").replace("'", "\\'")
        return f"self.matches('^({escaped})$')"

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "x-kubernetes-validations": [{"rule": self.cel, "message": self.allowed}]}

    def _check(self, value: str) -> str:
        if not self.compiled.fullmatch(value):
            raise PydanticCustomError("matches", "not of the allowed form")
        return value


@dataclass(frozen=True)
class Unique:
    """No two items are equal, or equal in the field `key`; a `set` or `map` list for server-side apply.

    Args:
        key: the field, as YAML spells it, or none to compare whole scalar items.
    """

    key: str | None = None

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        if self.key is None:
            return {**handler(schema), "x-kubernetes-list-type": "set"}
        return {**handler(schema), "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [self.key]}

    def _check(self, items: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
        identities: list[Hashable] = list(items) if self.key is None else [attrgetter(self.key)(item) for item in items]
        repeated = [value for position, value in enumerate(identities) if value in identities[:position]]
        if repeated:
            raise PydanticCustomError("unique", "{repeated}", {"repeated": str(repeated[0])})
        return items


@dataclass(frozen=True)
class _Quantity:
    """An integer or a text such as `500m`: `x-kubernetes-int-or-string`, which JSON Schema cannot say."""

    matches = Matches(
        r"\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)(([KMGTPE]i)|[numkMGTPE]|([eE][-+]?[0-9]+))?",
        "a quantity such as 2, 500m or 8Gi",
    )

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._check, serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        rule = f"type(self) == int && self >= 0 || type(self) == string && {self.matches.cel}"
        return {
            "x-kubernetes-int-or-string": True,
            "maxLength": 32,
            "x-kubernetes-validations": [{"rule": rule, "message": self.matches.allowed}],
        }

    def _check(self, value: object) -> int | str:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
            return value
        if isinstance(value, str) and len(value) <= 32 and self.matches.compiled.fullmatch(value):
            return value
        raise PydanticCustomError("quantity", "not a quantity")


@dataclass(frozen=True)
class _Free:
    """Any mapping; the API server keeps it as it is."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


Quantity = Annotated[int | str, _Quantity()]
"""A Kubernetes quantity: `4`, `500m`, `16Gi`."""

FreeForm = Annotated[dict[str, JsonValue], _Free()]
"""A mapping whose fields belong to another API."""


def shortest_numbers(value: Any) -> Any:
    """Write the JSON value 64.0 as 64, as the API server does, so that equal values have one spelling."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [shortest_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: shortest_numbers(item) for key, item in value.items()}
    return value


LABEL_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"

ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Matches(
        rf"{LABEL_NAME}(\.{LABEL_NAME})*",
        "lower-case letters, digits, '-' and '.', beginning and ending with a letter or digit",
    ),
]
"""The name of a Kubernetes object in the same namespace."""

LabelMap = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=64)]
"""Label keys and values."""
