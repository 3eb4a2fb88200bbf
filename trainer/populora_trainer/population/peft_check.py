"""Whether PEFT loads an exported adapter as it was trained, found out before training and without the base's weights.

PEFT knows modules by name, and not only the linear ones; and it renames the targets of architectures whose weights
transformers keeps otherwise than their checkpoints do. `gate_proj` of DeepSeek-V3 then means the fused experts, not the
dense layer that was trained.
"""

import copy
import warnings

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from populora_trainer.errors import AdapterTargetError, reason_of
from populora_trainer.population.lora import LoraLinear, LoraPopulation
from populora_trainer.population.peft_format import AdapterConfig, matches

_HALVES = ("lora_A", "lora_B")


def check_peft_loads(population: LoraPopulation, config: AdapterConfig) -> None:
    """Refuse targets under which PEFT loads an adapter into other modules, with another scale, or not at all.

    Where names and types alone say that it does, PEFT is not asked: importing it takes seconds.

    Args:
        population: whose members will be exported.
        config: with which they will be.

    Raises:
        AdapterTargetError: naming the targets and what PEFT does with them.
    """
    if _plain(population.model, config.target_modules):
        return
    paths = [path for path, _, _ in population.named_stacks()]
    if (reason := _difference(population, config, paths)) is None:
        return
    culprits = []
    for target in config.target_modules:
        alone = AdapterConfig(config.rank, config.alpha, (target,), config.base_model)
        if _difference(population, alone, [path for path in paths if matches(path, target)]) is not None:
            culprits.append(target)
    raise AdapterTargetError(
        f"adapter.targetModules: PEFT does not load an adapter of {', '.join(culprits or config.target_modules)} on "
        f"{type(population.model).__name__} as it is trained here ({reason}); leave them out"
    )


def _plain(model: PreTrainedModel, targets: tuple[str, ...]) -> bool:
    """Say whether PEFT takes the targets for the same modules and leaves their names alone."""
    # PEFT has rules of its own for what transformers loads under other names, and for state-space layers.
    if get_checkpoint_conversion_mapping(model.config.model_type) is not None or getattr(model, "_is_stateful", False):
        return False
    adapted = {path for path, module in model.named_modules() if isinstance(module, LoraLinear)}
    named = {path for path, _ in model.named_modules() if any(matches(path, target) for target in targets)}
    return named == adapted


def _difference(population: LoraPopulation, config: AdapterConfig, paths: list[str]) -> str | None:
    """Return in words what differs where PEFT loads an adapter of modules `paths`, on a model without weights."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    model = population.model
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bare = type(model)(copy.deepcopy(model.config))
        settings = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=list(config.target_modules),
            task_type="CAUSAL_LM",
        )
        try:
            peft = get_peft_model(bare, settings)
            for half in _halves(peft.base_model.model).values():  # the base needs no memory, the adapter does
                half.weight = nn.Parameter(torch.zeros_like(half.weight, device="cpu"))
            given = _marked(population, paths)
            weights = {f"base_model.model.{name}.weight": value for name, value in given.items()}
            set_peft_model_state_dict(peft, weights)
        except Exception as error:  # PEFT raises ValueError, KeyError, RuntimeError and what transformers raises
            return reason_of(error)
    found = _halves(peft.base_model.model)
    for name in sorted(given.keys() | found.keys()):
        if name not in found:
            return f"it has no place for {name}"
        if name not in given:
            return f"it adapts {name.rpartition('.')[0]} too"
        if found[name].weight.shape != given[name].shape or not torch.equal(found[name].weight, given[name]):
            return f"{name} gets other weights"
    scales = {layer.scaling["default"] for layer in peft.modules() if "default" in getattr(layer, "lora_A", ())}
    return None if scales == {config.scaling} else f"it scales by {sorted(scales)} instead of {config.scaling}"


def _marked(population: LoraPopulation, paths: list[str]) -> dict[str, Tensor]:
    """Return tensors in the shapes of an adapter's, each of one number of its own and without memory."""
    tensors: dict[str, Tensor] = {}
    for path, A, B in population.named_stacks():
        if path in paths:
            for half, stack in zip(_HALVES, (A, B), strict=True):
                mark = torch.tensor(float(len(tensors) + 1), device="cpu")
                tensors[f"{path}.{half}"] = mark.expand(stack.shape[1:])
    return tensors


def _halves(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers that hold PEFT's factors, by module and half."""
    halves: dict[str, nn.Linear] = {}
    for path, module in model.named_modules():
        for half in _HALVES:
            layers = getattr(module, half, None)
            if isinstance(layers, nn.ModuleDict) and isinstance(layer := layers["default"], nn.Linear):
                halves[f"{path}.{half}"] = layer
    return halves
