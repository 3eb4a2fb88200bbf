"""`PopulationRun` v1alpha1: the one definition of the manifest, as pydantic models.

Imports neither torch nor kopf nor the engine, so that every part can read a manifest cheaply.
"""

from populora_api.errors import ManifestError, Problem
from populora_api.local import ALONE, CLUSTER_ONLY, Services, cluster_only_fields, local_refusals
from populora_api.manifest import (
    Change,
    changes,
    check_file,
    identity,
    load_manifest,
    name_of,
    parse_manifest,
    read_manifest,
    read_text,
    resolved,
    resolved_yaml,
)
from populora_api.resource import PopulationRun
from populora_api.schema import custom_resource_definition
from populora_api.spec import Spec
from populora_api.status import Status

__all__ = [
    "ALONE",
    "CLUSTER_ONLY",
    "Change",
    "ManifestError",
    "PopulationRun",
    "Problem",
    "Services",
    "Spec",
    "Status",
    "changes",
    "check_file",
    "cluster_only_fields",
    "custom_resource_definition",
    "identity",
    "load_manifest",
    "local_refusals",
    "name_of",
    "parse_manifest",
    "read_manifest",
    "read_text",
    "resolved",
    "resolved_yaml",
]
