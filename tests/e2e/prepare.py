"""Builds what the node needs while there is a network, then runs a command in the node's namespaces.

python tests/e2e/prepare.py COMMAND [ARGUMENT ...]      e.g. pytest tests/e2e; as root
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
for _folder in (HERE, HERE.parent / "cluster", HERE.parent / "images", HERE.parent / "vllm"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from build import CONTROL_PLANE, BuildError, binaries
from environment import InstallError, vllm_command
from isolation import run_isolated
from preflight import missing

from images import TARGETS, ImageArchive, ImageError, build

BINARIES = (*CONTROL_PLANE, "kubelet", "kube-proxy", "coredns", "helm", "versitygw")
IMAGES_VARIABLE = "POPULORA_NODE_IMAGES"


def prepared_images() -> dict[str, ImageArchive]:
    """Return the images by target, as they were when the command was started."""
    described = json.loads(os.environ[IMAGES_VARIABLE])
    return {target: ImageArchive(**{**fields, "path": Path(fields["path"])}) for target, fields in described.items()}


def main(command: Sequence[str]) -> None:
    """Build, then run the command and exit as it does."""
    if problems := missing():
        sys.exit("\n".join(problems))
    if not command:
        sys.exit("usage: prepare.py COMMAND [ARGUMENT ...]")
    try:
        binaries(BINARIES)
        vllm_command()
        images = {target: build(target) for target in TARGETS}
    except (BuildError, ImageError, InstallError) as error:
        sys.exit(str(error))
    os.environ[IMAGES_VARIABLE] = json.dumps({target: vars(image) for target, image in images.items()}, default=str)
    sys.exit(run_isolated(command))


if __name__ == "__main__":
    main(sys.argv[1:])
