"""Which attention of transformers a base computes with."""

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from populora_trainer.errors import UnfitBaseError


def attention_for(config: PretrainedConfig) -> str:
    """Return sdpa where the architecture has it, else eager, which needs memory for length squared.

    Both follow a given mask. Architectures without sdpa add to their attention scores what it can't: a cap (Gemma 2),
    sinks (GPT-OSS) or a bias of positions (BLOOM, MPT); or they have no attention (Mamba).

    Raises:
        UnfitBaseError: the architecture is no causal language model.
    """
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None:
        raise UnfitBaseError(
            f"baseModel.uri: the model's type is {config.model_type}, which is no causal language model of transformers"
        )
    classes = model if isinstance(model, tuple) else (model,)
    return "sdpa" if all(one._supports_sdpa for one in classes) else "eager"
