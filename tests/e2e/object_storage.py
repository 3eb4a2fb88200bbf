"""An S3 server on the node, which pods reach as `s3.storage.svc:9000`. Imported by name."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import boto3
import yaml
from build import binary
from control_plane import Process
from network import ADDRESS
from node import Node

ACCESS, SECRET = "node-access", "node-secret"
BUCKET = "populora"
SECRET_NAME = "populora-s3"
ENDPOINT = "http://s3.storage.svc:9000"
"""As pods know it: the endpoint of manifests/nano-s3.yaml."""

_PORT = 7070
_URL = f"http://{ADDRESS}:{_PORT}"


class ObjectStorage:
    """The running server.

    Attributes:
        client: of boto3, past the cluster's names.
        environment: variables by which `populora` finds the store from here.
    """

    def __init__(self) -> None:
        self.client: Any = boto3.client(
            "s3", endpoint_url=_URL, aws_access_key_id=ACCESS, aws_secret_access_key=SECRET, region_name="us-east-1"
        )
        self.environment = {
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL_S3": _URL,
            "AWS_REGION": "us-east-1",
        }

    def keys(self, prefix: str) -> list[str]:
        """Return the names of the objects below a prefix of the bucket."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def read(self, key: str) -> bytes:
        """Return an object of the bucket."""
        data: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data


@contextlib.contextmanager
def object_storage(node: Node) -> Iterator[ObjectStorage]:
    """Start the server with one bucket, and give it a name in the cluster."""
    folder = node.folder / "s3"
    for name in ("objects", "iam"):
        (folder / name).mkdir(parents=True)
    command = [str(binary("versitygw")), "--port", f"{ADDRESS}:{_PORT}", "--iam-dir", str(folder / "iam")]
    process = Process(
        "versitygw",
        [*command, "posix", str(folder / "objects")],
        node.folder,
        environment={**os.environ, "ROOT_ACCESS_KEY": ACCESS, "ROOT_SECRET_KEY": SECRET},
    )
    process.start()
    try:
        storage = ObjectStorage()
        process.until(lambda: _answers(storage), "buckets are listed")
        storage.client.create_bucket(Bucket=BUCKET)
        node.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(_service()))
        yield storage
    finally:
        process.stop()


def credentials(namespace: str) -> dict[str, Any]:
    """Return the Secret with the keys that a run's `credentialsSecretRef` names."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET_NAME, "namespace": namespace},
        "stringData": {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET},
    }


def _answers(storage: ObjectStorage) -> bool:
    try:
        storage.client.list_buckets()
    except Exception:
        return False
    return True


def _service() -> list[dict[str, Any]]:
    """Return a Service without selector, whose one address is the server's."""
    place = {"namespace": "storage"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "storage"}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "s3", **place},
            "spec": {"ports": [{"name": "s3", "port": 9000, "targetPort": _PORT}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": "s3-1", **place, "labels": {"kubernetes.io/service-name": "s3"}},
            "addressType": "IPv4",
            "ports": [{"name": "s3", "port": _PORT, "protocol": "TCP"}],
            "endpoints": [{"addresses": [ADDRESS], "conditions": {"ready": True}}],
        },
    ]
