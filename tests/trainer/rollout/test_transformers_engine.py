"""Sampling in a mixed batch is sampling each prompt alone from its member's model."""

import asyncio
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from populora_trainer.errors import RolloutError, UnfitBaseError
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.rollout import check
from populora_trainer.rollout.engine import Completion, RolloutRequest, all_completions
from populora_trainer.rollout.key_values import take_rows
from populora_trainer.rollout.transformers_engine import TransformersEngine, sample

END, PAD = 1, 0


def engine_of(population: LoraPopulation, batch_tokens: int = 4096) -> TransformersEngine:
    return TransformersEngine(population, end_ids=[END], pad_id=PAD, max_prompt_tokens=40, batch_tokens=batch_tokens)


def generate(engine: TransformersEngine, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
    return asyncio.run(all_completions(engine, requests))


def request(
    index: int, *, member: int = 0, n: int = 1, max_tokens: int = 12, temperature: float = 1.0
) -> RolloutRequest:
    prompt = torch.randint(2, 48, (3 + 5 * index % 17,), generator=torch.Generator().manual_seed(index)).tolist()
    return RolloutRequest(member, tuple(prompt), n, 1000 + index, max_tokens, temperature)


def peft_of(model: PreTrainedModel, population: LoraPopulation, member: int) -> torch.nn.Module:
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    modules = dict(peft.base_model.model.named_modules())
    with torch.no_grad():
        for path, pair in population.factors(member).items():
            modules[path].lora_A["default"].weight.copy_(pair.A)
            modules[path].lora_B["default"].weight.copy_(pair.B)
    return peft.eval()


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "mistral with a window", "granite with scaled logits"])
def test_greedy_equals_peft_and_generate_prompt_by_prompt(
    make_population: Callable[..., LoraPopulation], make_model: Callable[..., PreTrainedModel], architecture: str
) -> None:
    population = make_population(members=3, architecture=architecture)
    requests = [request(index, member=index % 3, temperature=0.0) for index in range(9)]
    found = generate(engine_of(population), requests)
    models = [peft_of(make_model(architecture), population, member) for member in range(3)]
    for asked, (completion,) in zip(requests, found, strict=True):
        ids = torch.tensor([asked.prompt_ids])
        whole = models[asked.member].generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=PAD,
        )
        assert list(completion.token_ids) == whole[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("architecture", ["qwen2", "mistral with a window"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_plain_forward_with_the_temperature_applied(
    make_population: Callable[..., LoraPopulation],
    make_model: Callable[..., PreTrainedModel],
    architecture: str,
    temperature: float,
) -> None:
    population = make_population(members=2, architecture=architecture)
    requests = [request(index, member=index % 2, n=3, temperature=temperature) for index in range(6)]
    models = [peft_of(make_model(architecture), population, member) for member in range(2)]
    for asked, completions in zip(requests, generate(engine_of(population), requests), strict=True):
        for completion in completions:
            ids = torch.tensor([asked.prompt_ids + completion.token_ids])
            with torch.no_grad():
                logits = models[asked.member](input_ids=ids).logits[0, len(asked.prompt_ids) - 1 : -1]
            expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected[:, 0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch_tokens", [1, 70, 300])
def test_what_is_drawn_does_not_depend_on_the_batch(
    make_population: Callable[..., LoraPopulation], batch_tokens: int
) -> None:
    population = make_population(members=3)
    requests = [request(index, member=index % 3, n=1 + index % 5, max_tokens=4 + index) for index in range(8)]
    together = generate(engine_of(population), requests)
    apart = [generate(engine_of(population, batch_tokens), [asked])[0] for asked in requests]
    assert [[c.token_ids for c in group] for group in together] == [[c.token_ids for c in group] for group in apart]
    assert len({c.token_ids for group in together for c in group}) > 8


def test_samples_of_one_prompt_differ_and_equal_requests_repeat(make_population: Callable[..., LoraPopulation]) -> None:
    engine = engine_of(make_population())
    (first,) = generate(engine, [request(0, n=6)])
    (again,) = generate(engine, [request(0, n=6)])
    assert first == again
    assert len({completion.token_ids for completion in first}) > 1


def test_a_completion_stops_with_its_end_token_or_at_its_own_limit(
    make_population: Callable[..., LoraPopulation],
) -> None:
    population = make_population(members=2)
    requests = [request(index, member=index % 2, n=8, max_tokens=1 + 6 * index) for index in range(6)]
    reasons = set()
    for asked, completions in zip(requests, generate(engine_of(population), requests), strict=True):
        for completion in completions:
            reasons.add(completion.finish_reason)
            assert len(completion.token_ids) == len(completion.logprobs) <= asked.max_tokens
            assert END not in completion.token_ids[:-1]
            assert (completion.token_ids[-1] == END) == (completion.finish_reason == "stop")
            if completion.finish_reason == "length":
                assert len(completion.token_ids) == asked.max_tokens
    assert reasons == {"stop", "length"}


def test_tokens_come_as_often_as_they_should(make_population: Callable[..., LoraPopulation]) -> None:
    population, n = make_population(), 3000
    asked = RolloutRequest(1, (5, 9, 11), n, 3, 1, 0.8)
    (completions,) = generate(engine_of(population, 20_000), [asked])
    with torch.no_grad(), population.route([1]):
        logits = population.model(input_ids=torch.tensor([asked.prompt_ids])).logits[0, -1]
    expected = (logits / 0.8).softmax(-1) * n
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=48)
    common = expected > 5
    chi_squared = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    degrees = int(common.sum())
    assert chi_squared < degrees + 5 * math.sqrt(2 * degrees)


def test_a_draw_falls_on_tokens_of_positive_probability_only() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(4, -1)
    uniforms = torch.tensor([0.0, 0.499, 0.5, 1 - 2**-53], dtype=torch.float64)
    drawn, logprobs = sample(logits, torch.ones(4), uniforms)
    assert drawn.tolist() == [1, 1, 3, 3]
    torch.testing.assert_close(logprobs, torch.full((4,), math.log(0.5)))


def test_rows_of_different_temperatures_share_a_batch() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(3, -1)
    drawn, logprobs = sample(logits, torch.tensor([0.0, 1.0, 0.5]), torch.zeros(3, dtype=torch.float64))
    assert drawn.tolist() == [2, 0, 0]
    expected = torch.stack(
        [logits[0].log_softmax(0)[2], logits[0].log_softmax(0)[0], (2 * logits[0]).log_softmax(0)[0]]
    )
    torch.testing.assert_close(logprobs, expected)


def test_what_does_not_fit_is_refused(make_population: Callable[..., LoraPopulation]) -> None:
    engine = engine_of(make_population())
    long = RolloutRequest(0, tuple(range(2, 43)), 1, 0, 4, 1.0)
    with pytest.raises(RolloutError, match="request 1 has 41 tokens; at most 40 are allowed"):
        generate(engine, [request(0), long])
    with pytest.raises(RolloutError, match=r"needs 3 \+ 300 positions; the base model has 256"):
        generate(engine, [request(0, max_tokens=300)])
    assert generate(engine, []) == []


@pytest.mark.parametrize(
    "wrong",
    [{"prompt_ids": ()}, {"n": 0}, {"max_tokens": 0}, {"temperature": -1.0}, {"temperature": math.nan}],
    ids=str,
)
def test_a_senseless_request_cannot_be_made(wrong: dict[str, object]) -> None:
    arguments = {"member": 0, "prompt_ids": (2,), "n": 1, "seed": 0, "max_tokens": 1, "temperature": 1.0} | wrong
    with pytest.raises(ValueError, match="a request needs"):
        RolloutRequest(**arguments)  # type: ignore[arg-type]


def test_sampling_leaves_the_models_mode_alone(make_population: Callable[..., LoraPopulation]) -> None:
    population = make_population()
    population.model.train()
    generate(engine_of(population), [request(0)])
    assert population.model.training


def test_a_base_whose_cache_does_not_follow_its_rows_is_refused(
    make_population: Callable[..., LoraPopulation], monkeypatch: pytest.MonkeyPatch
) -> None:
    population = make_population(members=2)
    engine_of(population)
    monkeypatch.setattr(check, "take_rows", lambda cache, rows: take_rows(cache, 1 - rows))
    with pytest.raises(UnfitBaseError, match=r"gives other log-probabilities token by token .*engine VLLM") as caught:
        engine_of(population)
    assert caught.value.exit_code == 42
    assert "\n" not in str(caught.value)
