"""REINFORCE++ with baseline: rewards of a prompt's group, centred by its mean, then whitened over many groups."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Variant = Literal["verl", "OpenRLHF"]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages and what they were computed from.

    Attributes:
        values_PG: per group one value per completion; 0 where a completion is unscored or its group is masked.
        live_P: whether a group teaches anything; the others belong neither into the loss nor into its token count.
        scored_PG: whether a completion has a reward.
        mean, std: per whitening scope, of the centred rewards over live tokens; std with its floor applied.
        masked: number of groups without variance.
        masked_fraction: their share of all scored groups.
        unscored: number of completions without a reward.
    """

    values_PG: list[NDArray[np.float64]]
    live_P: NDArray[np.bool_]
    scored_PG: list[NDArray[np.bool_]]
    mean: dict[Hashable, float]
    std: dict[Hashable, float]
    masked: int
    masked_fraction: float
    unscored: int


def reinforce_plus_plus_baseline(
    rewards_PG: Sequence[Sequence[float | None]],
    tokens_PG: Sequence[Sequence[int]],
    scopes_P: Sequence[Hashable],
    *,
    variant: Variant = "verl",
    shift_mean: bool = True,
    mask_constant: bool = True,
    std_floor: float = 1e-3,
) -> Advantages:
    """Return the advantages of every completion.

        c = r - mean(r of the group)                                 c = r for a group of one in verl
        mu = sum(k c) / N,  var = sum(k (c - mu)^2) / N              over the scope; k tokens, N = sum(k)
        A = (c - mu) / sigma,  sigma = max(sqrt(s2), floor)          verl: s2 = var N / (N - 1) + 1e-8
                                                                     OpenRLHF: s2 = max(var, 1e-8)

    Both shift by the token-weighted mean mu, which is not 0 where lengths differ: a group whose rewards are all equal
    would get a push of its own. Such groups are masked, and left out of mu and sigma. The floor keeps a scope with
    little variance from blowing its rounding errors up.

    Args:
        rewards_PG: per group the rewards of its completions; None or NaN leaves a completion out of everything.
        tokens_PG: per completion its number of tokens, 1 or more.
        scopes_P: per group what it is whitened with, e.g. its member.
        shift_mean: subtract mu, as both published versions do.
        mask_constant: mask groups without variance. A lone verl completion is not centred and never masked.
        std_floor: lower limit of sigma, in units of reward.

    Source: verl `core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage` and `masked_whiten`; OpenRLHF
    `experience_maker.compute_advantages_and_returns` with `reinforce_baseline`.
    """
    rewards = [np.array([np.nan if r is None else r for r in group], dtype=np.float64) for group in rewards_PG]
    scored = [np.isfinite(group) for group in rewards]
    centred = [np.zeros_like(group) for group in rewards]
    live = np.zeros(len(rewards), dtype=bool)
    masked = 0
    for p, (group, known) in enumerate(zip(rewards, scored, strict=True)):
        if not known.any():
            continue
        alone = variant == "verl" and known.sum() == 1
        centred[p][known] = group[known] - (0.0 if alone else group[known].mean())
        constant = not alone and bool(np.ptp(group[known]) == 0)
        masked += constant
        live[p] = not (constant and mask_constant)
    mean: dict[Hashable, float] = {}
    std: dict[Hashable, float] = {}
    values = [np.zeros_like(group) for group in centred]
    for scope in dict.fromkeys(scope for p, scope in enumerate(scopes_P) if live[p]):
        members = [p for p in range(len(rewards)) if live[p] and scopes_P[p] == scope]
        c = np.concatenate([centred[p][scored[p]] for p in members])
        k = np.concatenate([np.asarray(tokens_PG[p], dtype=np.float64)[scored[p]] for p in members])
        mu, total = float((k * c).sum() / k.sum()), k.sum()
        var = float((k * (c - mu) ** 2).sum() / total)
        squared = var * total / max(total - 1, 1) + 1e-8 if variant == "verl" else max(var, 1e-8)
        mean[scope], std[scope] = mu, max(float(np.sqrt(squared)), std_floor)
        for p in members:
            values[p] = np.where(scored[p], (centred[p] - (mu if shift_mean else 0.0)) / std[scope], 0.0)
    groups = sum(bool(known.any()) for known in scored)
    unscored = sum(int((~known).sum()) for known in scored)
    return Advantages(values, live, scored, mean, std, masked, masked / groups if groups else 0.0, unscored)
