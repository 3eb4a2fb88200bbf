"""Crossovers X1 to X9 and the copy C2: two parents' factors and a generator in, a child's factors out.

What is mixed is always the deltas. Mixing the factors instead, as (B1 + B2)(A1 + A2), adds cross terms B1 A2 that no
parent has: with independent A's they are 71 % of the mean delta. Members start from one shared A, but training and
some operators move it, so no record of descent says who shares one: each module decides from what it can measure:

    w1 B1 A1 + w2 B2 A2 = (w1 B1 + w2 B2) (w1 A1 + w2 A2) / (w1 + w2)  +  w1 w2 / (w1 + w2) (B1 - B2) (A1 - A2)

Where the last term is under 1 % of the child (`NEGLIGIBLE`), the child is the first term: exact for a shared A, and a
few passes over the factors. Elsewhere both parents are stacked to rank 2r and truncated to the nearest rank r. Signs
and magnitudes (X6, X7, X9) are compared entry by entry in B, on the shared A where there is one and else in the input
directions that both deltas share.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from populora_trainer.errors import OperatorError
from populora_trainer.population.factors import Factors, Pair, inner_product
from populora_trainer.population.operators import draws
from populora_trainer.population.operators.ordering import rank_in_rows
from populora_trainer.population.operators.ranges import require
from populora_trainer.population.operators.slots import per_slot, room_for, working
from populora_trainer.population.operators.svd import basis_near, rows_of, shared_directions, spectrum, truncate

NEGLIGIBLE = 0.01
PARALLEL = 0.9995


def dare(parent1: Factors, parent2: Factors, generator: torch.Generator, *, p: float = 0.1) -> Factors:
    """X1, DARE: drop each parent's entries at random, rescale the rest, and average.

        dWi' = (Bi * keep_i / (1 - p)) Ai,   keep_i ~ Bernoulli(1 - p)      dW = (dW1' + dW2') / 2

    Departs from the paper, which drops entries of both factors: there the errors of A and B multiply, and already at
    p = 0.1 the child's cosine to the parents' mean is 0.92, against 0.95 with B alone (at 0.7: 0.37 and 0.55). The
    default rate is this project's.

    The mean of the two dropped deltas has rank 2r at most. Where it fits into rank r, because the parents share A or
    fill half of their rank, the child's delta is the parents' mean in expectation. Elsewhere the child is the nearest
    delta of rank r, draw by draw, and its expectation lacks what is cut off: with independent A's at rank 32, half of
    the mean's norm for flat spectra, a fifth where singular values fall by a factor of 20. An unbiased child of
    rank r exists (each row of A with its column of B from either parent, by a coin), but it is off by the mean's whole
    norm, where this one is off by 0.6 and 0.4 of it.

    Args:
        parent1, parent2: per module slot, A (rank, in) and B (out, rank), any float dtype.
        p: probability to drop an entry, in [0, 1).

    Returns:
        Factors of the same rank, dtype and device.

    Raises:
        OperatorError: p or the parents are out of range.

    Source: arXiv 2605.16727, appendix, X1; Yu et al. 2023, arXiv 2311.03099.
    """
    require("p", p, 0, 1, open_high=True)

    def dropped(B: Tensor) -> Tensor:
        mask, share = draws.keep(tuple(B.shape), 1 - p, generator, B)
        return working(B) * mask / share

    def mix(out: Pair, first: Pair, second: Pair) -> Pair:
        return _weighted(out, Pair(first.A, dropped(first.B)), Pair(second.A, dropped(second.B)), 0.5, 0.5)

    return per_slot(mix, parent1, parent2, transparent=True)


def pick_slots(parent1: Factors, parent2: Factors, generator: torch.Generator) -> Factors:
    """X2, layer-wise crossover: each module slot comes whole from one parent, by a fair coin.

    Args:
        parent1, parent2: per module slot, A (rank, in) and B (out, rank), any float dtype.

    Returns:
        Factors of the same rank, dtype and device; every pair is a parent's, bit for bit.

    Raises:
        OperatorError: the parents are out of range.

    Source: arXiv 2605.16727, appendix, X2.
    """
    coins = iter(torch.randint(2, (len(parent1),), generator=generator, device=generator.device).tolist())

    def pick(out: Pair, first: Pair, second: Pair) -> Pair:
        return second if next(coins) else first

    return per_slot(pick, parent1, parent2)


def splice_spectrum(
    parent1: Factors, parent2: Factors, generator: torch.Generator, *, share: float | None = None
) -> Factors:
    """X3, SVD subspace crossover: the leading components of parent 1, the remaining ones of parent 2.

        dW = sum_{i <= k} s1_i u1_i v1_i^T  +  sum_{i > k} s2_i u2_i v2_i^T

    The two parts have k and r - k components, so the sum has rank r and nothing is cut off. "Remaining" is read as
    populora does: parent 2 gives its r - k weakest components, not its leading ones.

    Args:
        parent1, parent2: per module slot, A (rank, in) and B (out, rank), any float dtype. Parent 1 is the fitter one.
        share: k / r, in (0, 1), with 1 <= k < r; None draws k uniformly for each slot. At rank 1 a coin picks one
            parent's component.

    Returns:
        Factors of the same rank, dtype and device.

    Raises:
        OperatorError: the share or the parents are out of range.

    Source: arXiv 2605.16727, appendix, X3.
    """
    if share is not None:
        require("share", share, 0, 1, open_low=True, open_high=True)

    def mix(out: Pair, first: Pair, second: Pair) -> Pair:
        forms = spectrum(first), spectrum(second)
        total = forms[0].values.shape[0]
        if total == 1:
            k = draws.integer(0, 2, generator)
        elif share is None:
            k = draws.integer(1, total, generator)
        else:
            k = min(max(1, round(share * total)), total - 1)
        A1, A2, B1, B2 = working(first.A), working(second.A), working(first.B), working(second.B)
        size = (torch.linalg.vector_norm(A1) + torch.linalg.vector_norm(A2)).double() / 2
        if size == 0:  # no directions to splice
            return first
        rows = (forms[0].right[:k].to(A1.dtype), A1), (forms[1].right[k:].to(A1.dtype), A2)
        directions = torch.cat([right @ A for right, A in rows])
        basis, inverse = (matrix.to(A1.dtype) for matrix in basis_near(((A1 + A2) / 2 @ directions.T).double(), size))
        left_1, left_2 = forms[0].left[:, :k].to(A1.dtype), forms[1].left[:, k:].to(A1.dtype)
        return Pair(basis @ directions, B1 @ (left_1 @ inverse[:k]) + B2 @ (left_2 @ inverse[k:]))

    return per_slot(mix, parent1, parent2)


def extrapolate(
    parent1: Factors,
    parent2: Factors,
    generator: torch.Generator,
    *,
    eta_min: float = 1.0,
    eta_max: float = 1.5,
) -> Factors:
    """X4, extrapolation: along the line from parent 1 through parent 2 and past it.

        dW = dW1 + eta (dW2 - dW1),      eta ~ Uniform(eta_min, eta_max), one draw for the child

    Args:
        parent1, parent2: per module slot, A (rank, in) and B (out, rank), any float dtype. Parent 2 is the fitter one.
        eta_min, eta_max: range of eta, 1 <= eta_min <= eta_max. At 1 the child is parent 2.

    Returns:
        Factors of the same rank, dtype and device.

    Raises:
        OperatorError: a parameter or the parents are out of range.

    Source: arXiv 2605.16727, appendix, X4.
    """
    require("eta_min", eta_min, 1)
    require("eta_max", eta_max, eta_min)
    eta = draws.between(eta_min, eta_max, generator)
    return per_slot(
        lambda out, first, second: _weighted(out, first, second, 1 - eta, eta), parent1, parent2, transparent=True
    )


def interpolate(parent1: Factors, parent2: Factors, generator: torch.Generator, *, weight: float = 0.5) -> Factors:
    """X5, linear crossover.

        dW = (1 - weight) dW1 + weight dW2

    Args:
        parent1, parent2: per module slot, A (rank, in) and B (out, rank), any float dtype.
        weight: of parent 2, in [0, 1].

    Returns:
        Factors of the same rank, dtype and device.

    Raises:
        OperatorError: the weight or the parents are out of range.

    Source: arXiv 2605.16727, appendix, X5; task arithmetic, Ilharco et al. 2022, arXiv 2212.04089.
    """
    require("weight", weight, 0, 1)
    return per_slot(
        lambda out, first, second: _weighted(out, first, second, 1 - weight, weight), parent1, parent2, transparent=True
    )


def ties(parent1: Factors, parent2: Factors, generator: torch.Generator, *, density: float = 0.5) -> Factors:
    """X6, TIES: trim each parent to its largest entries, elect a sign per entry, average those that agree.

        ti = Bi where |Bi| is among the largest density * n of the slot, else 0
        sign = sign(t1 + t2), + at 0      B = mean of the ti that have that sign

    Departs from the paper, which treats both factors: signs are elected on B, over a common basis of inputs. TIES
    itself trims the whole task vector at once; here each slot keeps its share, as in PEFT and mergekit. Entries as
    large as the smallest that is kept stay as well. The scale of the merged vector (lambda) is 1.

    Args:
        parent1, parent2: per module slot, A (rank, in) and B (out, rank), any float dtype.
        density: share of entries that trimming keeps, in (0, 1]. At 1, equal parents give themselves.

    Returns:
        Factors of the same rank, dtype and device.

    Raises:
        OperatorError: the density or the parents are out of range.

    Source: arXiv 2605.16727, appendix, X6; Yadav et al. 2023, arXiv 2306.01708.
    """
    require("density", density, 0, 1, open_low=True)

    def merge(a: Tensor, b: Tensor) -> Tensor:
        return _elect(_trim(a, density), _trim(b, density))

    return per_slot(lambda out, first, second: _entrywise(out, first, second, merge), parent1, parent2)


def della(
    parent1: Factors,
    parent2: Factors,
    generator: torch.Generator,
    *,
    density: float = 0.7,
    epsilon: float = 0.15,
) -> Factors:
    """X7, DELLA: drop entries at random, small ones more often, then elect signs and average as TIES does.

        q_ij = density - epsilon + 2 epsilon rank_ij,      rank_ij in [0, 1] of |B_ij| within its row
        ti = Bi * keep / q,   keep_ij ~ Bernoulli(q_ij)    B = mean of the ti that have the elected sign

    Each dropped parent is itself in expectation, entry by entry; the election is not linear, so the child is not the
    mean. mergekit rescales by one number, to the L1 norm of Bi, which leaves large entries too large and small ones
    too small. `epsilon` is mergekit's, half of the range of q; DELLA's own is the whole range.

    Args:
        parent1, parent2: per module slot, A (rank, in) and B (out, rank), any float dtype.
        density: mean share of entries kept, in (0, 1].
        epsilon: spread of the probability over a row, with density - epsilon and density + epsilon within [0, 1].

    Returns:
        Factors of the same rank, dtype and device.

    Raises:
        OperatorError: a parameter or the parents are out of range.

    Source: arXiv 2605.16727, appendix, X7; Deep et al. 2024, arXiv 2406.11617, with MAGPRUNE's 1 / (1 - p), p = 1 - q.
    Departs from the paper as X6 does. The defaults are this project's.
    """
    require("density", density, 0, 1, open_low=True)
    require("epsilon", epsilon, 0)
    if density - epsilon < 0 or density + epsilon > 1:
        raise OperatorError(f"epsilon is {epsilon} at density {density}; density -/+ epsilon must lie within 0 and 1")

    def drop(B: Tensor) -> Tensor:
        columns = B.shape[1]
        rank = rank_in_rows(B.abs()).to(B.dtype) / max(1, columns - 1) if columns > 1 else 0.5
        chance = (density - epsilon) + 2 * epsilon * rank
        dropped = draws.uniform(tuple(B.shape), generator, B).add_(1).mul_(0.5) >= chance
        return (B / chance).masked_fill_(dropped, 0.0)

    def merge(a: Tensor, b: Tensor) -> Tensor:
        return _elect(drop(a), drop(b))

    return per_slot(lambda out, first, second: _entrywise(out, first, second, merge), parent1, parent2)


def slerp(parent1: Factors, parent2: Factors, generator: torch.Generator, *, weight: float = 0.5) -> Factors:
    """X8, spherical interpolation of each slot's delta, as a vector.

        theta = angle between dW1 and dW2
        dW = sin((1 - weight) theta) / sin(theta) dW1 + sin(weight theta) / sin(theta) dW2

    Norms are the parents' own. Linear where the deltas are (anti)parallel, |cos theta| > 0.9995, or one is zero.

    Args:
        parent1, parent2: per module slot, A (rank, in) and B (out, rank), any float dtype.
        weight: of parent 2, in [0, 1].

    Returns:
        Factors of the same rank, dtype and device.

    Raises:
        OperatorError: the weight or the parents are out of range.

    Source: arXiv 2605.16727, appendix, X8; Shoemake 1985, in mergekit's form.
    """
    require("weight", weight, 0, 1)

    def mix(out: Pair, first: Pair, second: Pair) -> Pair:
        norms = inner_product(first, first) * inner_product(second, second)
        cosine = inner_product(first, second) / norms.sqrt() if norms > 0 else torch.ones(())
        if cosine.abs() > PARALLEL:
            return _weighted(out, first, second, 1 - weight, weight)
        theta = cosine.acos()
        w1, w2 = torch.sin((1 - weight) * theta) / theta.sin(), torch.sin(weight * theta) / theta.sin()
        return _weighted(out, first, second, float(w1), float(w2))

    return per_slot(mix, parent1, parent2)


def fisher(parent1: Factors, parent2: Factors, generator: torch.Generator) -> Factors:
    """X9, Fisher-weighted average, with an entry's square in place of its Fisher information.

        B = (B1^2 B1 + B2^2 B2) / (B1^2 + B2^2)      entry by entry; the mean where both are 0

    Args:
        parent1, parent2: per module slot, A (rank, in) and B (out, rank), any float dtype.

    Returns:
        Factors of the same rank, dtype and device.

    Raises:
        OperatorError: the parents are out of range.

    Source: arXiv 2605.16727, appendix, X9; Matena and Raffel 2021, arXiv 2111.09832. Departs from the paper as X6 does.
    """

    def weighted(a: Tensor, b: Tensor) -> Tensor:
        # Squares of entries near 1e-20 would be lost in float32; their ratio to the largest is not.
        largest = torch.maximum(a.abs().max(), b.abs().max())
        unit = torch.where(largest > 0, largest, 1.0)
        F1, F2 = (a / unit).square(), (b / unit).square()
        total = F1 + F2
        return torch.where(total > 0, (F1 * a + F2 * b) / total.where(total > 0, 1.0), (a + b) / 2)

    return per_slot(lambda out, first, second: _entrywise(out, first, second, weighted), parent1, parent2)


def copy_first(parent1: Factors, parent2: Factors, generator: torch.Generator) -> Factors:
    """C2, identity control of the crossovers: parent 1, bit for bit, whatever parent 2 is.

    What choosing parents and replacing do, with no mixing of weights. The fitter parent goes first.

    Raises:
        OperatorError: a parent holds NaN or infinity, or they do not fit.
    """
    return per_slot(lambda out, first, _: first, parent1, parent2)


def _weighted(out: Pair, first: Pair, second: Pair, w1: float, w2: float) -> Pair:
    """Return w1 dW1 + w2 dW2 in the parents' rank, by the identity at the top of this file."""
    A1, A2, B1, B2 = working(first.A), working(second.A), working(first.B), working(second.B)
    total = w1 + w2
    A = torch.lerp(A1, A2, w2 / total, out=room_for(out.A, A1))
    B = torch.lerp(B1, B2, w2 / total, out=room_for(out.B, B1))
    if total != 1:
        B *= total
    apart_A = torch.dist(A1, A2)
    if apart_A > 0:
        apart = abs(w1 * w2 / total) * apart_A * torch.dist(B1, B2)
        if apart > NEGLIGIBLE * torch.linalg.vector_norm(A) * torch.linalg.vector_norm(B):
            stacked = torch.cat((A1, A2))
            return truncate(torch.cat((w1 * B1, w2 * B2), dim=1), stacked, rows_of(stacked), A1.shape[0])
    return Pair(A, B)


