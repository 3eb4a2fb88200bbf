"""What a container may do, asked of the kernel and not of its manifest. Imported by name."""

from pathlib import Path

from client import Object
from node import Node

_SECCOMP_FILTER = "2"
_TOKEN_FOLDER = "/run/secrets/kubernetes.io/"


def containers_of(pod: Object) -> dict[str, str]:
    """Return the ids of a pod's running containers by their names."""
    return {
        status["name"]: status["containerID"].removeprefix("containerd://")
        for status in pod["status"].get("containerStatuses", [])
        if "running" in status["state"]
    }


def violations(node: Node, pod: Object, *, user: int, token: bool = False) -> list[str]:
    """Say what the processes of a pod may do beyond what they should, a sentence each.

    Args:
        node: where it runs.
        pod: as the API server has it, running.
        user: id that every process must have, as user and as group.
        token: a token of its ServiceAccount is mounted.
    """
    found = []
    running = containers_of(pod)
    if not running:
        found.append("no container runs")
    for name, container in running.items():
        process = Path("/proc", str(node.containerd.process_of(container)))
        status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
        expected = {
            "Uid": "\t".join([str(user)] * 4),
            "Gid": "\t".join([str(user)] * 4),
            "CapEff": "0" * 16,
            "CapPrm": "0" * 16,
            "CapBnd": "0" * 16,
            "NoNewPrivs": "1",
            "Seccomp": _SECCOMP_FILTER,
        }
        found += [
            f"{name}: {field} is {status[field]!r}, not {value!r}"
            for field, value in expected.items()
            if status[field] != value
        ]
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
        found += [
            f"{name}: the root file system can be written"
            for mount in mounts
            if mount[4] == "/" and "ro" not in mount[5].split(",")
        ]
        has_token = any(_TOKEN_FOLDER in mount[4] for mount in mounts)
        if has_token != token:
            found.append(f"{name}: a token of the API server is {'' if has_token else 'not '}mounted")
    return found
