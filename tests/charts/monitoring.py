"""The kinds of the Prometheus operator, as far as the chart uses them: its fields and types (API reference, v1).

With these definitions installed the API server refuses a field that is not here. Imported by name.
"""

from chart import Object

TEXT: Object = {"type": "string"}
TEXTS: Object = {"type": "object", "additionalProperties": TEXT}
DURATION: Object = {
    "type": "string",
    "pattern": "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$",
}


def _object(fields: Object, *required: str) -> Object:
    return {"type": "object", "properties": fields, **({"required": list(required)} if required else {})}


def _list(items: Object) -> Object:
    return {"type": "array", "items": items}


SELECTOR = _object({"matchLabels": TEXTS})
NAMESPACES = _object({"any": {"type": "boolean"}, "matchNames": _list(TEXT)})
ENDPOINT = _object({"port": TEXT, "path": TEXT, "interval": DURATION, "honorLabels": {"type": "boolean"}})

SPECS: dict[str, Object] = {
    "ServiceMonitor": _object(
        {"selector": SELECTOR, "namespaceSelector": NAMESPACES, "endpoints": _list(ENDPOINT)}, "endpoints", "selector"
    ),
    "PodMonitor": _object(
        {
            "selector": SELECTOR,
            "namespaceSelector": NAMESPACES,
            "podTargetLabels": _list(TEXT),
            "podMetricsEndpoints": _list(ENDPOINT),
        },
        "selector",
    ),
    "PrometheusRule": _object(
        {
            "groups": {
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                **_list(
                    _object(
                        {
                            "name": {"type": "string", "minLength": 1},
                            "rules": _list(
                                _object(
                                    {
                                        "alert": TEXT,
                                        "expr": {"x-kubernetes-int-or-string": True},
                                        "for": DURATION,
                                        "labels": TEXTS,
                                        "annotations": TEXTS,
                                    },
                                    "expr",
                                )
                            ),
                        },
                        "name",
                    )
                ),
            }
        }
    ),
}


def definitions() -> list[Object]:
    """Return the CustomResourceDefinitions."""
    return [
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{kind.lower()}s.monitoring.coreos.com"},
            "spec": {
                "group": "monitoring.coreos.com",
                "scope": "Namespaced",
                "names": {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower()},
                "versions": [
                    {
                        "name": "v1",
                        "served": True,
                        "storage": True,
                        "schema": {"openAPIV3Schema": _object({"spec": spec}, "spec")},
                    }
                ],
            },
        }
        for kind, spec in SPECS.items()
    ]
