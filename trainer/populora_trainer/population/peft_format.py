"""Adapters as PEFT folders: `adapter_config.json` and `adapter_model.safetensors`, read strictly, written bit-exactly.

PEFT loads an adapter whose keys do not match with a warning and a zero B, and ignores settings it does not know. Here
every key must be known, present and of the right shape, and a setting that would change what the factors mean is
refused by name. The same factors and configuration always give the same bytes, so a digest names an adapter.

Source: PEFT 0.21.2, `LoraConfig.save_pretrained` and `PeftModel.save_pretrained`.
"""

import hashlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from populora_trainer.errors import AdapterFormatError
from populora_trainer.population.factors import Factors, Pair, first_not_finite, rank_of, tensors_of

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<factor>[AB])\.weight")
_OUTER_LAYERS = frozenset({"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out", "word_embeddings"})
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

# What PEFT 0.21.2 writes for a plain LoRA adapter; r, lora_alpha, target_modules, base_model_name_or_path and revision
# are filled in per adapter.
_PLAIN: dict[str, JsonValue] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}

# Settings of how the adapter was made or is stored. They do not change what its factors mean.
_FREE = (
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "fan_in_fan_out"),
    *("inference_mode", "lora_alpha"),
    *("lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision"),
    "target_modules",
)
_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")
_REFUSED = {
    "use_dora": "DoRA rescales the columns of the merged weight, which no operator here preserves",
    "use_rslora": "rsLoRA scales by alpha / sqrt(r); this project scales by alpha / r",
    "bias": "trained biases are not part of an adapter here",
    "lora_bias": "a bias on lora_B is not part of an adapter here",
    "modules_to_save": "fully trained modules are not part of an adapter here",
    "rank_pattern": "every module must have the rank r",
    "alpha_pattern": "every module must have the same lora_alpha",
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter is, besides its factors.

    Attributes:
        rank: r of every module, 1 or more.
        alpha: the model adds alpha / rank * dW.
        target_modules: last names of the adapted modules, e.g. ("q_proj", "v_proj"); kept sorted.
        base_model: name, path or address of the base model, as PEFT resolves it; may be empty.
        revision: of the base model, where it has one.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    base_model: str
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise AdapterFormatError(f"r is {self.rank}; it must be 1 or more")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise AdapterFormatError(f"lora_alpha is {self.alpha}; it must be a finite number above 0")
        object.__setattr__(self, "alpha", float(self.alpha))
        object.__setattr__(self, "target_modules", tuple(sorted(self.target_modules)))
        if not self.target_modules:
            raise AdapterFormatError("target_modules is empty; name at least one module")
        _check_not_outer(self.target_modules)

    @property
    def scaling(self) -> float:
        """The factor before dW: alpha / rank."""
        return self.alpha / self.rank


def adapter_to_files(factors: Factors, config: AdapterConfig) -> dict[str, bytes]:
    """Return the two files of the adapter's PEFT folder, by name.

    Keys are in safetensors' order (sorted), the configuration's fields are sorted, and nothing depends on the clock or
    the machine: equal factors and configuration give equal bytes.

    Raises:
        AdapterFormatError: the factors do not fit the configuration, or hold NaN or infinity.
    """
    _check_factors(factors, config)
    tensors = {
        f"base_model.model.{name}.weight": tensor.detach().to("cpu").contiguous()
        for name, tensor in tensors_of(factors)
    }
    pointers = [tensor.data_ptr() for tensor in tensors.values()]
    if len(set(pointers)) < len(pointers):  # safetensors refuses tensors that share memory
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    weights = save(tensors, metadata={"format": "pt"})
    return {CONFIG_FILE: _config_to_json(config), WEIGHTS_FILE: weights}


def adapter_from_files(
    files: Mapping[str, bytes], *, expected: Mapping[str, tuple[int, int]] | None = None, source: str = "adapter"
) -> tuple[Factors, AdapterConfig]:
    """Read an adapter from the bytes of its PEFT folder's files.

    Args:
        files: file name to content; others than the two are ignored.
        expected: where given, module path to (out, in) of the base model's modules, all of which and no others must be
            adapted; the result then has their order. Without it any set of modules is taken, in order of layer.
        source: what error messages call the adapter.

    Returns:
        The factors on the CPU in the stored dtype, bit for bit, and the configuration.

    Raises:
        AdapterFormatError: a file is missing or damaged, a setting is not supported, or a key is missing, unknown, or
            has the wrong rank, shape or dtype; the message names it.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in files:
            pickles = [pickle for pickle in _PICKLES if pickle in files]
            if name == WEIGHTS_FILE and pickles:
                raise AdapterFormatError(
                    f"{source}: {pickles[0]} is a pickle, which can run code when read; save the adapter as {name}"
                )
            raise AdapterFormatError(f"{source}: {name} is missing; a LoRA folder has {CONFIG_FILE} and {WEIGHTS_FILE}")
    config = _config_from_json(files[CONFIG_FILE], f"{source}: {CONFIG_FILE}")
    try:
        tensors = load(files[WEIGHTS_FILE])
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise AdapterFormatError(f"{source}: {WEIGHTS_FILE} is not a safetensors file ({error})") from error
    factors = _pairs(tensors, config, f"{source}: {WEIGHTS_FILE}")
    if expected is not None:
        factors = _fit(factors, expected, f"{source}: {WEIGHTS_FILE}")
    return factors, config


def write_adapter(folder: str | Path, factors: Factors, config: AdapterConfig) -> str:
    """Write the adapter as a PEFT folder, whole or not at all, and return its digest.

    Raises:
        AdapterFormatError: as `adapter_to_files` and `write_folder`.
    """
    files = adapter_to_files(factors, config)
    write_folder(folder, files)
    return digest(files)


def read_adapter(
    folder: str | Path, *, expected: Mapping[str, tuple[int, int]] | None = None
) -> tuple[Factors, AdapterConfig]:
    """Read a PEFT folder. Arguments, result and errors as `adapter_from_files`."""
    return adapter_from_files(read_files(folder), expected=expected, source=str(folder))


def read_files(folder: str | Path) -> dict[str, bytes]:
    """Return the adapter's two files of a folder; of a pickle only the name, with no content.

    Raises:
        AdapterFormatError: the folder does not exist or cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise AdapterFormatError(f"{folder} is not a folder; an adapter is a folder with {CONFIG_FILE}")
    files = {name: b"" for name in _PICKLES if (folder / name).exists()}
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            files[name] = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise AdapterFormatError(f"{folder / name} cannot be read: {error.strerror}") from error
    return files


def digest(files: Mapping[str, bytes]) -> str:
    """Return the adapter's identity: the sha256, in hex, over the names, lengths and contents of its two files."""
    total = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        content = files[name]
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def write_folder(folder: str | Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder whole or not at all: under a temporary name, flushed to disk, then renamed.

    Raises:
        AdapterFormatError: the folder exists and is not empty, or cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AdapterFormatError(f"{folder} exists; name a folder that does not exist or is empty")
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        for name, content in files.items():
            with open(temporary / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        temporary.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        _sync_folder(temporary)
        temporary.rename(folder)
        temporary = None
        _sync_folder(folder.parent)
    except OSError as error:
        raise AdapterFormatError(f"{folder} cannot be written: {error.strerror}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_not_outer(names: tuple[str, ...]) -> None:
    for name in names:
        if name.rsplit(".", 1)[-1] in _OUTER_LAYERS:
            raise AdapterFormatError(
                f"target_modules names {name}; embeddings and output heads cannot be adapted, "
                "as vLLM leaves them out of prompt log-probabilities"
            )


def matches(path: str, target: str) -> bool:
    """Say whether PEFT takes `target` for the module at `path`."""
    return path == target or path.endswith(f".{target}")


def _check_factors(factors: Factors, config: AdapterConfig) -> None:
    if not factors:
        raise AdapterFormatError("the adapter has no modules")
    if rank_of(factors) != config.rank:
        raise AdapterFormatError(f"the factors have rank {rank_of(factors)} and the configuration says r {config.rank}")
    dtype = next(iter(factors.values())).A.dtype
    if dtype not in DTYPES:
        raise AdapterFormatError(f"the factors are {dtype}; PEFT folders hold float32, bfloat16 or float16")
    for name, tensor in tensors_of(factors):
        axis = 0 if name.endswith("A") else 1
        if tensor.ndim != 2 or tensor.shape[axis] != config.rank:
            raise AdapterFormatError(f"{name} is {tuple(tensor.shape)}; its axis {axis} must be r {config.rank}")
        if tensor.dtype != dtype:
            raise AdapterFormatError(f"{name} is {tensor.dtype} and others are {dtype}; an adapter has one dtype")
    _check_targets(factors, config, "the adapter")
    odd = first_not_finite(dict(tensors_of(factors)))
    if odd is not None:
        raise AdapterFormatError(f"{odd} holds NaN or infinity; every value must be finite")


def _check_targets(factors: Factors, config: AdapterConfig, where: str) -> None:
    for path in factors:
        if not any(matches(path, target) for target in config.target_modules):
            raise AdapterFormatError(f"{where}: module {path} matches none of target_modules {config.target_modules}")
    for target in config.target_modules:
        if not any(matches(path, target) for path in factors):
            raise AdapterFormatError(f"{where}: no weights for {target}, which target_modules names")


def _pairs(tensors: Mapping[str, Tensor], config: AdapterConfig, where: str) -> Factors:
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterFormatError(
                f"{where}: key {key} is not part of a plain LoRA adapter; "
                "keys are base_model.model.<module path>.lora_A.weight and .lora_B.weight"
            )
        _check_not_outer((match["path"],))
        halves.setdefault(match["path"], {})[match["factor"]] = tensor
    if not halves:
        raise AdapterFormatError(f"{where}: it holds no weights")
    factors: Factors = {}
    dtypes = sorted({str(tensor.dtype) for tensor in tensors.values()})
    if len(dtypes) > 1 or next(iter(tensors.values())).dtype not in DTYPES:
        raise AdapterFormatError(f"{where}: dtypes {', '.join(dtypes)}; it must hold one of float32, bfloat16, float16")
    for path in sorted(halves, key=_by_layer):
        for factor, axis in (("A", 0), ("B", 1)):
            key = f"base_model.model.{path}.lora_{factor}.weight"
            if factor not in halves[path]:
                raise AdapterFormatError(f"{where}: key {key} is missing")
            shape = tuple(halves[path][factor].shape)
            if len(shape) != 2 or shape[axis] != config.rank or 0 in shape:
                raise AdapterFormatError(f"{where}: {key} is {shape}; its axis {axis} must be r {config.rank}")
        factors[path] = Pair(halves[path]["A"], halves[path]["B"])
    _check_targets(factors, config, where)
    name = first_not_finite(dict(tensors_of(factors)))
    if name is not None:
        raise AdapterFormatError(
            f"{where}: base_model.model.{name}.weight holds NaN or infinity; every value must be finite"
        )
    return factors


def _by_layer(path: str) -> list[tuple[int, str]]:
    # Layer 10 after layer 9, as in the model.
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def _fit(factors: Factors, expected: Mapping[str, tuple[int, int]], where: str) -> Factors:
    for path, (out_features, in_features) in expected.items():
        if path not in factors:
            raise AdapterFormatError(f"{where}: key base_model.model.{path}.lora_A.weight is missing")
        rank = factors[path].A.shape[0]
        for factor, tensor, shape in zip("AB", factors[path], ((rank, in_features), (out_features, rank)), strict=True):
            if tuple(tensor.shape) != shape:
                raise AdapterFormatError(
                    f"{where}: base_model.model.{path}.lora_{factor}.weight is {tuple(tensor.shape)}; "
                    f"the base model needs {shape}"
                )
    for path in factors:
        if path not in expected:
            raise AdapterFormatError(f"{where}: module {path} is not one of the base model's adapted modules")
    return {path: factors[path] for path in expected}


def _config_to_json(config: AdapterConfig) -> bytes:
    fields = dict(_PLAIN)
    fields["r"] = config.rank
    fields["lora_alpha"] = int(config.alpha) if config.alpha.is_integer() else config.alpha
    fields["target_modules"] = cast(list[JsonValue], list(config.target_modules))
    fields["base_model_name_or_path"] = config.base_model or None
    fields["revision"] = config.revision
    return json.dumps(fields, indent=2, sort_keys=True).encode()


def _config_from_json(content: bytes, where: str) -> AdapterConfig:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{where} is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise AdapterFormatError(f"{where} holds {type(fields).__name__}; it must hold an object")
    if fields.get("peft_type") != "LORA":
        raise AdapterFormatError(f"{where}: peft_type is {fields.get('peft_type')!r}; it must be 'LORA'")
    for name, value in fields.items():
        _check_setting(name, value, where)
    for name in ("r", "lora_alpha", "target_modules"):
        if name not in fields:
            raise AdapterFormatError(f"{where}: {name} is missing")
    rank, alpha, targets = fields["r"], fields["lora_alpha"], fields["target_modules"]
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise AdapterFormatError(f"{where}: r is {rank!r}; it must be a whole number, 1 or more")
    if isinstance(alpha, int) and abs(alpha) > sys.float_info.max:
        alpha = math.inf  # a whole number that no float holds; the check below names it
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise AdapterFormatError(f"{where}: lora_alpha is {alpha!r}; it must be a number above 0")
    if not isinstance(targets, list) or not all(isinstance(target, str) and target for target in targets):
        raise AdapterFormatError(
            f"{where}: target_modules is {targets!r}; it must be a list of module names such as ['q_proj', 'v_proj']"
        )
    base_model, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    for name, value in (("base_model_name_or_path", base_model), ("revision", revision)):
        if value is not None and not isinstance(value, str):
            raise AdapterFormatError(f"{where}: {name} is {value!r}; it must be text or null")
    try:
        return AdapterConfig(rank, alpha, tuple(targets), base_model or "", revision)
    except AdapterFormatError as error:
        raise AdapterFormatError(f"{where}: {error}") from error


def _check_setting(name: str, value: JsonValue, where: str) -> None:
    if name in _FREE:
        return
    if name == "init_lora_weights":
        # PiSSA, OLoRA, LoftQ and their like also change the base model's weights, so the factors alone mean nothing.
        if not any(value is known or (isinstance(known, str) and value == known) for known in _INITIALISATIONS):
            raise AdapterFormatError(
                f"{where}: init_lora_weights is {value!r}; it must be one of {_INITIALISATIONS}, "
                "which leave the base model's weights as they are"
            )
        return
    if name == "task_type":
        if value not in (None, "CAUSAL_LM"):
            raise AdapterFormatError(f"{where}: task_type is {value!r}; it must be 'CAUSAL_LM' or null")
        return
    if value is None or value is False or value in ([], {}) or value == _PLAIN.get(name):
        return
    reason = _REFUSED.get(name, "this setting is not supported")
    raise AdapterFormatError(f"{where}: {name} is {value!r}; {reason}")
