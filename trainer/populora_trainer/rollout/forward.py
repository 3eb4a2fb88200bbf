"""How a transformers causal language model is called here, whatever its version and architecture name things."""

import inspect
from collections.abc import Set

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from populora_trainer.errors import UnfitBaseError
from populora_trainer.population.lora import body_of


def _accepted(module: nn.Module) -> Set[str]:
    return inspect.signature(module.forward).parameters.keys()


def last_logits(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Cache
) -> Tensor:
    """Return the fp32 logits (row, vocabulary) after each row's last token, and let `cache` grow by the input.

    Args:
        input_ids: (row, token), padded on the left.
        attention_mask: (row, cached + token), 0 on padding.
        position_ids: (row, token).

    Raises:
        UnfitBaseError: the architecture takes no cache.
    """
    accepted = _accepted(model)
    if not {"cache", "past_key_values"} & accepted:
        raise UnfitBaseError(
            f"baseModel.uri: {type(model).__name__} takes no cache of keys and values or states, which sampling "
            f"in this process needs; inference.engine VLLM samples elsewhere"
        )
    if getattr(model, "_is_stateful", False) and "position_ids" not in accepted:
        attention_mask = attention_mask[:, -input_ids.shape[1] :]  # Mamba takes the mask of its input, not of the past
    options: dict[str, object] = {"cache" if "cache" in accepted else "past_key_values": cache, "use_cache": True}
    if "position_ids" in accepted:
        options["position_ids"] = position_ids
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = 1
    logits: Tensor = model(input_ids=input_ids, attention_mask=attention_mask, **options).logits
    return logits[:, -1].to(torch.float32)


def hidden_states(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """Return the hidden states (row, token, hidden) that the output head maps to logits.

    Args:
        input_ids: (row, token), padded on the right.
        attention_mask: (row, token), 0 on padding; or (row, 1, token, token), what is added to the attention scores.
        position_ids: (row, token).

    Raises:
        UnfitBaseError: the architecture has no body that gives them.
    """
    body = body_of(model)
    options = {"position_ids": position_ids} if "position_ids" in _accepted(body) else {}
    output = body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **options)
    hidden = getattr(output, "last_hidden_state", None)
    if not isinstance(hidden, Tensor):
        raise UnfitBaseError(
            f"baseModel.uri: {type(body).__name__} gives no last hidden states, which the update needs"
        )
    return hidden


def all_logits(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """Return the logits (row, token, vocabulary) as the model computes them, in its dtype; arguments as above."""
    options = {"position_ids": position_ids} if "position_ids" in _accepted(model) else {}
    logits: Tensor = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **options).logits
    return logits
