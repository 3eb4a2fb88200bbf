"""What this machine must have for the real node. Imported by name."""

import os
import shutil
import sys
from pathlib import Path

PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "ip": "iproute2",
    "nft": "nftables",
    "conntrack": "conntrack",
    "prometheus": "prometheus",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "/bin/busybox": "busybox-static",
    "mount": "mount",
    "openssl": "openssl",
}
"""Debian package by program."""

LIBNUMA = Path("/usr/lib/x86_64-linux-gnu/libnuma.so.1")


def missing() -> list[str]:
    """Return a sentence for everything that is missing, with what to do."""
    problems = []
    if not sys.platform.startswith("linux"):
        return ["The real node runs on Linux only."]
    if os.geteuid() != 0:
        problems.append("The real node needs root (its kubelet runs containers): say `sudo make e2e`.")
    packages = sorted({package for program, package in PROGRAMS.items() if not _found(program)})
    packages += [] if LIBNUMA.exists() else ["libnuma1"]
    if packages:
        problems.append(
            f"The real node needs programs that are not here: apt-get install --yes --no-install-recommends "
            f"{' '.join(packages)}"
        )
    return problems


def _found(program: str) -> bool:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


if __name__ == "__main__":
    if problems := missing():
        sys.exit("\n".join(problems))
