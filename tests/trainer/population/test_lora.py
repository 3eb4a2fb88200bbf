"""One forward and one backward serve every member, as if each had the model to itself."""

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, RwkvConfig, RwkvForCausalLM

from populora_trainer.errors import AdapterTargetError, PopuloraError
from populora_trainer.population.factors import Factors, Pair
from populora_trainer.population.lora import LoraPopulation

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


def peft_model(model: PreTrainedModel, factors: Factors, targets: tuple[str, ...] | str) -> torch.nn.Module:
    """Return PEFT's model with the same adapter."""
    peft = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=targets if isinstance(targets, str) else list(targets))
    )
    modules = dict(peft.base_model.model.named_modules())
    with torch.no_grad():
        for path, pair in factors.items():
            modules[path].lora_A["default"].weight.copy_(pair.A)
            modules[path].lora_B["default"].weight.copy_(pair.B)
    return peft


def peft_gradients(peft: torch.nn.Module, paths: list[str]) -> Factors:
    modules = dict(peft.base_model.model.named_modules())
    return {p: Pair(modules[p].lora_A["default"].weight.grad, modules[p].lora_B["default"].weight.grad) for p in paths}


def ids_of(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 48, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor) -> Tensor:
    """Return a scalar whose gradient differs from token to token."""
    return (logits.float().log_softmax(-1)[..., ::3] * torch.linspace(-1, 1, logits.shape[1])[:, None]).sum()


