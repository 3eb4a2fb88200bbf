"""The sidecar beside a real vLLM server: what only that can show."""

import signal
import socket
from pathlib import Path

import pytest
import torch
from adapters import RANK, ask, greedy, random_adapter, served
from server import START_SECONDS
from sidecars import sidecar_process, until

from populora_trainer.nano.registry import builtin_folder
from populora_trainer.population.peft_format import write_adapter
from populora_trainer.storage.checkpoint import Adapter
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.publication import publish

MEMBERS = ("t0", "t1", "s0", "s1")
PROMPT = [5, 40, 41, 60, 7, 12, 99, 100, 33, 21, 8, 45]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    return tmp_path / "adapters"


def generation(step: int, members: tuple[str, ...] = MEMBERS) -> dict[str, Adapter]:
    return {member: random_adapter(100 * step + slot) for slot, member in enumerate(members)}


def by_peft(folder: Path, tokens: int) -> list[int]:
    """What PEFT says with an adapter, greedily and in float32."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(builtin_folder("nano"), dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder).eval()
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[0, len(PROMPT) :].tolist()


def test_two_versions_of_a_member_say_what_peft_says_with_each(vllm, store, adapters, tmp_path):
    with sidecar_process(str(tmp_path / "run"), vllm.url, adapters) as sidecar:
        said = {}
        for step in (1, 2):
            adapter = random_adapter(step)
            published = publish(store, step, {"t0": adapter})
            sidecar.until_serves(published.sha256)
            write_adapter(tmp_path / f"peft-{step}", adapter.factors, adapter.config)
            name = published.names["t0"]
            said[step] = greedy(vllm.url, name, PROMPT)
            assert said[step] == by_peft(tmp_path / f"peft-{step}", len(said[step]))
        assert said[1] != said[2] != greedy(vllm.url, "base", PROMPT)
        first = next(name for name in served(vllm.url) if "-s000001-" in name)
        assert greedy(vllm.url, first, PROMPT) == said[1], "the older version is still served, and still the same"


def test_thirty_generations_of_fresh_versions_never_load_more_than_two(vllm, store, adapters, tmp_path):
    with sidecar_process(str(tmp_path / "run"), vllm.url, adapters) as sidecar:
        before: set[str] = set()
        for step in range(30):
            published = publish(store, step, generation(step))
            sidecar.until_serves(published.sha256)
            now = set(published.names.values())
            assert set(served(vllm.url)) == now | before
            assert served(vllm.url) == sidecar.status()["adapters"] | {
                one.name: one.digest for one in published.adapters
            }
            greedy(vllm.url, published.names["t0"], PROMPT, 4)
            before = now
        until(lambda: len(list(adapters.iterdir())) == 2 * len(MEMBERS), lambda: f"{list(adapters.iterdir())}")
        metrics = ask(f"{sidecar.url}/metrics")["text"]
        assert "populora_sidecar_loads_total 120.0" in metrics
        assert "populora_sidecar_unloads_total 112.0" in metrics
        assert sidecar.status()["error"] is None


def test_a_damaged_adapter_is_refused_and_told_while_the_old_one_keeps_serving(vllm, store, adapters, tmp_path):
    with sidecar_process(str(tmp_path / "run"), vllm.url, adapters) as sidecar:
        old = publish(store, 1, {"t0": random_adapter(1)})
        sidecar.until_serves(old.sha256)
        said = greedy(vllm.url, old.names["t0"], PROMPT)
        damaged = LocalStore(tmp_path / "elsewhere")
        new = publish(damaged, 2, {"t0": random_adapter(2)})
        (adapter,) = new.adapters
        for file in adapter.files:
            store.put(adapter.key(file), damaged.get(adapter.key(file))[:-1] + b"?")
        store.put("serving.json", damaged.get("serving.json"))
        until(lambda: "is damaged, so" in str(sidecar.status()["error"]), lambda: str(sidecar.status()))
        assert adapter.name not in served(vllm.url)
        assert greedy(vllm.url, old.names["t0"], PROMPT) == said
        assert sidecar.ready()


def test_an_adapter_that_vllm_refuses_is_told_in_its_words(vllm, store, adapters, tmp_path):
    wide = random_adapter(1)
    doubled = {
        path: type(pair)(torch.cat([pair.A, pair.A]), torch.cat([pair.B, pair.B], dim=1))
        for path, pair in wide.factors.items()
    }
    config = type(wide.config)(2 * RANK, 16.0, wide.config.target_modules, wide.config.base_model)
    with sidecar_process(str(tmp_path / "run"), vllm.url, adapters) as sidecar:
        publish(store, 1, {"t0": Adapter(doubled, config)})
        until(lambda: sidecar.status()["error"], lambda: str(sidecar.status()))
        assert "does not load t0-s000001-" in str(sidecar.status()["error"])
        assert "max_lora_rank" in str(sidecar.status()["error"])
        assert not sidecar.ready()


def test_a_server_that_was_killed_has_every_adapter_back_before_it_is_ready(vllm, store, adapters, tmp_path):
    published = publish(store, 1, generation(1))
    name = published.names["s1"]
    with sidecar_process(str(tmp_path / "run"), vllm.url, adapters) as sidecar:
        sidecar.until_ready()
        said = greedy(vllm.url, name, PROMPT)
        vllm.stop(signal.SIGKILL)
        until(lambda: not sidecar.ready(), lambda: "the sidecar has noticed")
        assert sidecar.status()["publication"] is None
        vllm.start()
        sidecar.until_ready(START_SECONDS)
        assert set(served(vllm.url)) == set(published.names.values())
        assert greedy(vllm.url, name, PROMPT) == said


def test_a_sidecar_that_was_started_again_uses_what_its_folder_holds(vllm, store, adapters, tmp_path):
    published = publish(store, 1, generation(1))
    with sidecar_process(str(tmp_path / "run"), vllm.url, adapters) as sidecar:
        sidecar.until_serves(published.sha256)
    for name in served(vllm.url):
        ask(f"{vllm.url}/v1/unload_lora_adapter", {"lora_name": name})
    (adapters / ".populora-part-left").mkdir()
    weights = adapters / published.adapters[0].digest / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with sidecar_process(str(tmp_path / "run"), vllm.url, adapters) as sidecar:
        sidecar.until_serves(published.sha256)
        assert not (adapters / ".populora-part-left").exists()
        size = sum(store.size(published.adapters[0].key(file)) for file in published.adapters[0].files)
        assert f"populora_sidecar_download_bytes_total {float(size)}" in ask(f"{sidecar.url}/metrics")["text"]
        assert set(served(vllm.url)) == set(published.names.values())


def test_a_replica_that_never_answers_does_not_hold_up_another(vllm, store, adapters, tmp_path):
    published = publish(store, 1, generation(1))
    run = str(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            sidecar_process(run, silent_url, tmp_path / "other") as stuck,
            sidecar_process(run, vllm.url, adapters) as well,
        ):
            well.until_serves(published.sha256)
            until(lambda: stuck.status()["error"], lambda: str(stuck.status()))
            assert f"vLLM at {silent_url} has not answered /health within 5 s" in str(stuck.status()["error"])
            assert not stuck.ready()
            newer = publish(store, 2, generation(2))
            well.until_serves(newer.sha256)
            assert well.ready()


def test_a_server_that_hangs_is_unready_until_it_goes_on(vllm, store, adapters, tmp_path):
    published = publish(store, 1, generation(1))
    with sidecar_process(str(tmp_path / "run"), vllm.url, adapters) as sidecar:
        sidecar.until_serves(published.sha256)
        assert vllm.process is not None
        vllm.process.send_signal(signal.SIGSTOP)
        try:
            until(lambda: sidecar.status()["error"], lambda: str(sidecar.status()))
            assert "has not answered" in str(sidecar.status()["error"])
            until(lambda: not sidecar.ready(), lambda: "the sidecar is unready")
        finally:
            vllm.process.send_signal(signal.SIGCONT)
        newer = publish(store, 2, generation(2))
        sidecar.until_serves(newer.sha256)
        sidecar.until_ready()
