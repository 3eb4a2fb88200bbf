"""One mixed update is every member's own update, however its tokens are packed."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import populora_trainer.learning.update as update_module
from populora_trainer.errors import BaseModelError, UnfitBaseError
from populora_trainer.learning.advantages import reinforce_plus_plus_baseline
from populora_trainer.learning.update import Group, Learner, LearnerSettings, can_share_prompts, token_logprobs
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.rollout.base_model import weights_digest
from populora_trainer.rollout.engine import Completion, RolloutRequest, all_completions
from populora_trainer.rollout.output_head import OutputHead
from populora_trainer.rollout.transformers_engine import TransformersEngine

SETTINGS = LearnerSettings(learning_rate=1e-2)


def group_of(member: int, seed: int, n: int = 5) -> Group:
    """Return a group of random tokens and rewards; the prompt, the lengths and the rewards follow from the seed."""
    chance = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(2, 48) for _ in range(count))

    prompt = tokens(chance.randrange(1, 14))
    answers = [tokens(chance.randrange(1, 9)) for _ in range(n)]
    completions = tuple(Completion(a, tuple(chance.uniform(-5, -3) for _ in a), "stop") for a in answers)
    return Group(
        member,
        "student",
        "code_o",
        prompt,
        completions,
        (1.0, 0.0, *(float(chance.random() < 0.5) for _ in answers[2:])),
    )


GROUPS = [group_of(member, seed) for seed, member in enumerate([0, 2, 1, 0, 2, 2, 1])]


def accumulated(
    population: LoraPopulation, settings: LearnerSettings, groups: list[Group], shares: bool = True
) -> list[Tensor]:
    """Return the gradients that the optimizer is given."""
    learner = Learner(population, settings, pad_id=0)
    learner.shares_prompts = shares
    taken: list[Tensor] = []
    learner.optimizer.step = lambda members: taken.extend(p.grad.clone() for p in population.parameters())  # type: ignore[method-assign]
    learner.update(groups)
    return taken


def test_gradients_equal_a_plain_policy_gradient(make_population: Callable[..., LoraPopulation]) -> None:
    settings = replace(SETTINGS, gradient_clip_norm=1e9, temperature=0.7)
    found = accumulated(make_population(), settings, GROUPS)
    population = make_population()
    values = reinforce_plus_plus_baseline(
        [g.rewards_G for g in GROUPS],
        [[len(c.token_ids) for c in g.completions] for g in GROUPS],
        [g.member for g in GROUPS],
    ).values_PG
    for member in range(3):
        losses = []
        for group, values_G in zip(GROUPS, values, strict=True):
            if group.member != member:
                continue
            for completion, advantage in zip(group.completions, values_G, strict=True):
                ids = torch.tensor([group.prompt_ids + completion.token_ids])
                with population.route([member]):
                    logits = population.model(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1]
                logprobs = (logits / 0.7).log_softmax(-1).gather(1, ids[0, len(group.prompt_ids) :, None])[:, 0]
                weights = (logprobs.detach() - torch.tensor(completion.logprobs)).exp().clamp(max=2.0)
                losses.append(-weights * float(advantage) * logprobs)
        torch.cat(losses).mean().backward()
    for gradient, parameter in zip(found, population.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("batch_tokens", [20, 64, 8192])
@pytest.mark.parametrize("shares", [True, False])
def test_gradients_do_not_depend_on_packing(
    make_population: Callable[..., LoraPopulation], batch_tokens: int, shares: bool
) -> None:
    reference = accumulated(make_population(), SETTINGS, GROUPS)
    packed = accumulated(make_population(), replace(SETTINGS, batch_tokens=batch_tokens), GROUPS, shares)
    for expected, found in zip(reference, packed, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_recomputed_activations_give_the_same_gradients(make_population: Callable[..., LoraPopulation]) -> None:
    reference = accumulated(make_population(), SETTINGS, GROUPS)
    recomputed = accumulated(make_population(), replace(SETTINGS, checkpoint_activations=True), GROUPS)
    for expected, found in zip(reference, recomputed, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_member_takes_the_same_step_alone_and_among_others(make_population: Callable[..., LoraPopulation]) -> None:
    together = make_population()
    Learner(together, SETTINGS, pad_id=0).update(GROUPS)
    for member in range(3):
        alone = make_population()
        metrics = Learner(alone, SETTINGS, pad_id=0).update([g for g in GROUPS if g.member == member])
        assert metrics.updated == (member,)
        for mixed, single, start in zip(
            together.parameters(), alone.parameters(), make_population().parameters(), strict=True
        ):
            # Adam's first step is near the learning rate whatever the gradient: rounding shows where that is near 0.
            torch.testing.assert_close(mixed[member], single[member], rtol=1e-3, atol=1e-3)
            assert (mixed[member] - single[member]).abs().mean() < 1e-5
            others = [m for m in range(3) if m != member]
            assert torch.equal(single[others], start[others])
            assert not torch.equal(single[member], start[member])


def test_the_entropy_of_a_role_is_that_of_its_own_tokens(make_population: Callable[..., LoraPopulation]) -> None:
    # One member with both roles, as the single agent has them.
    groups = [replace(group_of(0, seed), role="teacher" if seed % 3 else "student") for seed in range(6)]
    found = Learner(make_population(), replace(SETTINGS, whitening="Role"), pad_id=0).update(groups).entropy
    for role in ("teacher", "student"):
        of_role = [group for group in groups if group.role == role]
        alone = Learner(make_population(), replace(SETTINGS, whitening="Role"), pad_id=0).update(of_role)
        assert alone.entropy == {role: pytest.approx(found[role], rel=1e-5)}
        assert alone.learner()[f"entropy_{role}"] == pytest.approx(found[role], rel=1e-5)
    assert found["teacher"] != pytest.approx(found["student"], rel=1e-3)


def test_groups_that_teach_nothing_change_nothing(make_population: Callable[..., LoraPopulation]) -> None:
    dead = [replace(group_of(member, 90 + member), rewards_G=(0.5,) * 5) for member in range(3)]
    unscored = replace(group_of(0, 99), rewards_G=(None,) * 5)
    expected = accumulated(make_population(), SETTINGS, GROUPS)
    found = accumulated(make_population(), SETTINGS, [*dead, *GROUPS, unscored])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    population = make_population()
    metrics = Learner(population, SETTINGS, pad_id=0).update([*dead, unscored])
    assert (metrics.updated, metrics.learned_tokens, metrics.micro_batches, metrics.entropy) == ((), 0, 0, {})
    assert metrics.advantages.masked == 3
    assert all(torch.equal(*pair) for pair in zip(population.parameters(), make_population().parameters(), strict=True))


def test_a_member_with_a_gradient_that_is_not_finite_is_skipped_and_counted(
    make_population: Callable[..., LoraPopulation],
) -> None:
    healthy = make_population()
    Learner(healthy, SETTINGS, pad_id=0).update(GROUPS)
    population = make_population()
    with torch.no_grad():
        for parameter in population.parameters():
            parameter[1] = float("nan")
    learner = Learner(population, SETTINGS, pad_id=0)
    metrics = learner.update(GROUPS)
    assert metrics.skipped == (1,)
    assert metrics.updated == (0, 2)
    assert learner.optimizer.steps == [1, 0, 1]
    for beside, expected in zip(population.parameters(), healthy.parameters(), strict=True):
        assert torch.equal(beside[[0, 2]], expected[[0, 2]])


def test_equal_inputs_give_equal_bits(make_population: Callable[..., LoraPopulation]) -> None:
    runs = []
    for _ in range(2):
        population = make_population()
        learner = Learner(population, SETTINGS, pad_id=0)
        metrics = [learner.update(GROUPS).learner() for _ in range(2)]
        runs.append(([*population.parameters(), *learner.state().values()], metrics))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert runs[0][1] == runs[1][1]


def test_a_learner_goes_on_from_its_state(make_population: Callable[..., LoraPopulation]) -> None:
    straight = make_population()
    learner = Learner(straight, SETTINGS, pad_id=0)
    learner.update(GROUPS)
    resumed = make_population()
    for member in range(3):
        resumed.set_factors(member, straight.factors(member))
    second = Learner(resumed, SETTINGS, pad_id=0)
    second.load_state(learner.state())
    learner.update(GROUPS[::-1])
    second.update(GROUPS[::-1])
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_the_base_never_changes(make_population: Callable[..., LoraPopulation]) -> None:
    population = make_population()
    frozen = {n: t for n, t in population.model.state_dict().items() if "lora_" not in n}
    before = {name: tensor.clone() for name, tensor in frozen.items()}
    digest = weights_digest(population.model)
    learner = Learner(population, SETTINGS, pad_id=0)
    for _ in range(20):
        learner.update(GROUPS)
    assert all(torch.equal(frozen[name], before[name]) for name in before)
    assert weights_digest(population.model) != digest  # the adapters did


def test_a_step_is_no_longer_than_the_clipped_gradient_allows(make_population: Callable[..., LoraPopulation]) -> None:
    settings = replace(SETTINGS, gradient_clip_norm=0.01)
    clipped = accumulated(make_population(), settings, GROUPS)
    for member in range(3):
        norm = torch.linalg.vector_norm(torch.cat([gradient[member].flatten() for gradient in clipped]))
        assert norm == pytest.approx(0.01, rel=1e-3)
    metrics = Learner(make_population(), settings, pad_id=0).update(GROUPS)
    assert min(metrics.gradient_norm_M.values()) > 0.01  # reported as it was


def test_the_kl_term_pulls_back_to_the_base(make_population: Callable[..., LoraPopulation]) -> None:
    kl = {}
    for coefficient in (1e-6, 1.0):
        learner = Learner(make_population(), replace(SETTINGS, kl_coefficient=coefficient), pad_id=0)
        history = [learner.update(GROUPS).kl_to_base for _ in range(12)]
        kl[coefficient] = history[-1]
        assert history[0] > 0
    assert kl[1.0] < 0.7 * kl[1e-6]
    assert Learner(make_population(), SETTINGS, pad_id=0).update(GROUPS).kl_to_base is None


def test_log_probabilities_in_chunks_equal_those_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    head, generator = torch.nn.Linear(8, 50), torch.Generator().manual_seed(0)
    targets = torch.randint(0, 50, (23,), generator=generator)
    results = []
    for logits_at_once in (10**6, 250):
        monkeypatch.setattr(update_module, "CHUNK_LOGITS", logits_at_once)
        hidden = torch.randn(23, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        logprobs, entropies = token_logprobs(OutputHead(head), hidden, targets, 0.5)
        (logprobs * torch.arange(23)).sum().backward()
        results.append((logprobs, entropies, hidden.grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole)
    probabilities = (head(hidden) / 0.5).softmax(-1)
    torch.testing.assert_close(results[0][1], torch.distributions.Categorical(probabilities).entropy())


@pytest.mark.parametrize(
    ("architecture", "shares"), [("qwen2", True), ("llama", True), ("mistral with a window", False)]
)
def test_prompts_are_shared_where_the_architecture_allows_it(
    make_population: Callable[..., LoraPopulation], architecture: str, shares: bool
) -> None:
    population = make_population(architecture=architecture)
    assert can_share_prompts(population, 0) == shares
    reference = accumulated(population, SETTINGS, GROUPS, shares)
    unshared = accumulated(make_population(architecture=architecture), SETTINGS, GROUPS, shares=False)
    for expected, found in zip(reference, unshared, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_scaled_logits_are_scaled_in_the_update(make_population: Callable[..., LoraPopulation]) -> None:
    learner = Learner(make_population(architecture="granite with scaled logits"), SETTINGS, pad_id=0)
    assert (learner.head.factor, learner.head.divisor, learner.head.cap) == (None, 4.0, None)


def test_logits_that_are_no_function_of_the_hidden_states_alone_are_refused(
    make_population: Callable[..., LoraPopulation],
) -> None:
    population = make_population()
    population.model.lm_head.register_forward_hook(lambda layer, args, logits: logits.cumsum(-1))
    population.model.get_output_embeddings = lambda: torch.nn.Linear(32, 48)
    with pytest.raises(UnfitBaseError, match=r"logits of Qwen2ForCausalLM are not its output head .*logit_scale"):
        Learner(population, SETTINGS, pad_id=0)


def test_a_base_that_is_not_finite_is_called_so(make_population: Callable[..., LoraPopulation]) -> None:
    population = make_population()
    with torch.no_grad():
        population.model.model.norm.weight[3] = float("nan")
    with pytest.raises(BaseModelError, match="logits of Qwen2ForCausalLM are not finite: its weights hold NaN"):
        Learner(population, SETTINGS, pad_id=0)


def test_an_architecture_that_cannot_be_called_is_one_sentence(make_population: Callable[..., LoraPopulation]) -> None:
    population = make_population()
    population.model.model.rotary_emb = None
    with pytest.raises(
        UnfitBaseError, match=r"Qwen2ForCausalLM can't be called as the update does \(TypeError: "
    ) as caught:
        Learner(population, SETTINGS, pad_id=0)
    assert "\n" not in str(caught.value)


def test_whitening_over_role_or_task_is_the_settings_choice(make_population: Callable[..., LoraPopulation]) -> None:
    groups = [GROUPS[0], replace(GROUPS[3], role="teacher"), replace(group_of(0, 50), task="code_i")]
    for whitening, scopes in (("Member", 1), ("Role", 2), ("TaskAndRole", 3)):
        learner = Learner(make_population(), replace(SETTINGS, whitening=whitening), pad_id=0)
        assert len(learner.update(groups).advantages.std) == scopes


def test_metrics_count_what_was_computed(make_population: Callable[..., LoraPopulation]) -> None:
    metrics = Learner(make_population(), SETTINGS, pad_id=0).update(GROUPS)
    answers = [len(c.token_ids) for g in GROUPS for c in g.completions]
    assert metrics.learned_tokens == sum(answers)
    assert metrics.computed_tokens == sum(len(g.prompt_ids) for g in GROUPS) + sum(answers) - len(answers)
    assert metrics.unshared_tokens == sum(5 * len(g.prompt_ids) for g in GROUPS) + sum(answers)
    assert metrics.mismatch_max >= metrics.mismatch_mean > 0
    assert metrics.mismatch_kl > 0
    assert 0 < metrics.truncated < 1
    assert set(metrics.loss_M) == set(metrics.gradient_norm_M) == {0, 1, 2}
    assert all(
        value is None or isinstance(value, float) for value in (metrics.learner() | metrics.advantage()).values()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bandit_is_learned_by_every_member_through_engine_and_learner(
    make_population: Callable[..., LoraPopulation], dtype: torch.dtype
) -> None:
    """Member m is paid for answering token 10 + m; chance is about 1 in 48."""
    population = make_population(members=2, dtype=dtype, targets="all-linear", differ=False)
    engine = TransformersEngine(population, end_ids=[1], pad_id=0, max_prompt_tokens=8)
    learner = Learner(population, replace(SETTINGS, learning_rate=2e-2), pad_id=0)
    rates: list[list[float]] = []
    for step in range(30):
        requests = [
            RolloutRequest(m, (5 + p, 30), 24, 100 * step + 10 * m + p, 1, 1.0) for m in range(2) for p in range(2)
        ]
        groups, solved = [], [[], []]
        for asked, completions in zip(requests, asyncio.run(all_completions(engine, requests)), strict=True):
            rewards = tuple(float(c.token_ids[0] == 10 + asked.member) for c in completions)
            groups.append(Group(asked.member, "student", "code_o", asked.prompt_ids, tuple(completions), rewards))
            solved[asked.member].extend(rewards)
        rates.append([sum(r) / len(r) for r in solved])
        metrics = learner.update(groups)
        if metrics.mismatch_mean is not None:
            assert metrics.mismatch_mean < (1e-4 if dtype == torch.float32 else 0.1)
    assert max(rates[0]) < 0.3
    assert min(rates[-1]) > 0.9


def test_the_model_returns_to_its_mode(
    make_population: Callable[..., LoraPopulation], make_model: Callable[..., PreTrainedModel]
) -> None:
    population = make_population()
    Learner(population, replace(SETTINGS, checkpoint_activations=True), pad_id=0).update(GROUPS)
    assert not population.model.training
