"""The CustomResourceDefinition, generated from the models.

The API server takes structural schemas only: every node inline and typed, no `$ref`, no unions. All fields are
non-nullable: the server drops a `null` and fills in the default, so an optional field is one that is absent.
"""

from functools import cache
from typing import Any

from populora_api.fields import shortest_numbers
from populora_api.resource import API_VERSION, GROUP, KIND, RUN_NAME, RUN_NAME_LENGTH, VERSION, PopulationRun
from populora_api.rules import IMMUTABLE, IMMUTABLE_ALLOWED, IMMUTABLE_CEL, RULES, STEPS_ALLOWED, STEPS_CEL

Schema = dict[str, Any]
"""A node of an OpenAPI schema; its keys decide the types of its values."""

PLURAL = "populationruns"

_PRINTER_COLUMNS: tuple[tuple[str, str, str, str, int], ...] = (
    ("Phase", "string", ".status.phase", "State in one word.", 0),
    ("Step", "integer", ".status.step", "Last committed training step.", 0),
    ("Teachers", "integer", ".spec.population.teachers", "Members that propose problems.", 0),
    ("Students", "integer", ".spec.population.students", "Members that solve problems.", 0),
    ("Solve-Rate", "number", ".status.solveRate", "Share of correct solutions in the last step.", 0),
    ("Best", "string", ".status.best.student", "Best-rated student.", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Time since the run was made.", 0),
    ("GPUs", "integer", ".status.gpus", "GPUs that the run's pods ask for.", 1),
    ("ETA", "integer", ".status.estimatedSecondsRemaining", "Seconds to the last step at the present speed.", 1),
    ("Reason", "string", ".status.reason", "Reason of the condition that explains the phase.", 1),
)


@cache
def structural_schema() -> Schema:
    """Return the structural schema of a whole PopulationRun, `metadata` included. Do not change the result."""
    generated = PopulationRun.model_json_schema(by_alias=True, mode="validation")
    definitions = generated.pop("$defs", {})
    schema = _inline(generated, definitions)
    spec = properties(schema)["spec"]
    spec["x-kubernetes-validations"] = [
        {"rule": rule.cel, "message": rule.allowed, "fieldPath": f".{rule.field}"} for rule in RULES
    ]
    for name in IMMUTABLE:
        node = properties(spec)[name]
        node["x-kubernetes-validations"] = [{"rule": IMMUTABLE_CEL, "message": IMMUTABLE_ALLOWED}]
    return schema


def custom_resource_definition() -> Schema:
    """Return the CustomResourceDefinition of PopulationRun."""
    schema = structural_schema()
    root = {
        "type": "object",
        "description": schema["description"],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"Always {API_VERSION}."},
            "kind": {"type": "string", "description": f"Always {KIND}."},
            "metadata": {"type": "object"},
            "spec": properties(schema)["spec"],
            "status": properties(schema)["status"],
        },
        "x-kubernetes-validations": [
            {
                "rule": f"size(self.metadata.name) <= {RUN_NAME_LENGTH} && "
                + RUN_NAME.cel.replace("self", "self.metadata.name", 1),
                "message": f"metadata.name: {RUN_NAME.allowed}",
            },
            {"rule": STEPS_CEL, "message": STEPS_ALLOWED, "fieldPath": ".spec.training.steps"},
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": "populationrun",
                "shortNames": ["prun"],
                "categories": ["populora"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "description": text}
                        # The server leaves out a priority of 0, and a tool that compares would see a difference.
                        | ({"priority": priority} if priority else {})
                        for name, kind, path, text, priority in _PRINTER_COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": root},
                }
            ],
        },
    }


def properties(schema: Schema) -> dict[str, Schema]:
    """Return the properties of an object's schema, none for other schemas."""
    found: dict[str, Schema] = schema.get("properties", {})
    return found


def child_schema(schema: Schema, key: str | int) -> Schema | None:
    """Return the schema of a field or list item, or None where the schema knows none."""
    child = properties(schema).get(str(key)) or schema.get("items" if isinstance(key, int) else "additionalProperties")
    return child if isinstance(child, dict) else None


def _inline(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return the node as a structural schema: references replaced, null dropped, OpenAPI 3.0 spelling."""
    node = dict(node)
    if (reference := node.pop("$ref", None)) is not None:
        node = {**definitions[str(reference).rsplit("/", 1)[-1]], **node}
    if (choices := node.pop("anyOf", None)) is not None:
        (only,) = (choice for choice in choices if choice != {"type": "null"})
        return _inline({**only, **node}, definitions)
    for unwanted in ("title", "additionalProperties", "propertyNames"):
        if unwanted != "additionalProperties" or not isinstance(node.get(unwanted), dict):
            node.pop(unwanted, None)
    if node.get("default", ...) is None:
        del node["default"]
    elif "default" in node:
        node["default"] = shortest_numbers(node["default"])
    if (value := node.pop("const", None)) is not None:
        node["enum"] = [value]
    if examples := node.pop("examples", None):
        node["example"] = examples[0]
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in node:
            node[inclusive] = node[exclusive]
            node[exclusive] = True
    for name in ("minimum", "maximum"):
        if name in node:
            node[name] = shortest_numbers(node[name])
    required = node.get("required", [])
    fields = {}
    for name, field in node.get("properties", {}).items():
        inlined = _inline(field, definitions)
        if inlined.get("type") == "object" and name not in required and "default" not in field:
            # A default_factory: the server fills in {} and then, field by field, the defaults inside.
            inlined["default"] = {}
        fields[name] = inlined
    if fields:
        node["properties"] = fields
    for name in ("items", "additionalProperties"):
        if name in node:
            node[name] = _inline(node[name], definitions)
    first = ("type", "description", "default", "enum")
    return {name: node[name] for name in (*first, *(name for name in node if name not in first)) if name in node}
