"""What an architecture's tiny model is worth here: the whole path beside PEFT, one sequence at a time."""

import asyncio
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from zoo import END, PAD, VOCABULARY, Architecture

from populora_trainer.errors import PopuloraError
from populora_trainer.learning.advantages import reinforce_plus_plus_baseline
from populora_trainer.learning.update import Group, Learner, LearnerSettings
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.population.peft_check import check_peft_loads
from populora_trainer.population.peft_format import AdapterConfig, write_adapter
from populora_trainer.rollout.base_model import load_base
from populora_trainer.rollout.engine import RolloutRequest, all_completions
from populora_trainer.rollout.transformers_engine import TransformersEngine

MEMBERS, RANK, ALPHA = 2, 4, 8.0
PROMPT_LENGTHS = (5, 11, 8, 3)
NEW_TOKENS = 7


@dataclass(frozen=True)
class Finding:
    """How a set of targets fares on an architecture.

    Attributes:
        refusal: the sentence, where it is refused before the first step; nothing else is known then.
        modules: how many are adapted.
        logprobs: largest difference in nats from PEFT's model with the exported adapter, over sampled tokens.
        gradient: norm of the difference from PEFT's gradient, one sequence at a time, over the norm of that.
        attention: of transformers.
        shares: whether completions of a prompt share a row in the update.
    """

    refusal: str | None = None
    modules: int = 0
    logprobs: float = 0.0
    gradient: float = 0.0
    attention: str = ""
    shares: bool = False

    @property
    def exact(self) -> bool:
        """Whether it is taken, and computed as PEFT does but for fp32 rounding."""
        return self.refusal is None and self.modules > 0 and self.logprobs < 5e-5 and self.gradient < 5e-5


def save(architecture: Architecture, folder: Path) -> None:
    """Write the tiny model with a tokenizer of as many words as it has tokens."""
    model = architecture.model()
    with torch.no_grad():
        for parameter in model.parameters():  # some classes begin with zeros, which would hide what they compute
            if parameter.ndim > 1 and parameter.std() < 1e-3:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1").save_pretrained(folder)


def survey(folder: Path, targets: tuple[str, ...], scratch: Path) -> Finding:
    """Sample, export and differentiate with the model of `folder`, and compare each with PEFT."""
    try:
        base = load_base(f"file://{folder}", "float32")
        population = LoraPopulation(base.model, MEMBERS, RANK, ALPHA, targets, seed=0)
        config = AdapterConfig(RANK, ALPHA, targets, base.uri)
        check_peft_loads(population, config)
        learner = Learner(population, LearnerSettings(1e-3), pad_id=PAD)
        engine = TransformersEngine(population, end_ids=[END], pad_id=PAD, max_prompt_tokens=64)
    except PopuloraError as error:
        return Finding(refusal=str(error).replace(base_uri(folder), "M"))
    generator = torch.Generator().manual_seed(5)
    for _, A, B in population.named_stacks():
        nn.init.normal_(A, std=0.2, generator=generator)
        nn.init.normal_(B, std=0.2, generator=generator)
    groups = _sample(engine)
    peers = []
    for member in range(MEMBERS):
        write_adapter(scratch / str(member), population.factors(member), config)
        peers.append(_peer(folder, scratch / str(member)))
    expected = [_gradient(peers[member], member, groups) for member in range(MEMBERS)]
    found = _gradients(learner, groups)
    return Finding(
        modules=len(list(population.named_stacks())),
        logprobs=max(_largest_difference(peers[group.member], group) for group in groups),
        gradient=max(_distance(one, other) for one, other in zip(found, expected, strict=True)),
        attention=base.model.config._attn_implementation,
        shares=learner.shares_prompts,
    )


def base_uri(folder: Path) -> str:
    """Return the address of a saved model."""
    return f"file://{folder}"


def _sample(engine: TransformersEngine) -> list[Group]:
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(2, VOCABULARY, (n,), generator=generator).tolist()) for n in PROMPT_LENGTHS]
    requests = [RolloutRequest(i % MEMBERS, prompt, 2, 100 + i, NEW_TOKENS, 1.0) for i, prompt in enumerate(prompts)]
    completions = asyncio.run(all_completions(engine, requests))
    return [
        Group(request.member, "student", "code_o", request.prompt_ids, tuple(two), (1.0, 0.0))
        for request, two in zip(requests, completions, strict=True)
    ]


def _peer(folder: Path, adapter: Path) -> nn.Module:
    """Load the exported adapter as its users do; a warning about its keys or settings is an error."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=RuntimeWarning)
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        return PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()


def _logprobs(model: nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def _largest_difference(peer: nn.Module, group: Group) -> float:
    with torch.no_grad():
        return max(
            float((_logprobs(peer, group.prompt_ids, one.token_ids) - torch.tensor(one.logprobs)).abs().max())
            for one in group.completions
        )


def _gradients(learner: Learner, groups: Sequence[Group]) -> list[dict[str, Tensor]]:
    """Return each member's gradient by factor, as the update has it before it clips."""
    taken: list[dict[str, Tensor]] = []

    def keep(members: Sequence[int]) -> tuple[dict[int, float], tuple[int, ...]]:
        for member in range(MEMBERS):
            gradient = {}
            for path, A, B in learner.population.named_stacks():
                gradient |= {f"{path}.lora_A": A.grad[member].clone(), f"{path}.lora_B": B.grad[member].clone()}
            taken.append(gradient)
        return dict.fromkeys(members, 1.0), ()

    learner.descend = keep  # type: ignore[method-assign]
    learner.update(groups)
    return taken


def _gradient(peer: nn.Module, member: int, groups: Sequence[Group]) -> dict[str, Tensor]:
    """Return PEFT's gradient of the same loss, every sequence in a forward of its own."""
    advantages = reinforce_plus_plus_baseline(
        [group.rewards_G for group in groups],
        [[len(one.token_ids) for one in group.completions] for group in groups],
        [(group.member,) for group in groups],
    )
    losses = []
    for group, values_G in zip(groups, advantages.values_PG, strict=True):
        if group.member == member:
            for one, advantage in zip(group.completions, values_G, strict=True):
                logprobs_T = _logprobs(peer, group.prompt_ids, one.token_ids)
                weights_T = (logprobs_T.detach() - torch.tensor(one.logprobs)).exp().clamp(max=2.0)
                losses.append(-weights_T * float(advantage) * logprobs_T)
    torch.cat(losses).mean().backward()
    return {
        f"{path}.{half}": layers["default"].weight.grad
        for path, module in peer.base_model.model.named_modules()
        for half in ("lora_A", "lora_B")
        if isinstance(layers := getattr(module, half, None), nn.ModuleDict) and "default" in layers
    }


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    zero = torch.zeros(())
    one = torch.cat([found[name].flatten() for name in sorted(found)])
    other = torch.cat(
        [(found[n] * 0 + (zero if expected[n] is None else expected[n])).flatten() for n in sorted(found)]
    )
    return float(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other))
