"""vLLM's CPU build in pods: an image that starts it, and its packages from a volume. Imported by name."""

from archives import write_derived_archive
from client import Object
from environment import environment_folder
from installation import share_folder, with_libraries
from node import Node
from preflight import LIBNUMA
from prepare import prepared_images

IMAGE = "localhost/populora-node/vllm:1"
CLAIM = "vllm-libraries"


def offer_vllm(node: Node) -> Object:
    """Load the image, offer the packages to the pods of the namespace, and return `spec.inference` of one server."""
    archive = node.folder / "vllm.tar"
    settings = {
        # As vLLM's own image: the controller's arguments follow. Nothing is compiled, as the image has no compiler.
        "Entrypoint": ["/usr/bin/python3", "-m", "vllm.entrypoints.cli.main", "serve", "--enforce-eager"],
        "Cmd": [],
    }
    # Of what the packages are linked to, the image lacks this alone.
    files = {f"usr/lib/{LIBNUMA.name}": LIBNUMA.read_bytes()}
    write_derived_archive(prepared_images()["sandbox"].path, archive, IMAGE, files=files, settings=settings)
    node.containerd.load(archive)
    archive.unlink()
    (packages,) = environment_folder().glob("lib/python*/site-packages")
    share_folder(node, CLAIM, packages)
    return {
        "engine": "VLLM",
        "replicas": 1,
        "gpusPerReplica": 0,
        "image": IMAGE,
        "resources": {"requests": {"cpu": "200m", "memory": "2Gi"}, "limits": {"memory": "8Gi"}},
        "podTemplate": with_libraries(
            "vllm",
            claim=CLAIM,
            LD_LIBRARY_PATH="/usr/lib",
            TORCHDYNAMO_DISABLE="1",
            VLLM_CPU_KVCACHE_SPACE="1",
            # Threads that wait for each other spin, and the trainer computes on the same cores.
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS="1",
            HF_HUB_OFFLINE="1",
        ),
    }