@pytest.mark.parametrize("targets", [QKVO, ("gate_proj", "down_proj"), "all-linear"], ids=str)
def test_logits_and_gradients_of_a_mixed_batch_equal_each_members_own_in_peft(
    make_population: Callable[..., LoraPopulation],
    make_model: Callable[..., PreTrainedModel],
    targets: tuple[str, ...] | str,
) -> None:
    population = make_population(members=3, targets=targets)
    ids, members = ids_of(5, 7), [0, 0, 1, 2, 2]
    with population.route(members):
        logits = population.model(input_ids=ids).logits
    loss_of(logits).backward()
    for member in range(3):
        rows = [row for row, owner in enumerate(members) if owner == member]
        peft = peft_model(make_model(), population.factors(member), targets)
        expected = peft(input_ids=ids[rows]).logits
        torch.testing.assert_close(logits[rows], expected, rtol=1e-4, atol=1e-4)
        loss_of(expected).backward()
        gradients = peft_gradients(peft, [path for path, _, _ in population.named_stacks()])
        for path, A, B in population.named_stacks():
            torch.testing.assert_close(A.grad[member], gradients[path].A, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(B.grad[member], gradients[path].B, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_base_computes_in_its_dtype_and_keeps_fp32_masters(
    make_population: Callable[..., LoraPopulation], dtype: torch.dtype
) -> None:
    exact, half = make_population(), make_population(dtype=dtype)
    ids, members = ids_of(4, 6), [0, 1, 1, 2]
    outputs = []
    for population in (exact, half):
        with population.route(members):
            outputs.append(population.model(input_ids=ids).logits)
        loss_of(outputs[-1]).backward()
    assert outputs[1].dtype == dtype
    for (_, A, B), (_, A_half, B_half) in zip(exact.named_stacks(), half.named_stacks(), strict=True):
        for reference, found in ((A, A_half), (B, B_half)):
            assert found.dtype == found.grad.dtype == torch.float32
            error = torch.linalg.vector_norm(reference.grad - found.grad) / torch.linalg.vector_norm(reference.grad)
            assert error < 0.2
    assert torch.linalg.vector_norm(outputs[0] - outputs[1]) < 0.1 * torch.linalg.vector_norm(outputs[0])


def test_no_gradient_reaches_a_member_without_rows(make_population: Callable[..., LoraPopulation]) -> None:
    population = make_population(members=4)
    with population.route([0, 2, 2]):
        loss_of(population.model(input_ids=ids_of(3, 5)).logits).backward()
    for parameter in population.parameters():
        assert parameter.grad[1].count_nonzero() == parameter.grad[3].count_nonzero() == 0
        assert parameter.grad[0].count_nonzero() > 0
        assert parameter.grad[2].count_nonzero() > 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
def test_a_member_that_is_not_finite_changes_no_bit_of_the_others(
    make_population: Callable[..., LoraPopulation], poison: float
) -> None:
    ids, members, seen = ids_of(6, 5), [0, 0, 1, 1, 2, 2], []
    for poisoned in (False, True):
        population = make_population(members=3)
        if poisoned:
            with torch.no_grad():
                for parameter in population.parameters():
                    parameter[1] = poison
        with population.route(members):
            logits = population.model(input_ids=ids).logits
        loss_of(logits).backward()
        gradients = [parameter.grad[[0, 2]] for parameter in population.parameters()]
        seen.append((logits[[0, 1, 4, 5]], *gradients))
        if poisoned:
            assert not torch.isfinite(logits[2:4]).all()
    for healthy, beside_poison in zip(*seen, strict=True):
        assert torch.isfinite(healthy).all()
        torch.testing.assert_close(beside_poison, healthy, rtol=0, atol=0)


def test_rows_may_come_in_any_order(make_population: Callable[..., LoraPopulation]) -> None:
    population, ids, members = make_population(), ids_of(5, 6), [2, 0, 1, 0, 2]
    with torch.no_grad(), population.route(members):
        mixed = population.model(input_ids=ids).logits
    for row, member in enumerate(members):
        with torch.no_grad(), population.route([member]):
            alone = population.model(input_ids=ids[row : row + 1]).logits
        torch.testing.assert_close(mixed[row : row + 1], alone, rtol=1e-4, atol=1e-5)


def test_a_recomputed_activation_uses_the_route_of_its_own_forward(
    make_population: Callable[..., LoraPopulation],
) -> None:
    gradients = []
    for recompute in (False, True):
        population = make_population(members=3)
        if recompute:
            population.checkpoint_activations()
            population.model.train()
        with population.route([0, 1]):
            first = loss_of(population.model(input_ids=ids_of(2, 6, seed=1)).logits)
        with population.route([2, 0]):
            second = loss_of(population.model(input_ids=ids_of(2, 6, seed=2)).logits)
            (first + second).backward()  # the first forward's layers run again here, inside the second's route
        gradients.append([parameter.grad for parameter in population.parameters()])
    for kept, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, kept, rtol=1e-5, atol=1e-6)


def test_a_new_population_is_the_base_and_shares_one_seeded_a(
    make_population: Callable[..., LoraPopulation], make_model: Callable[..., PreTrainedModel]
) -> None:
    population, ids = make_population(differ=False), ids_of(3, 6)
    with torch.no_grad():
        expected = make_model()(input_ids=ids).logits
        with population.route([0, 1, 2]):
            torch.testing.assert_close(population.model(input_ids=ids).logits, expected, rtol=0, atol=0)
        with population.base_only():
            torch.testing.assert_close(population.model(input_ids=ids).logits, expected, rtol=0, atol=0)
    stacks = list(population.named_stacks())
    for _, A, B in stacks:
        assert torch.equal(A[0], A[1])
        assert B.count_nonzero() == 0
        assert A.abs().max() <= A.shape[-1] ** -0.5
        assert A.std() > 0.4 * A.shape[-1] ** -0.5
    assert not torch.equal(stacks[0][1][0], stacks[1][1][0])
    again = make_population(differ=False)
    assert all(torch.equal(*pair) for pair in zip(population.parameters(), again.parameters(), strict=True))
    other = LoraPopulation(make_model(), 1, 4, 8.0, QKVO, seed=1)
    assert not torch.equal(next(other.named_stacks())[1], next(population.named_stacks())[1][:1])


def test_base_only_leaves_the_adapters_out_and_restores_the_route(
    make_population: Callable[..., LoraPopulation],
) -> None:
    population, ids = make_population(), ids_of(1, 4)
    with torch.no_grad(), population.route([1]):
        adapted = population.model(input_ids=ids).logits
        with population.base_only():
            base = population.model(input_ids=ids).logits
        again = population.model(input_ids=ids).logits
    assert not torch.allclose(adapted, base, atol=1e-2)
    assert torch.equal(adapted, again)


def test_a_forward_without_a_route_or_with_another_batch_is_an_error(
    make_population: Callable[..., LoraPopulation],
) -> None:
    population = make_population()
    with pytest.raises(RuntimeError, match=r"outside of LoraPopulation\.route"):
        population.model(input_ids=ids_of(1, 4))
    with population.route([0, 1]), pytest.raises(RuntimeError, match="the route is for"):
        population.model(input_ids=ids_of(3, 4))
    for wrong in ([], [3], [0, -1]):
        with pytest.raises(IndexError, match="allowed are 0 to 2"):
            population.route(wrong)


def test_factors_go_in_and_out_as_copies(make_population: Callable[..., LoraPopulation]) -> None:
    population = make_population()
    before = population.factors(1)
    population.set_factors(2, before)
    for path, A, B in population.named_stacks():
        assert torch.equal(A[2], before[path].A)
        assert torch.equal(B[2], before[path].B)
        before[path].A.zero_()
        assert A[1].count_nonzero() > 0
    assert list(population.factors(0)) == [path for path, _, _ in population.named_stacks()]


def test_factors_that_do_not_fit_are_refused_and_change_nothing(make_population: Callable[..., LoraPopulation]) -> None:
    population = make_population()
    before = population.factors(0)
    first = next(iter(before))
    missing = {path: pair for path, pair in before.items() if path != first}
    with pytest.raises(PopuloraError, match=first.replace(".", r"\.")):
        population.set_factors(0, missing)
    last = list(before)[-1]
    bad = {path: Pair(pair.A + 1, pair.B + 1) for path, pair in before.items()}
    bad[last] = Pair(bad[last].A[:2], bad[last].B[:, :2])
    with pytest.raises(PopuloraError, match="they must be"):
        population.set_factors(0, bad)
    for path, pair in population.factors(0).items():
        assert torch.equal(pair.A, before[path].A)


def test_only_the_factors_can_learn(make_population: Callable[..., LoraPopulation]) -> None:
    population = make_population()
    learnable = {id(parameter) for parameter in population.model.parameters() if parameter.requires_grad}
    assert learnable == {id(parameter) for parameter in population.parameters()}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "c_attn"), "c_attn is no linear layer of the base; it has .*gate_proj.*q_proj"),
        (("lm_head",), "lm_head is the output head"),
        (("proj",), "proj is no linear layer"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(
    make_model: Callable[..., PreTrainedModel], targets: tuple[str, ...], message: str
) -> None:
    with pytest.raises(PopuloraError, match=message):
        LoraPopulation(make_model(), 1, 4, 8.0, targets, seed=0)


def test_a_base_without_linear_layers_is_refused() -> None:
    model = RwkvForCausalLM(RwkvConfig(hidden_size=16, num_hidden_layers=2, vocab_size=20))
    for block in model.rwkv.blocks:
        block.attention = block.feed_forward = torch.nn.Identity()
    with pytest.raises(AdapterTargetError, match="no linear layer") as caught:
        LoraPopulation(model, 1, 4, 8.0, "all-linear", seed=0)
    assert caught.value.exit_code == 42


def test_layers_that_get_rows_and_tokens_flattened_are_adapted_and_others_refused(
    make_population: Callable[..., LoraPopulation],
) -> None:
    population, ids, members = make_population(targets=("up_proj",)), ids_of(3, 5), [0, 2, 1]
    layer = population.model.model.layers[0].mlp.up_proj
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), population.route(members):
        population.model(input_ids=ids)
        expected = layer(x)
        torch.testing.assert_close(layer(x.flatten(0, 1)), expected.flatten(0, 1), rtol=0, atol=0)
        torch.testing.assert_close(layer(x[:, None]), expected[:, None], rtol=0, atol=0)
        for shape in ((10, 32), (3, 32), (5, 3, 32), (32,)):
            with pytest.raises(AdapterTargetError, match=r"model\.layers\.0\.mlp\.up_proj can't .*leave up_proj out"):
                layer(torch.ones(shape))


def test_all_linear_adapts_every_linear_layer_but_the_head(make_population: Callable[..., LoraPopulation]) -> None:
    paths = [path for path, _, _ in make_population(targets="all-linear").named_stacks()]
    assert len(paths) == 2 * 7
    assert not any("lm_head" in path for path in paths)
