"""A tiny image made without any tool: Debian's static busybox, to pause pods and for tests. Imported by name."""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

BUSYBOX = Path("/bin/busybox")
BUSYBOX_IMAGE = "localhost/populora-node/busybox:1"
PAUSE_IMAGE = BUSYBOX_IMAGE

_APPLETS = ("sh", "sleep", "nslookup", "cat", "ls", "id", "touch", "httpd", "ip", "true", "false", "nc")


def write_busybox_archive(path: Path) -> None:
    """Write an OCI archive of one image that holds busybox alone and does nothing for ever."""
    layer = _tar({f"bin/{BUSYBOX.name}": BUSYBOX.read_bytes()}, {f"bin/{name}": BUSYBOX.name for name in _APPLETS})
    blobs: dict[str, bytes] = {}
    configuration = _blob(
        blobs,
        {
            "architecture": _architecture(),
            "os": "linux",
            "config": {"Entrypoint": ["/bin/sleep"], "Cmd": ["2147483647"], "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        },
    )
    blobs[_digest(layer)] = layer
    manifest = _blob(
        blobs,
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **configuration},
            "layers": [
                {
                    "mediaType": "application/vnd.oci.image.layer.v1.tar",
                    "digest": _digest(layer),
                    "size": len(layer),
                }
            ],
        },
    )
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                **manifest,
                "annotations": {"io.containerd.image.name": BUSYBOX_IMAGE},
            }
        ],
    }
    files = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps(index).encode(),
        **{f"blobs/{digest.replace(':', '/')}": data for digest, data in blobs.items()},
    }
    path.write_bytes(_tar(files, {}))


def _blob(blobs: dict[str, bytes], value: Any) -> dict[str, Any]:
    data = json.dumps(value).encode()
    blobs[_digest(data)] = data
    return {"digest": _digest(data), "size": len(data)}


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _tar(files: dict[str, bytes], links: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755
            archive.addfile(member, io.BytesIO(data))
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return buffer.getvalue()


def _architecture() -> str:
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
