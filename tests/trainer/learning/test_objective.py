"""The objective's values and gradients, worked out by hand."""

import math

import pytest
import torch

from populora_trainer.learning.objective import kl_to_base, policy_objective


def objective_of(logp: float, old: float, rollout: float, advantage: float):
    logprobs = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    values = [torch.tensor([v], dtype=torch.float64) for v in (old, rollout, advantage)]
    objective = policy_objective(logprobs, *values)
    objective.loss_T.sum().backward()
    return objective, float(logprobs.grad)


@pytest.mark.parametrize(
    ("logp", "old", "rollout", "advantage", "loss", "gradient", "clipped"),
    [
        (-1.0, -1.0, -1.0, 2.0, -2.0, -2.0, False),  # on policy: the plain policy gradient
        (-1.0, -1.0, -1.0, -2.0, 2.0, 2.0, False),
        (math.log(0.5), math.log(0.4), math.log(0.4), 1.0, -1.2, 0.0, True),  # ratio 1.25 stops at 1.2
        (math.log(0.5), math.log(0.4), math.log(0.4), -1.0, 1.25, 1.25, False),  # but not where that is worse
        (math.log(0.3), math.log(0.4), math.log(0.4), -1.0, 0.8, 0.0, True),  # ratio 0.75 stops at 0.8
        (math.log(0.3), math.log(0.4), math.log(0.4), 1.0, -0.75, -0.75, False),
        (-1.0, -1.0, -1.0 - math.log(1.5), 1.0, -1.5, -1.5, False),  # the engine thought it less likely: weight 1.5
        (-1.0, -1.0, -1.0 - math.log(8), 1.0, -2.0, -2.0, False),  # weight 8 is cut to 2
        (-1.0, -1.0, -1.0 + math.log(4), 1.0, -0.25, -0.25, False),
    ],
)
def test_loss_and_gradient(
    logp: float, old: float, rollout: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    objective, found = objective_of(logp, old, rollout, advantage)
    assert float(objective.loss_T.detach()) == pytest.approx(loss)
    assert found == pytest.approx(gradient)
    assert bool(objective.clipped_T) == clipped


def test_mismatch_is_measured_between_engine_and_trainer() -> None:
    objective, _ = objective_of(-1.0, -1.2, -1.5, 1.0)
    assert float(objective.difference_T) == pytest.approx(0.3)
    assert float(objective.mismatch_kl_T) == pytest.approx(math.exp(0.3) - 1 - 0.3)
    assert not objective.truncated_T
    assert objective_of(-1.0, -1.0, -2.0, 1.0)[0].truncated_T


def test_absurd_ratios_stay_finite() -> None:
    objective, gradient = objective_of(-1.0, -900.0, -1800.0, -1.0)
    assert math.isfinite(float(objective.loss_T.detach()))
    assert math.isfinite(gradient)


def test_kl_to_base_is_zero_at_the_base_and_pulls_towards_it() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    base = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    kl = kl_to_base(logprobs, base)
    torch.testing.assert_close(kl.detach(), torch.tensor([0.0, math.e - 2, math.exp(-0.5) - 0.5], dtype=torch.float64))
    kl.sum().backward()
    assert logprobs.grad[0] == 0
    assert logprobs.grad[1] < 0 < logprobs.grad[2]  # descending raises what the base likes more
