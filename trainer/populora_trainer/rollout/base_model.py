"""Loading a frozen base model by its address, with a digest that names exactly what was loaded."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging
from transformers.utils.hub import cached_file, extract_commit_hash

from populora_trainer.errors import BaseModelError, NoBaseModelError, UnfitBaseError
from populora_trainer.rollout.attention import attention_for

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Base:
    """A base model with its tokenizer.

    Attributes:
        model: a causal language model in evaluation mode, its weights frozen.
        uri: the address it was asked for by.
        folder: where its files were read from; None from the hub's cache.
        revision: commit of the hub that was loaded; None from a folder.
        digest: SHA-256 over the names, shapes, dtypes and bytes of its weights, as loaded.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    uri: str
    folder: Path | None
    revision: str | None
    digest: str

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion: the generation configuration's, the model configuration's, the tokenizer's."""
        found: set[int] = set()
        for configuration in (getattr(self.model, "generation_config", None), self.model.config):
            ends = getattr(configuration, "eos_token_id", None)
            found.update(ends if isinstance(ends, Sequence) else () if ends is None else (ends,))
        if isinstance(self.tokenizer.eos_token_id, int):
            found.add(self.tokenizer.eos_token_id)
        return tuple(sorted(found))

    @property
    def place(self) -> str:
        """What transformers and PEFT call this base by: a folder, or a name on the hub; an embedded base by its URI."""
        scheme, _, rest = self.uri.partition("://")
        return str(self.folder) if scheme == "file" else rest.partition("@")[0] if scheme == "hf" else self.uri

    @property
    def pad_id(self) -> int:
        """Token to fill up shorter rows with; which one does not matter, it is never attended to."""
        pad = self.tokenizer.pad_token_id
        return pad if isinstance(pad, int) else self.end_ids[0]


