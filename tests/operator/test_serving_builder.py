"""The pods of vLLM: what it is told, and how it comes to its base model and its adapters."""

from typing import Any

import pytest
from fake_world import manifest

from populora_operator.builders.context import Context
from populora_operator.builders.podspec import CONTAINER_SECURITY
from populora_operator.builders.serving import ADAPTERS_FOLDER, BASE_FOLDER, serving_deployment
from populora_operator.settings import Images
from populora_operator.subject import read


def pod(images: Images | None = None, **spec: Any) -> dict[str, Any]:
    item = manifest(**spec)
    item["metadata"] |= {"uid": "u", "resourceVersion": "1", "generation": 1}
    run = read(item).run
    assert run is not None
    made: dict[str, Any] = serving_deployment(Context(run, "ns", "u", images or Images()))["spec"]["template"]["spec"]
    return made


def mounts(container: dict[str, Any]) -> dict[str, bool]:
    """Whether each mount can be written, by path."""
    return {mount["mountPath"]: not mount.get("readOnly", False) for mount in container["volumeMounts"]}


def env(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


@pytest.mark.parametrize("name", ["nano", "nano-raw"])
def test_an_embedded_base_is_laid_into_a_folder_that_vllm_reads(name: str) -> None:
    spec = pod(Images(sidecar="registry/sidecar:1"), baseModel={"uri": f"builtin://{name}"})
    (laying,) = spec["initContainers"]
    vllm, sidecar = spec["containers"]
    assert laying["image"] == sidecar["image"] == "registry/sidecar:1"
    assert laying["command"] == ["populora", "base"]
    assert laying["args"] == [f"builtin://{name}", "--output", f"{BASE_FOLDER}/{name}"]
    assert f"--model={BASE_FOLDER}/{name}" in vllm["args"]
    assert mounts(laying)[BASE_FOLDER] is True
    assert mounts(vllm)[BASE_FOLDER] is False
    assert {"name": "base", "emptyDir": {}} in spec["volumes"]
    assert CONTAINER_SECURITY.items() <= laying["securityContext"].items()
    assert laying["resources"]["limits"]["memory"]
    assert not any(item["name"].startswith("AWS_") for item in laying["env"]), "it needs no credentials"


@pytest.mark.parametrize(
    ("uri", "arguments"),
    [
        ("hf://Qwen/Qwen2.5-Coder-7B@abc", ["--model=Qwen/Qwen2.5-Coder-7B", "--revision=abc"]),
        ("s3://models/coder", ["--model=s3://models/coder", "--load-format=runai_streamer"]),
        ("file:///models/my%20coder", ["--model=/models/my coder"]),
    ],
)
def test_another_base_is_read_by_vllm_itself(uri: str, arguments: list[str]) -> None:
    spec = pod(baseModel={"uri": uri})
    vllm, _ = spec["containers"]
    assert "initContainers" not in spec
    assert vllm["args"][: len(arguments)] == arguments
    assert BASE_FOLDER not in mounts(vllm)
    assert "base" not in {volume["name"] for volume in spec["volumes"]}


def test_adapters_are_written_by_the_sidecar_and_read_by_vllm_at_the_same_path() -> None:
    vllm, sidecar = pod()["containers"]
    assert mounts(sidecar)[ADAPTERS_FOLDER] is True
    assert mounts(vllm)[ADAPTERS_FOLDER] is False


def test_vllm_gets_the_storages_credentials_only_where_its_base_is_there() -> None:
    for uri, wanted in (("s3://models/coder", True), ("hf://Qwen/Qwen2.5-Coder-7B", False), ("builtin://nano", False)):
        vllm, sidecar = pod(baseModel={"uri": uri})["containers"]
        assert any(item["name"] == "AWS_SECRET_ACCESS_KEY" for item in sidecar["env"])
        assert any(item["name"].startswith("AWS_") for item in vllm["env"]) is wanted


def test_log_probabilities_are_those_of_the_distribution_that_was_sampled_from() -> None:
    vllm, _ = pod()["containers"]
    assert "--logprobs-mode=processed_logprobs" in vllm["args"]
    assert "--generation-config=vllm" in vllm["args"], "the base model's own defaults must not change it"


def test_without_gpus_vllm_runs_on_the_processor() -> None:
    vllm, _ = pod(inference={"gpusPerReplica": 0})["containers"]
    assert vllm["resources"] == {"requests": {"cpu": "1", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}
    assert "--tensor-parallel-size=1" in vllm["args"]
    assert env(vllm)["VLLM_CPU_KVCACHE_SPACE"] == "2"
    on_gpu, _ = pod()["containers"]
    assert "VLLM_CPU_KVCACHE_SPACE" not in env(on_gpu)
    assert on_gpu["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_whatever_vllm_caches_goes_where_it_can_be_written() -> None:
    vllm, _ = pod()["containers"]
    writable = [path for path, can in mounts(vllm).items() if can]
    found = env(vllm)
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
        assert any(found[name].startswith(path) for path in writable), name
    assert found["USER"], "the user's number has no name that programs could look up"
