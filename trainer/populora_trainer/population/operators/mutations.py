"""Mutations M1 to M6 and the copy C1: one parent's factors and a generator in, a child's factors out.

M1, M3 and M6 act on dW's singular components and write the result back onto the parent's own A, which M1 and M3 leave
bit for bit as it was: dW' = B' A. M6 moves it by its noise alone. The same delta with A replaced by sqrt(s) V^T would
lose the population's shared A, and would shrink A and with it the step that training takes (A has gain of order 1,
sqrt(s) is near 0 early on).
"""

import torch
from torch import Tensor

from populora_trainer.population.factors import Factors, Pair
from populora_trainer.population.operators import draws
from populora_trainer.population.operators.ranges import require
from populora_trainer.population.operators.slots import per_slot, room_for, working
from populora_trainer.population.operators.svd import SMALL, Spectrum, spectrum


def perturb_spectrum(
    parent: Factors,
    generator: torch.Generator,
    *,
    epsilon: float = 0.1,
    rotation: float = 0.1,
    first_order: bool = False,
) -> Factors:
    """M1, structured SVD mutation: log-normal noise on the singular values, a small rotation of both singular bases.

        dW = U diag(s) V^T   ->   (U R_U) diag(s * exp(epsilon z)) (V R_V)^T,      z ~ N(0, 1)^r
        R = (I - K/2)^-1 (I + K/2),   K = rotation * (M - M^T) / 2,   M ~ N(0, 1)^{r x r}, one for U and one for V

    The Cayley transform R is orthogonal, so the child's singular values are exactly s * exp(epsilon z). The paper's
    first order, R = I + K, is not: at rank 32 it stretches by up to 1.2. Components under 1e-6 of the largest are
    rounding; R leaves them as they are.

    Args:
        parent: per module slot, A (rank, in) and B (out, rank), any float dtype.
        epsilon: standard deviation of the log singular values' noise, 0 or more.
        rotation: scale of the rotations' generators, 0 or more; an axis turns by about rotation * sqrt(rank / 2) rad.
        first_order: take R = I + K.

    Returns:
        Factors of the same rank, dtype and device; A is the parent's. Where dW is zero, B stays as it is.

    Raises:
        OperatorError: a parameter or the parent is out of range.

    Source: arXiv 2605.16727, appendix, M1; the Cayley transform and keeping A are this project's.
    """
    require("epsilon", epsilon, 0)
    require("rotation", rotation, 0)

    def change(out: Pair, pair: Pair) -> Pair:
        form = spectrum(pair)
        s = form.values
        live = s > SMALL * s[0]
        z = draws.normal(tuple(s.shape), generator, s)
        left = _rotation(live, rotation, generator, first_order)
        right = _rotation(live, rotation, generator, first_order).T
        U = form.left / s.where(live, 1.0) * live  # as a matrix to apply to B
        new = (U @ left) * (s * torch.exp(epsilon * z)) @ right @ form.right
        old = (form.left * live) @ form.right
        B = pair.B.double()  # dividing by small s magnifies rounding, so this product is in float64
        return Pair(pair.A, B + B @ (new - old))

    return per_slot(change, parent)


def jitter_slots(
    parent: Factors, generator: torch.Generator, *, epsilon: float = 0.1, fraction: float = 1 / 3
) -> Factors:
    """M2, layer-selective noise: Gaussian noise on both factors of a random `fraction` of the module slots.

        X -> X + epsilon * std(X) * N(0, 1)      for X in {A, B} of the chosen slots; all other slots are copied

    Args:
        parent: per module slot, A (rank, in) and B (out, rank), any float dtype.
        epsilon: noise in units of each tensor's standard deviation, 0 or more. A zero B gets none.
        fraction: share of the slots, in (0, 1]; at least one is changed.

    Returns:
        Factors of the same rank, dtype and device.

    Raises:
        OperatorError: a parameter or the parent is out of range.

    Source: arXiv 2605.16727, appendix, M2.
    """
    require("epsilon", epsilon, 0)
    require("fraction", fraction, 0, 1, open_low=True)
    chosen = torch.zeros(len(parent), dtype=torch.bool)
    chosen[draws.choose(len(parent), max(1, round(fraction * len(parent))), generator)] = True
    changes = iter(chosen.tolist())

    def change(out: Pair, pair: Pair) -> Pair:
        return _jittered(out, pair, epsilon, generator) if next(changes) else pair

    return per_slot(change, parent, transparent=True)


