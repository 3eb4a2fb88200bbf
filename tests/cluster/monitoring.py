"""The kinds of the Prometheus operator, as its own module defines them. Imported by name."""

import yaml
from build import source
from client import Object

KINDS = ("podmonitors", "servicemonitors", "prometheusrules")


def definitions() -> list[Object]:
    """Return the CustomResourceDefinitions of the kinds that the chart and the controller make.

    Raises:
        BuildError: the module cannot be fetched.
    """
    module = source("prometheus-operator", "github.com/prometheus-operator/prometheus-operator")
    folder = module / "example" / "prometheus-operator-crd"
    return [yaml.safe_load((folder / f"monitoring.coreos.com_{kind}.yaml").read_text()) for kind in KINDS]
