"""Advantages are the published formulas, member by member, without what makes them misbehave."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.learning.advantages import reinforce_plus_plus_baseline


def test_golden_values_worked_out_by_hand() -> None:
    # Group 1: rewards 1, 0 centre to +-1/2 with 1 and 3 tokens; group 2: 1, 0, 0 to 2/3, -1/3, -1/3 with 2, 1, 1.
    # mu = (1/2 - 3/2 + 4/3 - 2/3) / 8 = -1/24. Sum of k c^2 = 1/4 + 3/4 + 8/9 + 2/9 = 19/9.
    # var = 19/72 - 1/576 = 151/576, with Bessel's correction 151/576 * 8/7 = 151/504.
    found = reinforce_plus_plus_baseline([[1, 0], [1, 0, 0]], [[1, 3], [2, 1, 1]], ["m", "m"])
    sigma = math.sqrt(151 / 504 + 1e-8)
    expected = [[1 / 2 + 1 / 24, -1 / 2 + 1 / 24], [2 / 3 + 1 / 24, -1 / 3 + 1 / 24, -1 / 3 + 1 / 24]]
    for values, hand in zip(found.values_PG, expected, strict=True):
        np.testing.assert_allclose(values, np.array(hand) / sigma, rtol=1e-12)
    assert found.mean["m"] == pytest.approx(-1 / 24)
    assert found.std["m"] == pytest.approx(sigma)
    without = reinforce_plus_plus_baseline([[1, 0], [1, 0, 0]], [[1, 3], [2, 1, 1]], ["m", "m"], variant="OpenRLHF")
    assert without.std["m"] == pytest.approx(math.sqrt(151 / 576))
    unshifted = reinforce_plus_plus_baseline([[1, 0], [1, 0, 0]], [[1, 3], [2, 1, 1]], ["m", "m"], shift_mean=False)
    np.testing.assert_allclose(unshifted.values_PG[0], np.array([1 / 2, -1 / 2]) / sigma, rtol=1e-12)


def verl_formula(rewards_PG: list[list[float]], tokens_PG: list[list[int]]) -> torch.Tensor:
    """Transcribe verl's estimator on padded token tensors: scores by uid, tiled, masked_whiten with Bessel's term."""
    width = max(max(tokens) for tokens in tokens_PG)
    scores, index, mask = [], [], []
    for uid, (rewards, tokens) in enumerate(zip(rewards_PG, tokens_PG, strict=True)):
        for reward, count in zip(rewards, tokens, strict=True):
            scores.append(reward)
            index.append(uid)
            mask.append([1.0] * count + [0.0] * (width - count))
    scores_B, mask_BT = torch.tensor(scores, dtype=torch.float64), torch.tensor(mask, dtype=torch.float64)
    id2score: dict[int, list[torch.Tensor]] = {}
    for i, uid in enumerate(index):
        id2score.setdefault(uid, []).append(scores_B[i])
    id2mean = {uid: torch.stack(s).mean() if len(s) > 1 else torch.tensor(0.0) for uid, s in id2score.items()}
    centred = torch.stack([scores_B[i] - id2mean[uid] for i, uid in enumerate(index)])
    tiled = centred[:, None].tile(1, width) * mask_BT
    mean = (tiled * mask_BT).sum() / (mask_BT.sum() + 1e-8)
    variance = (((tiled - mean) ** 2) * mask_BT).sum() / (mask_BT.sum() + 1e-8)
    variance = variance * mask_BT.sum() / (mask_BT.sum() - 1)
    return ((tiled - mean) * torch.rsqrt(variance + 1e-8) * mask_BT)[:, 0]


def openrlhf_formula(rewards_PG: list[list[float]], tokens_PG: list[list[int]]) -> torch.Tensor:
    """Transcribe OpenRLHF's reinforce_baseline: reward minus group mean, then the std over all action tokens."""
    advantages, masks = [], []
    for rewards, tokens in zip(rewards_PG, tokens_PG, strict=True):
        group = torch.tensor(rewards, dtype=torch.float64)
        for reward, count in zip(group - group.mean(), tokens, strict=True):
            advantages.append(reward.repeat(count))
            masks.append(torch.ones(count, dtype=torch.float64))
    flat, mask = torch.cat(advantages), torch.cat(masks)
    mean = (flat * mask).sum() / mask.sum()
    variance = ((flat - mean).pow(2) * mask).sum() / mask.sum()
    rstd = variance.clamp(min=1e-8).rsqrt()
    return torch.stack([(advantage[0] - mean) * rstd for advantage in advantages])


GROUPS = st.lists(
    st.integers(2, 6).flatmap(
        lambda n: st.tuples(
            st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.1, 1.0]), min_size=n, max_size=n),
            st.lists(st.integers(1, 9), min_size=n, max_size=n),
        )
    ),
    min_size=1,
    max_size=6,
)


@given(GROUPS)
def test_without_masks_it_is_the_published_formula(groups: list[tuple[list[float], list[int]]]) -> None:
    rewards, tokens = [list(r) for r, _ in groups], [list(k) for _, k in groups]
    for variant, formula in (("verl", verl_formula), ("OpenRLHF", openrlhf_formula)):
        found = reinforce_plus_plus_baseline(
            rewards, tokens, ["m"] * len(groups), variant=variant, mask_constant=False, std_floor=0.0
        )
        # verl adds 1e-8 to the token count, which moves its result by about one part in 1e8.
        np.testing.assert_allclose(
            np.concatenate(found.values_PG), formula(rewards, tokens).numpy(), rtol=1e-6, atol=1e-6
        )