def mask_components(parent: Factors, generator: torch.Generator, *, fraction: float = 0.3) -> Factors:
    """M3, component masking: silence a random `fraction` of each module's singular components.

        dW = U diag(s) V^T   ->   U diag(s * keep) V^T,      keep in {0, 1}^r

    The dropped directions are uniform, not the smallest. In the basis of the SVD only B's column is zeroed and A
    keeps its row; the result is then written on the parent's own A, B' = B (I - A V diag(1 - keep) (A V)^-1). Every
    direction of A is still there, so a dropped component receives gradient and can be learned again.

    Args:
        parent: per module slot, A (rank, in) and B (out, rank), any float dtype.
        fraction: share of the components to drop, rounded, in [0, 1); at least one survives.

    Returns:
        Factors of the same rank, dtype and device; A is the parent's.

    Raises:
        OperatorError: the fraction or the parent is out of range.

    Source: arXiv 2605.16727, appendix, M3.
    """
    require("fraction", fraction, 0, 1, open_high=True)

    def change(out: Pair, pair: Pair) -> Pair:
        form = spectrum(pair)
        size = form.values.shape[0]
        dropped = draws.choose(size, min(round(fraction * size), size - 1), generator)
        return Pair(pair.A, _without(working(pair.B), form, dropped))

    return per_slot(change, parent)


def jitter(parent: Factors, generator: torch.Generator, *, epsilon: float = 0.15) -> Factors:
    """M4, full noise: Gaussian noise on both factors of every module slot.

        X -> X + epsilon * std(X) * N(0, 1)      for X in {A, B}

    Args:
        parent: per module slot, A (rank, in) and B (out, rank), any float dtype.
        epsilon: noise in units of each tensor's standard deviation, 0 or more. A zero B gets none.

    Returns:
        Factors of the same rank, dtype and device.

    Raises:
        OperatorError: epsilon or the parent is out of range.

    Source: arXiv 2605.16727, appendix, M4.
    """
    require("epsilon", epsilon, 0)
    return per_slot(lambda out, pair: _jittered(out, pair, epsilon, generator), parent, transparent=True)


def jitter_inputs(parent: Factors, generator: torch.Generator, *, alpha: float = 1.0) -> Factors:
    """M5, NEFTune noise: uniform noise on the input factor alone.

        A -> A + alpha / sqrt(rank * in) * Uniform(-1, 1)

    With A at its usual scale (standard deviation 1 / sqrt(3 in)) the noise is alpha / sqrt(rank) of it: 0.18 at rank
    32 and alpha 1. NEFTune's own 5 to 15 are meant for embeddings and would drown A.

    Args:
        parent: per module slot, A (rank, in) and B (out, rank), any float dtype.
        alpha: scale of the noise, 0 or more.

    Returns:
        Factors of the same rank, dtype and device; B is the parent's.

    Raises:
        OperatorError: alpha or the parent is out of range.

    Source: arXiv 2605.16727, appendix, M5; NEFTune, Jain et al. 2023, arXiv 2310.05914.
    """
    require("alpha", alpha, 0)

    def change(out: Pair, pair: Pair) -> Pair:
        A = working(pair.A)
        noise = draws.uniform(tuple(A.shape), generator, A)
        return Pair(torch.add(A, noise, alpha=alpha / A.numel() ** 0.5, out=room_for(out.A, A)), pair.B)

    return per_slot(change, parent, transparent=True)


