"""The stacked optimizer is torch's AdamW, member by member."""

import pytest
import torch
from torch import Tensor, nn

from populora_trainer.errors import StorageError
from populora_trainer.learning.adamw import StackedAdamW

SHAPES = ((4, 33), (17, 4), (1, 5))
MEMBERS = 3


def stacks() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(MEMBERS, *shape, generator=generator)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(MEMBERS, *shape, generator=generator) * 10.0 ** (step % 4 - 2) for shape in SHAPES]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_member_equals_torchs_adamw_to_the_last_bit(weight_decay: float) -> None:
    parameters, rates = stacks(), [1e-2, 3e-3, 5e-4]
    ours = StackedAdamW(parameters, rates, weight_decay=weight_decay)
    alone = [[nn.Parameter(parameter[m].detach().clone()) for parameter in parameters] for m in range(MEMBERS)]
    theirs = [torch.optim.AdamW(alone[m], lr=rates[m], weight_decay=weight_decay) for m in range(MEMBERS)]
    for step in range(25):
        taking_part = [m for m in range(MEMBERS) if (step + m) % (m + 1) == 0]  # members fall out of step
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        ours.step(taking_part)
        for m in taking_part:
            for parameter, gradient in zip(alone[m], gradients(step), strict=True):
                parameter.grad = gradient[m]
            theirs[m].step()
        for index, parameter in enumerate(parameters):
            for m in range(MEMBERS):
                assert torch.equal(parameter[m], alone[m][index]), (step, m, index)
    assert len(set(ours.steps)) == MEMBERS


def test_a_member_that_takes_no_part_is_not_touched() -> None:
    parameters = stacks()
    optimizer = StackedAdamW(parameters, 1e-2, weight_decay=0.1)
    for step in range(3):
        before = [parameter[1].clone() for parameter in parameters]
        state = optimizer.state()
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
            parameter.grad[1] = float("nan")
        optimizer.step([0, 2])
        assert all(torch.equal(parameter[1], old) for parameter, old in zip(parameters, before, strict=True))
        after = optimizer.state()
        assert all(torch.equal(after[name][1], state[name][1]) for name in state)
    assert optimizer.steps == [3, 0, 3]


def test_state_goes_on_exactly_where_it_was() -> None:
    runs = []
    for interrupted in (False, True):
        parameters = stacks()
        optimizer = StackedAdamW(parameters, 1e-2, warmup_steps=4)
        for step in range(6):
            if interrupted and step == 3:
                state = optimizer.state()
                optimizer = StackedAdamW(parameters, 1e-2, warmup_steps=4)
                optimizer.load_state(state)
            for parameter, gradient in zip(parameters, gradients(step), strict=True):
                parameter.grad = gradient
            optimizer.step([0, 1] if step % 2 else [0, 2])
        runs.append([*parameters, *optimizer.state().values()])
    for straight, resumed in zip(*runs, strict=True):
        assert torch.equal(straight, resumed)


def test_state_of_another_population_is_refused() -> None:
    optimizer = StackedAdamW(stacks(), 1e-2)
    state = optimizer.state()
    with pytest.raises(StorageError, match=r"first\.0000 has shape none"):
        optimizer.load_state({name: tensor for name, tensor in state.items() if name != "first.0000"})
    with pytest.raises(StorageError, match=r"second.0001 has shape \(2, 17, 4\); this population needs \(3, 17, 4\)"):
        optimizer.load_state({**state, "second.0001": torch.zeros(2, 17, 4)})


def test_a_reset_member_starts_as_a_new_one_and_the_others_go_on() -> None:
    parameters = stacks()
    optimizer = StackedAdamW(parameters, 1e-2, warmup_steps=2)
    for parameter, gradient in zip(parameters, gradients(0), strict=True):
        parameter.grad = gradient
    optimizer.step([0, 1, 2])
    before = optimizer.state()
    optimizer.reset(1)
    after = optimizer.state()
    assert optimizer.steps == [1, 0, 1]
    for name in before:
        assert after[name][1].count_nonzero() == 0
        assert torch.equal(after[name][[0, 2]], before[name][[0, 2]])


def test_warmup_counts_each_members_own_steps() -> None:
    optimizer = StackedAdamW(stacks(), [1.0, 2.0, 3.0], warmup_steps=4)
    assert [optimizer.rate(0, step) for step in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert optimizer.rate(2, 1) == 0.75
    assert StackedAdamW(stacks(), 0.5).rate(0, 1) == 0.5


def test_rates_must_be_one_for_each_member() -> None:
    with pytest.raises(ValueError, match="2 learning rates for 3 members"):
        StackedAdamW(stacks(), [1e-2, 1e-2])
