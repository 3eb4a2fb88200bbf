"""The policy gradient's objective per token: clipped ratio, corrected for the engine that sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Objective:
    """Losses and measurements, one value per token (T).

    Attributes:
        loss_T: what is to be averaged over a member's tokens and minimised.
        clipped_T: whether the clipped ratio is the one that counts.
        truncated_T: whether the importance weight hit its cap.
        difference_T: log-probability of the trainer minus the sampling engine's, before the update.
        mismatch_kl_T: k3 estimate of KL(engine || trainer), before the update.
    """

    loss_T: Tensor
    clipped_T: Tensor
    truncated_T: Tensor
    difference_T: Tensor
    mismatch_kl_T: Tensor


def policy_objective(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_ratio: float = 0.2,
    importance_cap: float = 2.0,
) -> Objective:
    """Return the clipped and importance-corrected policy loss of every token.

        rho = exp(logp - logp_old)                          policy being trained over the one at the step's start
        w   = min(exp(logp_old - logp_rollout), cap)        truncated importance sampling, no gradient
        loss = -w min(rho A, clip(rho, 1 - eps, 1 + eps) A)

    Log-ratios are limited to +-20 before the exponential.

    Args:
        logprobs_T: under the weights being trained, with gradient.
        old_logprobs_T: under the weights that the step started from; the same values where a step has one update.
        rollout_logprobs_T: as the engine reported them when it sampled, at the same temperature.
        advantages_T: the advantage of each token's completion.

    Source: PPO-clip as in verl's `compute_policy_loss_vanilla`; truncated importance sampling as in OpenRLHF's `tis`.
    """
    ratio_T = (logprobs_T - old_logprobs_T).clamp(-20, 20).exp()
    difference_T = (old_logprobs_T - rollout_logprobs_T).detach().clamp(-20, 20)
    importance_T = difference_T.exp()
    unclipped_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages_T
    return Objective(
        loss_T=-importance_T.clamp(max=importance_cap) * torch.minimum(unclipped_T, clipped_T),
        clipped_T=(clipped_T < unclipped_T).detach(),
        truncated_T=importance_T > importance_cap,
        difference_T=difference_T,
        mismatch_kl_T=importance_T - 1 - difference_T,
    )


def kl_to_base(logprobs_T: Tensor, base_logprobs_T: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy || base) per token: exp(d) - 1 - d with d = logp_base - logp, |d| <= 20."""
    difference_T = (base_logprobs_T - logprobs_T).clamp(-20, 20)
    return difference_T.exp() - 1 - difference_T
