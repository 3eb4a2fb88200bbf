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
BASE_FOLDER = "/base"
CPU_CACHE_GIB = 2
"""Memory for keys and values where vLLM has no GPU; it would else take what the whole node has free."""

SERVED_NAME = "base"
"""Name of the base model in requests to vLLM."""

_EMBEDDED = "builtin://"
# The root is read-only and the user has no entry in /etc/passwd: whatever is compiled or downloaded goes to the cache.
_CACHES = {
    "USER": "populora",
    "HF_HOME": "/cache/huggingface",
    "XDG_CACHE_HOME": "/cache",
    "XDG_CONFIG_HOME": "/cache/config",
    "VLLM_CACHE_ROOT": "/cache/vllm",
    "TORCHINDUCTOR_CACHE_DIR": "/cache/torchinductor",
    "TRITON_CACHE_DIR": "/cache/triton",
}


def serving_deployment(context: Context, *, replicas: int | None = None) -> Manifest:
    """Return the Deployment; `replicas` overrides the spec's, e.g. 0 while suspended."""
    choice = context.spec.inference
    on_gpus = choice.gpus_per_replica > 0
    mount, volumes = storage.volume(context, choice, "sidecar")
    embedded = context.spec.base_model.uri.startswith(_EMBEDDED)
    vllm = container(
        "vllm",
        choice.image or context.images.serving,
        context,
        args=vllm_arguments(context),
        ports={"http": names.SERVING_PORT},
        env=[
            {"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"},
            {"name": "VLLM_NO_USAGE_STATS", "value": "1"},
            *({"name": name, "value": value} for name, value in _CACHES.items()),
            *([] if on_gpus else [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": str(CPU_CACHE_GIB)}]),
            # Adapters come by the sidecar, so that only a base in S3 needs what opens the run's storage.
            *(storage.environment(context) if context.spec.base_model.uri.startswith("s3://") else []),
        ],
        mounts={"/cache": "cache", "/dev/shm": "shared-memory"},
        read_only={ADAPTERS_FOLDER: "adapters", **({BASE_FOLDER: "base"} if embedded else {})},
        resources=resources(
            choice, cpu="4" if on_gpus else "1", memory="64Gi" if on_gpus else "8Gi", gpus=choice.gpus_per_replica
        ),
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
            *([{"name": "base", "emptyDir": {}}] if embedded else []),
            {"name": "cache", "emptyDir": {}},
            shared_memory(),
            *volumes,
        ],
        **({"initContainers": [_base_model(context)]} if embedded else {}),
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


def _base_model(context: Context) -> Manifest:
    """Return the container that lays the embedded base where vLLM reads it: vLLM knows folders and hubs only."""
    return container(
        "base-model",
        context.images.sidecar,
        context,
        command=["populora", "base"],
        args=[context.spec.base_model.uri, "--output", _embedded_folder(context.spec.base_model.uri)],
        mounts={BASE_FOLDER: "base"},
        resources={"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
    )


def _embedded_folder(uri: str) -> str:
    return f"{BASE_FOLDER}/{uri.removeprefix(_EMBEDDED)}"


def vllm_arguments(context: Context) -> list[str]:
    """Return vLLM's arguments.

    All members of two generations fit, as a new one loads while the old one serves. Log-probabilities are those of the
    distribution that was sampled from, and no generation_config.json of the base model changes that distribution.
    """
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
        "--logprobs-mode=processed_logprobs",
        "--generation-config=vllm",
    ]


def _model(uri: str) -> list[str]:
    scheme, _, rest = uri.partition("://")
    if scheme == "hf":
        name, _, revision = rest.partition("@")
        return [f"--model={name}", *([f"--revision={revision}"] if revision else [])]
    if uri.startswith(_EMBEDDED):
        return [f"--model={_embedded_folder(uri)}"]
    if scheme == "s3":
        return [f"--model={uri}", "--load-format=runai_streamer"]
    return [f"--model={unquote(rest) if scheme == 'file' else uri}"]
