"""PEFT folders: what PEFT writes is read, what is written PEFT reads, and everything odd is refused by name."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load, save
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from populora_trainer.errors import AdapterFormatError
from populora_trainer.population.factors import Factors, Pair, delta
from populora_trainer.population.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    adapter_from_files,
    adapter_to_files,
    digest,
    read_adapter,
    read_files,
    write_adapter,
    write_folder,
)

CONFIG = AdapterConfig(4, 8, ("q_proj", "v_proj"), "some/base")


def adapter(dtype: torch.dtype = torch.float32, layers: int = 2, rank: int = 4) -> Factors:
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{layer}.self_attn.{name}": Pair(
            torch.randn(rank, 16, generator=generator).to(dtype), torch.randn(out, rank, generator=generator).to(dtype)
        )
        for layer in range(layers)
        for name, out in (("q_proj", 16), ("v_proj", 8))
    }


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    ).eval()


def equal(first: Factors, second: Factors) -> bool:
    return list(first) == list(second) and all(
        torch.equal(first[path].A, second[path].A) and torch.equal(first[path].B, second[path].B) for path in first
    )


def refused(files: dict[str, bytes], words: str) -> None:
    with pytest.raises(AdapterFormatError, match=words):
        adapter_from_files(files)


def with_settings(**changes: object) -> dict[str, bytes]:
    files = adapter_to_files(adapter(), CONFIG)
    fields = {**json.loads(files[CONFIG_FILE]), **changes}
    return {**files, CONFIG_FILE: json.dumps(fields).encode()}


def with_tensors(change: Callable[[dict[str, Tensor]], object]) -> dict[str, bytes]:
    files = adapter_to_files(adapter(), CONFIG)
    tensors = load(files[WEIGHTS_FILE])
    change(tensors)
    return {**files, WEIGHTS_FILE: save(tensors, metadata={"format": "pt"})}


def test_a_folder_that_peft_wrote_is_read_and_written_again_byte_for_byte(tmp_path: Path) -> None:
    model = get_peft_model(
        tiny_model(), LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    )
    model.save_pretrained(tmp_path / "peft")
    factors, config = read_adapter(tmp_path / "peft")
    assert (config.rank, config.alpha, config.target_modules, config.scaling) == (4, 8.0, ("q_proj", "v_proj"), 2.0)
    assert next(iter(factors)) == "model.layers.0.self_attn.q_proj"
    files = adapter_to_files(factors, config)
    assert files[WEIGHTS_FILE] == (tmp_path / "peft" / WEIGHTS_FILE).read_bytes()
    theirs = json.loads((tmp_path / "peft" / CONFIG_FILE).read_bytes())
    theirs["target_modules"].sort()  # PEFT writes a set, in any order
    assert json.loads(files[CONFIG_FILE]) == theirs


def test_peft_loads_what_is_written_and_adds_scaling_times_b_a(tmp_path: Path) -> None:
    factors = adapter()
    write_adapter(tmp_path / "child", factors, CONFIG)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        served = PeftModel.from_pretrained(tiny_model(), tmp_path / "child").eval()(tokens).logits
        base = tiny_model()
        plain = base(tokens).logits
        for path, pair in factors.items():
            base.get_submodule(path).weight += CONFIG.scaling * delta(pair)
        merged = base(tokens).logits
    torch.testing.assert_close(served, merged, rtol=1e-4, atol=1e-4)
    assert (served - plain).abs().max() > 0.01


@settings(max_examples=20)
@given(
    rank=st.integers(1, 5),
    alpha=st.sampled_from([1.0, 8.0, 0.5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layers=st.sampled_from([1, 11]),
)
def test_the_round_trip_is_bit_exact_and_the_bytes_depend_on_nothing_else(
    rank: int, alpha: float, dtype: torch.dtype, layers: int
) -> None:
    factors = adapter(dtype, layers, rank)
    config = AdapterConfig(rank, alpha, ("v_proj", "q_proj"), "b", "main")
    files = adapter_to_files(factors, config)
    back, read = adapter_from_files(files)
    assert equal(back, factors)
    assert read == config
    assert adapter_to_files(dict(reversed(back.items())), read) == files


def test_a_digest_names_content_and_configuration() -> None:
    files = adapter_to_files(adapter(), CONFIG)
    assert digest(files) == digest(adapter_to_files(adapter(), CONFIG))
    assert len(digest(files)) == 64
    moved = adapter()
    moved["model.layers.0.self_attn.q_proj"].A[0, 0] += 1
    others = {
        digest(adapter_to_files(moved, CONFIG)),
        digest(adapter_to_files(adapter(), AdapterConfig(4, 16, ("q_proj", "v_proj"), "some/base"))),
        digest({**files, CONFIG_FILE: files[CONFIG_FILE] + b" "}),
    }
    assert len(others | {digest(files)}) == 4
    assert digest({**files, "README.md": b""}) == digest(files)
    lengths = [f"{name}\0{len(files[name])}\0".encode() + files[name] for name in (CONFIG_FILE, WEIGHTS_FILE)]
    assert digest(files) == hashlib.sha256(b"".join(lengths)).hexdigest()


def test_tensors_that_share_memory_or_are_views_are_written_as_they_look() -> None:
    A = torch.randn(16, 4).T
    factors = {path: Pair(A, torch.eye(16)[:, :4]) for path in ("m.0.q_proj", "m.0.v_proj")}
    back, _ = adapter_from_files(adapter_to_files(factors, CONFIG))
    assert equal(back, factors)


def rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(Q_B), rf"{Q_B} is missing"),
        (lambda t: t.pop(Q_A), rf"{Q_A} is missing"),
        (lambda t: rename(t, Q_A, Q_A.replace(".weight", ".default.weight")), r"lora_A\.default\.weight is not part"),
        (lambda t: rename(t, Q_A, Q_A.removeprefix("base_model.model.")), r"key model\.layers"),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2, 2)}), r"lm_head\.weight is not part"),
        (lambda t: t.update({Q_A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(2)}), "magnitude"),
        (lambda t: t.update({Q_A.replace("lora_A", "lora_embedding_A"): torch.ones(4, 2)}), "lora_embedding_A"),
        (lambda t: t.update({Q_B.replace(".weight", ".bias"): torch.ones(2)}), r"lora_B\.bias"),
        (lambda t: t.update({Q_A: torch.ones(3, 16)}), r"lora_A\.weight is \(3, 16\); its axis 0 must be r 4"),
        (lambda t: t.update({Q_B: torch.ones(16, 5)}), r"lora_B\.weight is \(16, 5\); its axis 1 must be r 4"),
        (lambda t: t.update({Q_B: torch.ones(16, 4, 1)}), r"lora_B\.weight is \(16, 4, 1\)"),
        (lambda t: t.update({Q_B: torch.ones(16, 4, dtype=torch.bfloat16)}), "bfloat16, torch.float32"),
        (lambda t: t.update({Q_B: torch.full((16, 4), float("nan"))}), rf"{Q_B} holds NaN"),
        (lambda t: [rename(t, k, k.replace("q_proj", "k_proj")) for k in list(t) if "q_proj" in k], "matches none"),
        (lambda t: [t.pop(k) for k in list(t) if "q_proj" in k], "no weights for q_proj"),
        (lambda t: t.clear(), "holds no weights"),
    ],
)
def test_keys_shapes_and_values_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    refused(with_tensors(change), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora is True; DoRA"),
        ({"use_rslora": True}, "use_rslora is True; rsLoRA scales by alpha / sqrt"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern is"),
        ({"target_modules": ["lm_head"]}, "lm_head; embeddings and output heads"),
        ({"target_modules": ["model.embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ".*_proj"}, "must be a list of module names"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_parameters": ["experts.down"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"a_setting_of_tomorrow": 3}, "a_setting_of_tomorrow is 3; this setting is not supported"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; it must be 'LORA'"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"r": 0}, "r is 0"),
        ({"r": "4"}, "r is '4'; it must be a whole number"),
        ({"r": True}, "r is True"),
        ({"r": 8}, "must be r 8"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": 10**400}, "lora_alpha is inf; it must be a finite number above 0"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path is 3"),
    ],
)
def test_settings_that_change_what_the_factors_mean_are_refused_in_a_sentence(
    changes: dict[str, object], words: str
) -> None:
    refused(with_settings(**changes), words)


def test_settings_of_how_the_adapter_was_trained_are_taken() -> None:
    files = with_settings(lora_dropout=0.1, init_lora_weights="gaussian", task_type=None, peft_version="0.9")
    assert equal(adapter_from_files(files)[0], adapter())
    files = with_settings(fan_in_fan_out=True)  # as PEFT writes it for GPT-2, whose base keeps its weights transposed
    assert equal(adapter_from_files(files)[0], adapter())


def test_files_that_are_missing_damaged_or_pickles_are_refused() -> None:
    files = adapter_to_files(adapter(), CONFIG)
    refused({CONFIG_FILE: files[CONFIG_FILE]}, f"{WEIGHTS_FILE} is missing")
    refused({WEIGHTS_FILE: files[WEIGHTS_FILE]}, f"{CONFIG_FILE} is missing")
    refused({CONFIG_FILE: files[CONFIG_FILE], "adapter_model.bin": b""}, "adapter_model.bin is a pickle")
    refused({**files, WEIGHTS_FILE: files[WEIGHTS_FILE][:-8]}, "not a safetensors file")
    for damaged in (b"[" * 100_000, b'{"r": 1' + b"0" * 5000 + b"}", b"\xff"):
        refused({**files, CONFIG_FILE: damaged}, f"{CONFIG_FILE} is not JSON")
    refused({**files, WEIGHTS_FILE: b"PK\x03\x04"}, "not a safetensors file")
    refused({**files, CONFIG_FILE: b"{"}, "is not JSON")
    refused({**files, CONFIG_FILE: b"[]"}, "it must hold an object")
    refused({**files, CONFIG_FILE: b'{"peft_type": "LORA"}'}, "r is missing")


def test_a_pickle_in_a_folder_is_refused_without_being_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", {CONFIG_FILE: adapter_to_files(adapter(), CONFIG)[CONFIG_FILE]})
    os.mkfifo(tmp_path / "a" / "adapter_model.bin")  # reading it would hang
    with pytest.raises(AdapterFormatError, match="pickle"):
        read_adapter(tmp_path / "a")


def test_the_modules_of_a_base_model_must_all_be_there_with_their_shapes() -> None:
    files = adapter_to_files(adapter(), CONFIG)
    expected = {path: (pair.B.shape[0], pair.A.shape[1]) for path, pair in reversed(adapter().items())}
    factors, _ = adapter_from_files(files, expected=expected)
    assert list(factors) == list(expected)
    path = "model.layers.1.self_attn.v_proj"
    for wrong, words in (
        ({**expected, "model.layers.2.self_attn.q_proj": (16, 16)}, r"layers\.2\.self_attn\.q_proj\.lora_A.* missing"),
        ({**expected, path: (8, 17)}, r"v_proj\.lora_A\.weight is \(4, 16\); the base model needs \(4, 17\)"),
        ({**expected, path: (9, 16)}, r"v_proj\.lora_B\.weight is \(8, 4\); the base model needs \(9, 4\)"),
        ({key: shape for key, shape in expected.items() if key != path}, "not one of the base model's"),
    ):
        with pytest.raises(AdapterFormatError, match=words):
            adapter_from_files(files, expected=wrong)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({}, "no modules"),
        (adapter(rank=3), "rank 3 and the configuration says r 4"),
        (adapter(torch.float64), "float64"),
        ({"m.k_proj": Pair(torch.ones(4, 2), torch.ones(2, 4))}, "m.k_proj matches none"),
        ({"m.q_proj": Pair(torch.ones(4, 2), torch.ones(2, 4))}, "no weights for v_proj"),
        ({"m.q_proj": Pair(torch.ones(4, 2), torch.ones(2, 3))}, "axis 1 must be r 4"),
        ({"m.q_proj": Pair(torch.ones(4, 2), torch.ones(2, 4).bfloat16())}, "one dtype"),
    ],
)
def test_factors_that_do_not_fit_their_configuration_are_not_written(factors: Factors, words: str) -> None:
    with pytest.raises(AdapterFormatError, match=words):
        adapter_to_files(factors, CONFIG)
    bad = adapter()
    bad["model.layers.0.self_attn.q_proj"].A[0, 0] = float("inf")
    with pytest.raises(AdapterFormatError, match="holds NaN or infinity"):
        adapter_to_files(bad, CONFIG)


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(AdapterFormatError, match="cannot be written: No space left"):
            write_adapter(tmp_path / "child", adapter(), CONFIG)
    assert list(tmp_path.iterdir()) == []
    name = write_adapter(tmp_path / "child", adapter(), CONFIG)
    assert name == digest(read_files(tmp_path / "child"))
    assert sorted(path.name for path in (tmp_path / "child").iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert list(tmp_path.iterdir()) == [tmp_path / "child"]


def test_an_existing_folder_is_not_overwritten_but_an_empty_one_is_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_adapter(tmp_path / "empty", adapter(), CONFIG)
    with pytest.raises(AdapterFormatError, match="exists; name a folder that does not exist or is empty"):
        write_adapter(tmp_path / "empty", adapter(), CONFIG)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "child"):
        with pytest.raises(AdapterFormatError):
            write_adapter(path, adapter(), CONFIG)
    with pytest.raises(AdapterFormatError, match="is not a folder"):
        read_adapter(tmp_path / "nowhere")