def load_base(
    uri: str, dtype: str = "bfloat16", *, device: torch.device | str = "cpu", revision: str | None = None
) -> Base:
    """Load a base model, frozen, in `dtype`, with attention that follows a given mask.

    Args:
        uri: `builtin://nano`, `builtin://nano-raw`, `file://FOLDER` or `hf://Org/Name@revision`.
        dtype: bfloat16, float16 or float32.
        revision: of the hub, where the address names none or one that moves, such as a branch.

    Raises:
        NoBaseModelError: the address is not understood, nothing is there, tensors are missing from it or too many, or
            a weight is no finite number.
        BaseModelError: it can't be loaded now, or it is no causal language model.
    """
    if dtype not in DTYPES:
        raise BaseModelError(f"baseModel.dtype is {dtype}; allowed are {', '.join(DTYPES)}")
    source, named = _source(uri)
    commit: str | None = None
    options: dict[str, Any] = {}
    try:
        if isinstance(source, str):
            # A branch's name may mean another commit for the next file: the first file says which it is for all.
            commit = _commit_of(source, revision or named)
            options["revision"] = commit
        # From the hub, the bars tell how far a download is; from a folder, they flash by.
        with _no_progress_bars() if isinstance(source, Path) else nullcontext():
            attention = attention_for(AutoConfig.from_pretrained(source, **options))
            tokenizer = _tokenizer_class(source).from_pretrained(source, **options)
            model, loading = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=DTYPES[dtype],
                attn_implementation=attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_check_tensors` refuses them by name
                **options,
            )
    except UnfitBaseError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and what its parsers raise
        reason = " ".join(str(error).split())
        raise BaseModelError(f"baseModel.uri: {uri} can't be loaded: {reason[:300]}") from error
    _check_tensors(uri, loading)
    _check_vocabulary(uri, tokenizer, model)
    model = model.to(device).eval().requires_grad_(False)
    folder = source if isinstance(source, Path) else None
    base = Base(model, tokenizer, uri, folder, commit, weights_digest(model))
    _check_numbers(uri, model)
    if not base.end_ids:
        raise BaseModelError(f"baseModel.uri: {uri} names no end-of-sequence token; its tokenizer must have one")
    return base


def _check_vocabulary(uri: str, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for: one prompt with such a token would end the run.

    Raises:
        UnfitBaseError: naming the token of the largest id.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    embedded = len(model.get_input_embeddings().weight)
    if largest >= embedded:
        raise UnfitBaseError(
            f"baseModel.uri: the tokenizer of {uri} gives {token!r} the id {largest}, and the model embeds "
            f"the ids 0 to {embedded - 1}; resize its embeddings, or take the tokenizer that it was trained with"
        )


def _tokenizer_class(source: Path | str) -> type[AutoTokenizer] | type[PreTrainedTokenizerFast]:
    """Return what reads a model's tokenizer.

    AutoTokenizer goes by the architecture before it goes by the folder: of a qwen2 model it takes the vocabulary and
    splits text its own way, so that the embedded base would be asked without its spaces. A folder that says that its
    tokenizer.json is all there is to its tokenizer is taken at its word.
    """
    reader: type[AutoTokenizer] | type[PreTrainedTokenizerFast] = AutoTokenizer
    if isinstance(source, Path) and (source / "tokenizer_config.json").is_file():
        settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
        if settings.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            reader = PreTrainedTokenizerFast
    return reader


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _source(uri: str) -> tuple[Path | str, str | None]:
    """Return a folder, or a name and revision on the hub."""
    scheme, separator, rest = uri.partition("://")
    if scheme == "builtin" and rest:
        from populora_trainer.nano.registry import builtin_folder

        return Path(builtin_folder(rest)), None
    if scheme == "file" and rest:
        folder = Path(unquote(rest))
        if not (folder / "config.json").is_file():
            raise NoBaseModelError(f"baseModel.uri: {uri} has no config.json; name the folder of a saved model")
        return folder, None
    if scheme == "hf" and rest.partition("@")[0].count("/") == 1:
        name, _, revision = rest.partition("@")
        return name, revision or None
    if scheme == "s3":
        raise NoBaseModelError(f"baseModel.uri: {uri} can't be read yet; allowed are builtin://, file:// and hf://")
    raise NoBaseModelError(
        f"baseModel.uri: {uri} is no address of a model; allowed are builtin://nano, builtin://nano-raw, "
        f"file:///FOLDER and hf://Org/Name@revision" + ("" if separator else " (the scheme is missing)")
    )


def _commit_of(name: str, revision: str | None) -> str | None:
    """Return the commit that a revision of a model on the hub is; the revision itself where the cache does not tell."""
    return extract_commit_hash(cached_file(name, "config.json", revision=revision), None) or revision


def _check_tensors(uri: str, loading: Mapping[str, Any]) -> None:
    """Refuse what transformers fills up with random numbers, or leaves aside, with no more than a warning."""
    for kind, what in (("missing_keys", "lacks"), ("unexpected_keys", "has, and its architecture knows nothing of,")):
        if names := sorted(loading.get(kind) or ()):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise NoBaseModelError(
                f"baseModel.uri: {uri} {what} {', '.join(names[:3])}{more}; its files are incomplete"
            )
    for mismatch in loading.get("mismatched_keys") or ():
        name, there, wanted = mismatch[:3]
        raise NoBaseModelError(
            f"baseModel.uri: {uri} has {name} in shape {tuple(there)}, and its config.json asks for {tuple(wanted)}"
        )


def _check_numbers(uri: str, model: nn.Module) -> None:
    for name, tensor in model.named_parameters():
        if not torch.isfinite(tensor).all():
            raise NoBaseModelError(f"baseModel.uri: {uri} has weights that are no finite numbers, in {name}")


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of what turns text into tokens: vocabulary, merges, added tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = {
        "vocabulary": sorted(tokenizer.get_vocab().items()) if backend is None else json.loads(backend.to_str()),
        "added": {str(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()},
        "named": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }
    if isinstance(parts["vocabulary"], dict):
        # How to cut and fill up rows is set by the last caller, and no part of what a text becomes.
        parts["vocabulary"].update(truncation=None, padding=None)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of a model's weights and buffers; equal weights give equal digests on any device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def use_deterministic_algorithms(threads: int | None = None) -> None:
    """Make torch give the same bits for the same inputs, in this process, from here on.

    On CPU the bits depend on the number of threads, so a resumed run needs the number it was started with.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
