"""A base model is loaded by its address, or the user is told in one sentence why not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from populora_trainer.errors import BaseModelError, UnfitBaseError
from populora_trainer.nano.registry import copy_builtin
from populora_trainer.nano.tokenizer import build_tokenizer
from populora_trainer.rollout.base_model import (
    load_base,
    tokenizer_digest,
    use_deterministic_algorithms,
    weights_digest,
)


@pytest.fixture
def saved_model(tmp_path: Path, make_model: Callable[..., PreTrainedModel]) -> Path:
    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(48)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1").save_pretrained(tmp_path)
    make_model().save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_folder_becomes_a_frozen_model_in_the_wanted_dtype(
    saved_model: Path, make_model: Callable[..., PreTrainedModel]
) -> None:
    base = load_base(f"file://{saved_model}", "float32")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(base.model(input_ids=ids).logits, make_model()(input_ids=ids).logits)
    assert not base.model.training
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    assert base.model.config._attn_implementation == "sdpa"
    assert (base.end_ids, base.pad_id, base.folder, base.revision) == ((1,), 0, saved_model, None)
    assert load_base(f"file://{saved_model}", "bfloat16").model.dtype == torch.bfloat16


def test_the_digest_names_the_weights(saved_model: Path) -> None:
    base, again = (load_base(f"file://{saved_model}", "float32") for _ in range(2))
    assert base.digest == again.digest
    assert load_base(f"file://{saved_model}", "bfloat16").digest != base.digest
    with torch.no_grad():
        next(again.model.parameters())[0, 0] += 1
    assert weights_digest(again.model) != base.digest


def test_the_tokenizer_is_the_folders_and_not_its_architectures(saved_model: Path) -> None:
    ids = load_base(f"file://{saved_model}").tokenizer.encode("t5 t47 t5", add_special_tokens=False)
    assert ids == [5, 47, 5]
    embedded = load_base("builtin://nano").tokenizer
    text = "<po>def f(x):\n    return x + 12<new>"
    assert embedded.encode(text, add_special_tokens=False) == build_tokenizer().encode(text, add_special_tokens=False)
    assert embedded.decode(embedded.encode(text, add_special_tokens=False)) == text


def test_a_folder_is_loaded_in_silence(saved_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_base(f"file://{saved_model}")
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()


def test_every_end_token_of_the_generation_configuration_counts(saved_model: Path) -> None:
    base = load_base(f"file://{saved_model}")
    base.model.generation_config.eos_token_id = [7, 9]
    assert base.end_ids == (1, 7, 9)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("nano", r"nano is no address of a model; allowed are builtin://nano, .* \(the scheme is missing\)"),
        ("ftp://host/model", "ftp://host/model is no address of a model"),
        ("hf://justaname", "hf://justaname is no address of a model"),
        ("s3://bucket/model", "allowed are builtin://, file:// and hf://"),
        ("file:///nowhere/at/all", r"has no config\.json"),
    ],
)
def test_an_address_that_is_not_understood_is_one_sentence(uri: str, message: str) -> None:
    with pytest.raises(BaseModelError, match=message) as caught:
        load_base(uri)
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BaseModelError, match="hf://Nobody/no-such-model can't be loaded") as caught:
        load_base("hf://Nobody/no-such-model")
    assert "\n" not in str(caught.value)


def test_a_damaged_folder_is_one_sentence(saved_model: Path) -> None:
    (saved_model / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(BaseModelError, match="can't be loaded"):
        load_base(f"file://{saved_model}")
    (saved_model / "config.json").write_text('{"model_type": "no-such-architecture"}')
    with pytest.raises(BaseModelError, match="can't be loaded"):
        load_base(f"file://{saved_model}")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(DOWN), rf"lacks {DOWN}; its files are incomplete"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "knows nothing of, extra; its files are incomplete"),
        (lambda tensors: tensors.update({DOWN: torch.ones(2, 3)}), rf"has {DOWN} in shape \(2, 3\)"),
        (lambda tensors: tensors[DOWN].fill_(torch.nan), f"are no finite numbers, in {DOWN}"),
        (lambda tensors: tensors[DOWN][0].fill_(torch.inf), f"are no finite numbers, in {DOWN}"),
    ],
)
def test_weights_that_are_not_all_there_are_refused(
    saved_model: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    change_tensors(saved_model, change)
    with pytest.raises(BaseModelError, match=message) as caught:
        load_base(f"file://{saved_model}")
    assert "\n" not in str(caught.value)


def test_an_address_with_a_space_is_a_folder_with_a_space(saved_model: Path, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("models") / "my base"
    folder.symlink_to(saved_model)
    for written in ("my%20base", "my base"):
        base = load_base(f"file://{folder.parent}/{written}")
        assert (base.folder, base.place) == (folder, str(folder))


def test_the_tokenizers_digest_changes_with_its_vocabulary_and_its_chat_template(saved_model: Path) -> None:
    def digest() -> str:
        return tokenizer_digest(load_base(f"file://{saved_model}").tokenizer)

    before = digest()
    assert digest() == before
    (saved_model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with_template = digest()
    written = (saved_model / "tokenizer.json").read_text()
    (saved_model / "tokenizer.json").write_text(written.replace('"t40": 40', '"u40": 40'))
    assert len({before, with_template, digest()}) == 3


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(saved_model: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(saved_model)
    tokenizer.add_tokens(["one", "more"])
    tokenizer.save_pretrained(saved_model)
    with pytest.raises(UnfitBaseError, match=r"gives 'more' the id 49, and the model embeds the ids 0 to 47") as caught:
        load_base(f"file://{saved_model}")
    assert caught.value.exit_code == 42


def test_a_model_that_continues_no_text_is_named(saved_model: Path) -> None:
    (saved_model / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UnfitBaseError, match="model's type is vit, which is no causal language model of transformers"):
        load_base(f"file://{saved_model}")


def test_a_base_of_the_hub_is_the_commit_that_its_branch_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    place, old, new = tmp_path / "models--Some--Model", "a" * 40, "b" * 40
    for commit, name in ((old, "nano"), (new, "nano-raw")):
        copy_builtin(name, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(old)
    first = load_base("hf://Some/Model")
    (place / "refs" / "main").write_text(new)
    moved, pinned, named = (
        load_base(uri, revision=revision)
        for uri, revision in (
            ("hf://Some/Model", None),
            ("hf://Some/Model", first.revision),
            (f"hf://Some/Model@{old}", None),
        )
    )
    assert [base.revision for base in (first, moved, pinned, named)] == [old, new, old, old]
    assert first.digest == pinned.digest == named.digest != moved.digest
    assert (named.place, named.folder) == ("Some/Model", None)


def test_an_unknown_dtype_is_refused(saved_model: Path) -> None:
    with pytest.raises(BaseModelError, match="dtype is int8; allowed are bfloat16, float16, float32"):
        load_base(f"file://{saved_model}", "int8")


def test_deterministic_algorithms_are_switched_on_in_one_place() -> None:
    threads = torch.get_num_threads()
    try:
        use_deterministic_algorithms(threads)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == threads
    finally:
        torch.use_deterministic_algorithms(False)
