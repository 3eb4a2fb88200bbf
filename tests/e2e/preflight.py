"""What this machine must have for the real node. Imported by name.

python tests/e2e/preflight.py                say what is missing, and end with 1 if anything is
python tests/e2e/preflight.py --packages     print the Debian packages that are missing
"""

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
    if packages := missing_packages():
        problems.append(
            f"The real node needs programs that are not here: apt-get install --yes --no-install-recommends "
            f"{' '.join(packages)}"
        )
    return problems


def missing_packages() -> list[str]:
    """Return the Debian packages of what is missing."""
    packages = {package for program, package in PROGRAMS.items() if not _found(program)}
    return sorted(packages | (set() if LIBNUMA.exists() else {"libnuma1"}))


def _found(program: str) -> bool:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


if __name__ == "__main__":
    if sys.argv[1:] == ["--packages"]:
        print(*missing_packages())
    elif problems := missing():
        sys.exit("\n".join(problems))
