"""The images on the node, the chart in its cluster, and a namespace for runs. Imported by name."""

import site
from dataclasses import dataclass
from pathlib import Path

import yaml
from build import binary
from chart import CHART, Helm, Object
from client import ApiError, eventually
from monitoring import definitions
from node import Node
from object_storage import credentials
from prepare import prepared_images

SYSTEM = "populora-system"
NAMESPACE = "ml"
LIBRARIES = "libraries"
"""Claim of the volume that holds torch: its wheels are 6 GB, which no test copies into an image."""

LIBRARIES_FOLDER = "/libraries"


@dataclass(frozen=True)
class Installation:
    """The installed chart.

    Attributes:
        helm: as administrator.
        values: that it was installed with.
    """

    helm: Helm
    values: Object


def install(node: Node) -> Installation:
    """Load the images and install the chart into a namespace that enforces `restricted`; wait until it is available."""
    images = prepared_images()
    for image in images.values():
        node.containerd.load(image.path)
    for definition in definitions():
        node.api.create(definition)
    node.api.create(_restricted_namespace(SYSTEM))
    repository, tag = images["controller"].name.rsplit(":", 1)
    values: Object = {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "workloads": {
            "imagePullPolicy": "Never",
            **{f"{target}Image": images[target].name for target in ("trainer", "sandbox", "sidecar")},
        },
        "controller": {"statusPollSeconds": 1},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    }
    home = node.folder / "helm"
    home.mkdir()
    helm = Helm(binary("helm"), home, node.plane.kubeconfig)
    helm("install", "populora", str(CHART), "--namespace", SYSTEM, "--wait", "--timeout", "3m", values=values)
    eventually(lambda: node.api.list("PopulationRun", None) is not None, "PopulationRuns are served", ignore=ApiError)
    return Installation(helm, values)


def prepare_namespace(node: Node) -> None:
    """Make the namespace of runs with the keys of the bucket and the volume with torch."""
    node.api.create(_restricted_namespace(NAMESPACE))
    node.api.create(credentials(NAMESPACE))
    share_folder(node, LIBRARIES, Path(site.getsitepackages()[0]))


def share_folder(node: Node, name: str, folder: Path) -> None:
    """Offer a folder of this machine to the pods of the namespace as a claim that can only be read.

    Pods of the profile `restricted` mount no folder of the node by themselves.
    """
    claim = {"name": name, "namespace": NAMESPACE}
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            **common,
            "capacity": {"storage": "20Gi"},
            "hostPath": {"path": str(folder), "type": "Directory"},
            "claimRef": claim,
            "persistentVolumeReclaimPolicy": "Retain",
        },
    }
    request = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": claim,
        "spec": {**common, "volumeName": name, "resources": {"requests": {"storage": "1Gi"}}},
    }
    node.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([volume, request]))


def with_libraries(container: str, *, claim: str = LIBRARIES, **environment: str) -> Object:
    """Return a podTemplate by which a container finds the Python packages of a claim."""
    variables = {"PYTHONPATH": LIBRARIES_FOLDER, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return {
        "spec": {
            "volumes": [{"name": claim, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}],
            "containers": [
                {
                    "name": container,
                    "env": [{"name": name, "value": value} for name, value in variables.items()],
                    "volumeMounts": [{"name": claim, "mountPath": LIBRARIES_FOLDER, "readOnly": True}],
                }
            ],
        }
    }


def _restricted_namespace(name: str) -> Object:
    labels = {
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/warn": "restricted",
    }
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
