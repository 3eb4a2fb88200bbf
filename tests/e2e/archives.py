"""Images made without any tool: Debian's static busybox, and others with a few more files. Imported by name."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUSYBOX = Path("/bin/busybox")
BUSYBOX_IMAGE = "localhost/populora-node/busybox:1"
PAUSE_IMAGE = BUSYBOX_IMAGE

_APPLETS = ("sh", "sleep", "nslookup", "cat", "ls", "id", "touch", "httpd", "ip", "true", "false", "nc")


def write_busybox_archive(path: Path) -> None:
    """Write an OCI archive of one image that holds busybox alone and does nothing for ever."""
    layer = _tar({f"bin/{BUSYBOX.name}": BUSYBOX.read_bytes()}, {f"bin/{name}": BUSYBOX.name for name in _APPLETS})
    settings = {"Entrypoint": ["/bin/sleep"], "Cmd": ["2147483647"], "Env": ["PATH=/bin"]}
    configuration = {
        "architecture": _architecture(),
        "os": "linux",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    _write(path, BUSYBOX_IMAGE, configuration, [_Layer(_digest(layer), len(layer))], {_digest(layer): layer})


def write_derived_archive(
    source: Path, path: Path, name: str, *, files: Mapping[str, bytes], settings: Mapping[str, Any]
) -> None:
    """Write an OCI archive of another image with some more files and other settings.

    Args:
        source: OCI archive of one image whose layers are not compressed.
        path: the new archive.
        name: of the new image.
        files: content by path in the image.
        settings: fields of the image's `config`, in place of its own: Entrypoint, Cmd, Env, ...
    """
    with tarfile.open(source) as archive:

        def read(digest: str) -> bytes:
            member = archive.extractfile(f"blobs/{digest.replace(':', '/')}")
            assert member is not None, digest
            return member.read()

        index = archive.extractfile("index.json")
        assert index is not None, source
        manifest = json.loads(read(json.load(index)["manifests"][0]["digest"]))
        configuration = json.loads(read(manifest["config"]["digest"]))
        layers = [_Layer(layer["digest"], layer["size"]) for layer in manifest["layers"]]
        blobs = {layer.digest: read(layer.digest) for layer in layers}
    added = _tar(dict(files), {})
    blobs[_digest(added)] = added
    layers.append(_Layer(_digest(added), len(added)))
    configuration["config"].update(settings)
    configuration["rootfs"]["diff_ids"].append(_digest(added))
    configuration.pop("history", None)
    _write(path, name, configuration, layers, blobs)


@dataclass(frozen=True)
class _Layer:
    digest: str
    size: int


def _write(path: Path, name: str, configuration: Any, layers: list[_Layer], blobs: dict[str, bytes]) -> None:
    described = _blob(blobs, configuration)
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **described},
        "layers": [
            {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer.digest, "size": layer.size}
            for layer in layers
        ],
    }
    entry = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        **_blob(blobs, manifest),
        "annotations": {"io.containerd.image.name": name},
    }
    files = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(),
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
