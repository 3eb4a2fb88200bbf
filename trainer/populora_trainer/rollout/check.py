"""Whether sampling token by token gives what a forward in one go gives, found out before the first step."""

import torch
from torch import Tensor

from populora_trainer.errors import PopuloraError, UnfitBaseError, reason_of
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.rollout.forward import all_logits, last_logits
from populora_trainer.rollout.key_values import growing_cache, take_rows
from populora_trainer.rollout.output_head import difference, rounding

_LENGTHS = (2, 7)  # of two prompts: one is padded
_DECODED = 2
# Batches of another shape round otherwise, and a mixture may then ask another expert.
_ROUNDINGS = 5


def check_sampling(population: LoraPopulation, pad_id: int) -> None:
    """Refuse a base that samples from another distribution than it is trained on.

    Two prompts of unlike length go through the cache as one batch, padded; their rows are swapped and repeated, and
    two more tokens follow. The log-probabilities are compared with those of each sequence alone, without cache and
    padding.

    Raises:
        UnfitBaseError: they differ by more than rounding, or the architecture can't be called so.
        AdapterTargetError: a target gets inputs that do not tell the rows of a batch apart.
    """
    name = type(population.model).__name__
    try:
        with torch.inference_mode():
            found = _sampled(population, pad_id)
            hidden_state = _state_outside_of_a_cache(population)
            expected = _in_one_go(population)
    except (PopuloraError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever an architecture raises that is called in a way that it does not know
        raise UnfitBaseError(
            f"baseModel.uri: {name} can't be sampled from with a cache in this process ({reason_of(error)}); "
            f"inference.engine VLLM samples elsewhere"
        ) from error
    if hidden_state is not None:
        raise UnfitBaseError(
            f"baseModel.uri: {name} keeps a state of its rows in {hidden_state} and not in its cache, so that "
            f"rows can't leave a batch when they are done; inference.engine VLLM samples elsewhere"
        )
    off = difference(found, expected)
    if not off <= _ROUNDINGS * rounding(population.model.dtype):
        raise UnfitBaseError(
            f"baseModel.uri: {name} gives other log-probabilities token by token with its cache than in one go, off by "
            f"{off:.1e} of their norm; inference.engine VLLM samples elsewhere"
        )


def _sampled(population: LoraPopulation, pad_id: int) -> Tensor:
    """Return log-probabilities (token, row, vocabulary) from a padded batch with a cache."""
    device, longest = population.device, max(_LENGTHS)
    ids = torch.full((len(_LENGTHS), longest), pad_id)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(_LENGTHS):
        ids[row, longest - length :] = _ids(population, row)[:length]
        mask[row, longest - length :] = 1
    cache = growing_cache(population.model.config)
    with population.route([0] * len(_LENGTHS)):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = [last_logits(population.model, ids.to(device), mask.to(device), positions.to(device), cache)]
    rows = torch.tensor(_rows())
    take_rows(cache, rows.to(device))
    logits[0] = logits[0][rows.to(device)]
    mask = torch.cat([mask[rows], torch.ones(len(rows), _DECODED, dtype=torch.long)], dim=1).to(device)
    with population.route([0] * len(rows)):
        for step in range(_DECODED):
            drawn = torch.stack([_ids(population, row)[_LENGTHS[row] + step] for row in _rows()])
            positions = torch.tensor([[_LENGTHS[row] + step] for row in _rows()])
            seen = mask[:, : longest + step + 1]
            logits.append(last_logits(population.model, drawn[:, None].to(device), seen, positions.to(device), cache))
    return torch.stack(logits).log_softmax(-1)


def _in_one_go(population: LoraPopulation) -> Tensor:
    """Return the same log-probabilities, each sequence alone."""
    rows = []
    for row, length in enumerate(_LENGTHS):
        ids = _ids(population, row)[None, : length + _DECODED].to(population.device)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        with population.route([0]):
            logits = all_logits(population.model, ids, torch.ones_like(ids), positions)
        rows.append(logits[0, length - 1 :].float())
    logits = torch.stack([rows[row] for row in _rows()], dim=1)
    return logits.log_softmax(-1)


def _state_outside_of_a_cache(population: LoraPopulation) -> str | None:
    """Return the name of a tensor that the forward with a cache has left in a module, one entry a row."""
    for path, module in population.model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.ndim > 1 and len(value) == len(_rows()):
                return f"{path}.{name}"
    return None


def _rows() -> list[int]:
    return [1, 0, 1]


def _ids(population: LoraPopulation, row: int) -> Tensor:
    vocabulary = population.model.config.get_text_config().vocab_size
    ids: Tensor = (torch.arange(max(_LENGTHS) + _DECODED) * (5 + 6 * row) + 3 + row) % vocabulary
    return ids