def collapse(parent: Factors, generator: torch.Generator, *, keep: float = 0.5, epsilon: float = 0.05) -> Factors:
    """M6, rank collapse and jitter: keep the leading components and shake those that survive.

        dW = U diag(s) V^T   ->   (U_k diag(s_k) + noise) (V_k^T + noise),      k = round(keep * rank), at least 1
        noise = epsilon * std(X) * N(0, 1)      for X in {U_k diag(s_k), V_k^T}

    The child's delta has rank k: noise on all of A and B would fill the other directions again. It differs from the
    collapsed one by about sqrt(2) epsilon of its norm. Of A only the survivors' part moves. As in M3, a dropped
    direction loses B's column and keeps A's row, so that training can fill it.

    Args:
        parent: per module slot, A (rank, in) and B (out, rank), any float dtype.
        keep: share of the components that stays, in (0, 1].
        epsilon: noise in units of each survivors' matrix's standard deviation, 0 or more. A zero B gets none.

    Returns:
        Factors of the same rank, dtype and device.

    Raises:
        OperatorError: a parameter or the parent is out of range.

    Source: arXiv 2605.16727, appendix, M6; the defaults and the scale that noise is measured on are this project's.
    """
    require("keep", keep, 0, 1, open_low=True)
    require("epsilon", epsilon, 0)

    def change(out: Pair, pair: Pair) -> Pair:
        form = spectrum(pair)
        size = form.values.shape[0]
        k = max(1, round(keep * size))
        A, B = working(pair.A), working(pair.B)
        left, right = form.left[:, :k].to(A.dtype), form.right[:k].to(A.dtype)
        rows, columns = _noise(right @ A, epsilon, generator), _noise(B @ left, epsilon, generator)
        # right @ left = I, so (.. + columns @ right) (A + left @ rows) shakes the survivors and nothing else.
        collapsed = _without(B, form, torch.arange(k, size))
        return Pair(torch.addmm(A, left, rows, out=room_for(out.A, A)), collapsed.addmm_(columns, right))

    return per_slot(change, parent)


def copy(parent: Factors, generator: torch.Generator) -> Factors:
    """C1, identity control of the mutations: the parent, bit for bit.

    What replacement alone does, with no change of weights.

    Raises:
        OperatorError: the parent holds NaN or infinity, or is no set of factors.
    """
    return per_slot(lambda out, pair: pair, parent, transparent=True)


def _jittered(out: Pair, pair: Pair, epsilon: float, generator: torch.Generator) -> Pair:
    A, B = working(pair.A), working(pair.B)
    noise_A = _noise(A, epsilon, generator, room_for(out.A, A))
    return Pair(noise_A.add_(A), _noise(B, epsilon, generator, room_for(out.B, B)).add_(B))


def _noise(values: Tensor, epsilon: float, generator: torch.Generator, out: Tensor | None = None) -> Tensor:
    noise = draws.normal(tuple(values.shape), generator, values, out)
    return noise.mul_(epsilon * values.std(correction=0))


def _without(B: Tensor, form: Spectrum, components: Tensor) -> Tensor:
    """Return B' with dW' = B' A, where dW' is dW without the given singular components.

    What A maps to nothing stays in B: it adds nothing to dW, but A's rows get their gradient through it.
    """
    components = components.to(B.device)
    return B - B @ (form.left[:, components] @ form.right[components]).to(B.dtype)


def _rotation(live: Tensor, scale: float, generator: torch.Generator, first_order: bool) -> Tensor:
    """Return R (k, k) that rotates the live components among themselves and leaves the others alone."""
    size = live.shape[0]
    identity = torch.eye(size, dtype=torch.float64, device=live.device)
    M = draws.normal((size, size), generator, identity)
    K = scale / 2 * (M - M.T) * (live[:, None] & live)
    return identity + K if first_order else torch.linalg.solve(identity - K / 2, identity + K / 2)