@given(GROUPS)
def test_live_advantages_have_mean_zero_and_at_most_unit_variance_over_tokens(
    groups: list[tuple[list[float], list[int]]],
) -> None:
    rewards, tokens = [list(r) for r, _ in groups], [list(k) for _, k in groups]
    found = reinforce_plus_plus_baseline(rewards, tokens, ["m"] * len(groups))
    for values, group, live in zip(found.values_PG, rewards, found.live_P, strict=True):
        assert live == (len(set(group)) > 1)
        assert np.isfinite(values).all()
        if not live:
            assert (values == 0).all()
    if found.live_P.any():
        live_values = np.concatenate([v for v, live in zip(found.values_PG, found.live_P, strict=True) if live])
        weights = np.concatenate([np.array(k) for k, live in zip(tokens, found.live_P, strict=True) if live])
        assert abs((live_values * weights).sum()) < 1e-6 * weights.sum()
        assert (live_values**2 * weights).sum() <= weights.sum() * (1 + 1e-9)


def test_groups_without_variance_are_masked_and_counted_and_change_nothing() -> None:
    informative, tokens = [[1.0, 0.0], [0.0, 1.0]], [[3, 4], [9, 2]]
    alone = reinforce_plus_plus_baseline(informative, tokens, ["m"] * 2)
    beside = reinforce_plus_plus_baseline([*informative, [1.0] * 8, [0.1] * 8], [*tokens, [40] * 8, [5] * 8], ["m"] * 4)
    for value, same in zip(alone.values_PG, beside.values_PG[:2], strict=True):
        np.testing.assert_array_equal(value, same)
    assert (beside.masked, beside.masked_fraction, list(beside.live_P)) == (2, 0.5, [True, True, False, False])
    assert (beside.values_PG[2] == 0).all()
    published = reinforce_plus_plus_baseline(
        [*informative, [1.0] * 8], [*tokens, [40] * 8], ["m"] * 3, mask_constant=False
    )
    assert (published.values_PG[2] > 0).all()  # the push that masking prevents


def test_whitening_keeps_to_its_scope() -> None:
    loud, quiet = [100.0, 0.0], [0.01, 0.0]
    apart = reinforce_plus_plus_baseline([loud, quiet], [[1, 1], [1, 1]], ["a", "b"])
    np.testing.assert_allclose(apart.values_PG[0], apart.values_PG[1], rtol=1e-2)
    pooled = reinforce_plus_plus_baseline([loud, quiet], [[1, 1], [1, 1]], ["a", "a"])
    assert abs(pooled.values_PG[1]).max() < 1e-3
    assert set(apart.std) == {"a", "b"}


def test_unscored_completions_are_left_out_of_everything() -> None:
    with_holes = reinforce_plus_plus_baseline(
        [[1.0, None, 0.0], [float("nan"), 1.0, 0.0], [None, None]], [[2, 99, 3], [99, 4, 5], [1, 1]], ["m"] * 3
    )
    without = reinforce_plus_plus_baseline([[1.0, 0.0], [1.0, 0.0]], [[2, 3], [4, 5]], ["m"] * 2)
    np.testing.assert_array_equal(with_holes.values_PG[0][[0, 2]], without.values_PG[0])
    np.testing.assert_array_equal(with_holes.values_PG[1][[1, 2]], without.values_PG[1])
    assert with_holes.values_PG[0][1] == with_holes.values_PG[1][0] == 0
    assert not with_holes.live_P[2]
    assert with_holes.unscored == 4
    assert with_holes.masked == 0


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, -0.9])
def test_rounding_residue_is_never_blown_up(reward: float) -> None:
    equal = reinforce_plus_plus_baseline([[reward] * 7], [[3] * 7], ["m"])
    assert (equal.values_PG[0] == 0).all()
    almost = reinforce_plus_plus_baseline([[reward] * 7 + [reward + 1e-9]], [[3] * 8], ["m"])
    assert abs(almost.values_PG[0]).max() < 1e-5  # the floor under sigma is 1e-3
    one_odd = reinforce_plus_plus_baseline([[reward] * 7 + [reward + 0.3]], [[3] * 8], ["m"])
    assert abs(one_odd.values_PG[0]).max() < 3


def test_a_lone_completion_keeps_its_reward_in_verl_and_is_masked_in_openrlhf() -> None:
    verl = reinforce_plus_plus_baseline([[1.0], [1.0, 0.0]], [[1], [1, 1]], ["m"] * 2)
    assert verl.live_P[0]
    assert verl.values_PG[0][0] > verl.values_PG[1][0]  # not centred
    openrlhf = reinforce_plus_plus_baseline([[1.0], [1.0, 0.0]], [[1], [1, 1]], ["m"] * 2, variant="OpenRLHF")
    assert not openrlhf.live_P[0]


def test_nothing_at_all_is_no_error() -> None:
    empty = reinforce_plus_plus_baseline([], [], [])
    assert (empty.values_PG, empty.masked, empty.masked_fraction) == ([], 0, 0.0)
