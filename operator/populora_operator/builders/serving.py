"""vLLM, which serves every member's adapter, with the sidecar that loads what the trainer publishes."""

from urllib.parse import unquote

from populora_operator import names
from populora_operator.builders import storage
from populora_operator.builders.config import config_volume
from populora_operator.builders.context import Context, Manifest
from populora_operator.builders.podspec import container, http_probe, pod, resources, shared_memory
from populora_operator.builders.sandbox import deployment
from populora_operator.cluster.kinds import DISRUPTION_BUDGET, SERVICE

GRACE_SECONDS = 60
ADAPTERS_FOLDER = "/adapters"
SERVED_NAME = "base"
"""Name of the base model in requests to vLLM."""


def serving_deployment(context: Context, *, replicas: int | None = None) -> Manifest:
    """Return the Deployment; `replicas` overrides the spec's, e.g. 0 while suspended."""
    choice = context.spec.inference
    mount, volumes = storage.volume(context, choice, "sidecar")
    vllm = container(
        "vllm",
        choice.image or context.images.serving,
        context,
        args=_arguments(context),
        ports={"http": names.SERVING_PORT},
        env=[
            {"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"},
            {"name": "VLLM_NO_USAGE_STATS", "value": "1"},
            {"name": "HF_HOME", "value": "/cache/huggingface"},
            {"name": "VLLM_CACHE_ROOT", "value": "/cache/vllm"},
            *storage.environment(context),
        ],
        mounts={"/cache": "cache", "/dev/shm": "shared-memory", ADAPTERS_FOLDER: "adapters"},
        resources=resources(choice, cpu="4", memory="64Gi", gpus=choice.gpus_per_replica),
        # Loading a large model from far away takes half an hour at most.
        startupProbe=http_probe("/health", names.SERVING_PORT, period=10, failures=180),
        readinessProbe=http_probe("/health", names.SERVING_PORT, period=5, failures=3),
        livenessProbe=http_probe("/health", names.SERVING_PORT, period=10, failures=12),
    )
    sidecar = container(
        "sidecar",
        context.images.sidecar,
        context,
        command=["populora", "sidecar"],
        args=["--listen", f"0.0.0.0:{names.SIDECAR_PORT}"],
        ports={"sidecar": names.SIDECAR_PORT},
        env=storage.environment(context),
        mounts={ADAPTERS_FOLDER: "adapters", **mount},
        read_only={names.CONFIG_FOLDER: "config"},
        resources={"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        # Ready only when the adapters of the newest manifest are loaded, so that no request meets a missing one.
        readinessProbe=http_probe("/readyz", names.SIDECAR_PORT, period=2, failures=2),
        livenessProbe=http_probe("/healthz", names.SIDECAR_PORT, period=10, failures=12),
    )
    template = pod(
        context,
        "serving",
        [vllm, sidecar],
        choice=choice,
        grace=GRACE_SECONDS,
        service_account=names.serving(context.name),
        volumes=[
            config_volume(context),
            {"name": "adapters", "emptyDir": {}},
            {"name": "cache", "emptyDir": {}},
            shared_memory(),
            *volumes,
        ],
    )
    return deployment(context, names.serving(context.name), "serving", template, replicas, choice.replicas)


def serving_service(context: Context) -> Manifest:
    """Return the headless Service whose addresses are the ready vLLM pods."""
    spec = {
        "clusterIP": "None",
        "selector": names.selector(context.name, "serving"),
        "ports": [
            {"name": "http", "port": names.SERVING_PORT, "targetPort": "http", "protocol": "TCP"},
            {"name": "sidecar", "port": names.SIDECAR_PORT, "targetPort": "sidecar", "protocol": "TCP"},
        ],
    }
    return context.child(SERVICE, names.serving(context.name), "serving", spec=spec)


def disruption_budget(context: Context) -> Manifest:
    """Return the budget by which a drained node takes one vLLM pod at a time."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": names.selector(context.name, "serving")},
    }
    return context.child(DISRUPTION_BUDGET, names.serving(context.name), "serving", spec=spec)


def _arguments(context: Context) -> list[str]:
    """Return vLLM's arguments: all members of two generations fit, as a new one loads while the old one serves."""
    spec = context.spec
    slots = 2 * context.members
    return [
        *_model(spec.base_model.uri),
        f"--served-model-name={SERVED_NAME}",
        f"--port={names.SERVING_PORT}",
        f"--dtype={spec.base_model.dtype}",
        f"--max-model-len={spec.training.max_prompt_tokens + spec.training.max_response_tokens}",
        f"--tensor-parallel-size={max(1, spec.inference.gpus_per_replica)}",
        "--enable-lora",
        f"--max-loras={slots}",
        f"--max-cpu-loras={slots}",
        f"--max-lora-rank={spec.adapter.rank}",
    ]


def _model(uri: str) -> list[str]:
    scheme, _, rest = uri.partition("://")
    if scheme == "hf":
        name, _, revision = rest.partition("@")
        return [f"--model={name}", *([f"--revision={revision}"] if revision else [])]
    if scheme == "s3":
        return [f"--model={uri}", "--load-format=runai_streamer"]
    return [f"--model={unquote(rest) if scheme == 'file' else uri}"]
