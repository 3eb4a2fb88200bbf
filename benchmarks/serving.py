"""From publishing 8 adapters of 40 MB to serving them: sidecar, S3 and vLLM on this machine.

    python benchmarks/serving.py [--adapters 8] [--rounds 5] [--without-vllm] [--json FILE]

Each round publishes fresh random weights (rank 64, float32, on q, k, v, o of 5 layers of width 4096: 42 MB) into an S3
server on loopback, and asks the sidecar until it says that the publication is served. `upload` is the trainer's part,
adapters and serving.json; `served` begins when serving.json is there and ends with the sidecar's word. It is measured
with a server that only takes note of adapters, which leaves download, checksums and messages, and with vLLM on the CPU
over random base weights of these shapes, which adds reading the adapters into its tensors. The peer downloads the same
objects by boto3's own `download_file`, one after the other and unchecked, and asks nobody. Medians, and the best.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

HERE = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(HERE / folder) for folder in ("vllm", "trainer/serving", "trainer/storage")]

from fake_vllm import fake_vllm
from s3_server import ACCESS, SECRET, client, gateway
from server import vllm_server
from sidecars import SidecarProcess, sidecar_process

from populora_trainer.nano.registry import builtin_folder
from populora_trainer.population.factors import Pair
from populora_trainer.population.peft_format import AdapterConfig
from populora_trainer.storage.checkpoint import Adapter
from populora_trainer.storage.publication import Publication, publish
from populora_trainer.storage.s3 import S3Store

LAYERS, WIDTH, RANK = 5, 4096, 64
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
BUCKET = "runs"


def adapters_of(count: int, seed: int) -> dict[str, Adapter]:
    """Return fresh weights of as many members."""
    generator = torch.Generator().manual_seed(seed)
    config = AdapterConfig(RANK, 2.0 * RANK, TARGETS, "benchmark")
    made = {}
    for slot in range(count):
        factors = {
            f"model.layers.{layer}.self_attn.{target}": Pair(
                torch.randn(RANK, WIDTH, generator=generator), torch.randn(WIDTH, RANK, generator=generator)
            )
            for layer in range(LAYERS)
            for target in TARGETS
        }
        made[f"t{slot}"] = Adapter(factors, config)
    return made


def base_model(folder: Path) -> Path:
    """Write the configuration of a base of these shapes with the embedded base's tokenizer; its weights are random."""
    source = builtin_folder("nano")
    config = json.loads((source / "config.json").read_text())
    config |= {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 256, "head_dim": 128}
    config |= {"num_attention_heads": WIDTH // 128, "num_key_value_heads": WIDTH // 128}
    config["layer_types"] = config["layer_types"][:LAYERS]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


@contextmanager
def noting_server() -> Iterator[str]:
    """Serve, in a thread, what only takes note of adapters; yields its address."""
    started, addresses = threading.Event(), []
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        async with fake_vllm() as server:
            addresses.append(server.url)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    started.wait()
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


def served_in(sidecar: SidecarProcess, store: S3Store, adapters: dict[str, Adapter], step: int):
    """Return the seconds of the upload and of serving, and what was published."""
    began = time.perf_counter()
    published = publish(store, step, adapters)
    uploaded = time.perf_counter()
    sidecar.until_serves(published.sha256)
    return uploaded - began, time.perf_counter() - uploaded, published


def peer(endpoint: str, prefix: str, published: Publication, folder: Path) -> float:
    """Return the seconds of downloading the publication's objects without any check."""
    s3 = client(endpoint)
    began = time.perf_counter()
    for adapter in published.adapters:
        (folder / adapter.digest).mkdir(parents=True)
        for file in adapter.files:
            s3.download_file(BUCKET, f"{prefix}/{adapter.key(file)}", str(folder / adapter.digest / file))
    return time.perf_counter() - began


def measure(endpoint: str, prefix: str, url: str, place: Path, count: int, rounds: int) -> dict[str, list[float]]:
    store = S3Store(BUCKET, prefix, endpoint=endpoint)
    found: dict[str, list[float]] = {"upload": [], "served": [], "peer": []}
    with sidecar_process(f"s3://{BUCKET}/{prefix}", url, place / prefix) as sidecar:
        sidecar.until_ready()
        for step in range(rounds + 1):
            upload, served, published = served_in(sidecar, store, adapters_of(count, step), step)
            plain = peer(endpoint, prefix, published, place / f"{prefix}-plain-{step}")
            if step:  # the first round warms up
                for name, value in (("upload", upload), ("served", served), ("peer", plain)):
                    found[name].append(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-vllm", action="store_true", help="leave vLLM out, which takes a minute to start")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
    results = {}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoint = stack.enter_context(gateway(place / "s3"))
        os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
        client(endpoint).create_bucket(Bucket=BUCKET)
        url = stack.enter_context(noting_server())
        results["noting"] = measure(endpoint, "noting", url, place, chosen.adapters, chosen.rounds)
        show("without loading", results["noting"], chosen.adapters)
        if not chosen.without_vllm:
            arguments = [f"--model={base_model(place / 'base')}", "--load-format=dummy", "--dtype=bfloat16"]
            arguments += ["--served-model-name=base", "--max-model-len=256", "--enable-lora", f"--max-lora-rank={RANK}"]
            arguments += [f"--max-loras={2 * chosen.adapters}", f"--max-cpu-loras={2 * chosen.adapters}"]
            (place / "vllm").mkdir()
            server = stack.enter_context(vllm_server(place / "vllm", arguments=arguments))
            results["vllm"] = measure(endpoint, "vllm", server.url, place, chosen.adapters, chosen.rounds)
            show("with vLLM", results["vllm"], chosen.adapters)
    print(f"load of the machine over the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1))


def show(what: str, found: dict[str, list[float]], count: int) -> None:
    words = ", ".join(f"{name} {statistics.median(values):.2f} s ({min(values):.2f})" for name, values in found.items())
    print(f"{what}, {count} adapters of {RANK * 2 * WIDTH * 4 * LAYERS * 4 / 1e6:.0f} MB: {words}", flush=True)


if __name__ == "__main__":
    main()