def _entrywise(out: Pair, first: Pair, second: Pair, merge: Callable[[Tensor, Tensor], Tensor]) -> Pair:
    """Return the pair whose delta is merge(C1, C2) V^T, where dWi = Ci V^T on common input directions V."""
    A1, A2, B1, B2 = working(first.A), working(second.A), working(first.B), working(second.B)
    apart, size = torch.dist(A1, A2), torch.linalg.vector_norm(A1) + torch.linalg.vector_norm(A2)
    if apart <= NEGLIGIBLE * size:
        return Pair(torch.lerp(A1, A2, 0.5, out=room_for(out.A, A1)), merge(B1, B2))
    stacked = torch.cat((A1, A2))
    rows = rows_of(stacked)
    C1, C2, basis = shared_directions(B1, B2, rows)
    return truncate(merge(C1, C2) @ basis.to(C1.dtype), stacked, rows, A1.shape[0])


def _trim(B: Tensor, density: float) -> Tensor:
    size = B.numel()
    cut = size - max(1, int(density * size))
    if cut == 0:
        return B
    threshold = B.abs().flatten().kthvalue(cut + 1).values
    return B * (B.abs() >= threshold)


def _elect(a: Tensor, b: Tensor) -> Tensor:
    sign = torch.where(a + b >= 0, 1, -1)
    agree_a, agree_b = a.sign() == sign, b.sign() == sign
    count = (agree_a.to(a.dtype) + agree_b.to(a.dtype)).clamp(min=1)
    return (a * agree_a + b * agree_b) / count
