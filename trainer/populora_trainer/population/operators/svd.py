"""Singular value decompositions of dW = B A through its factors: the (out, in) matrix is never built.

QR of A^T and B would give dW = Q_B (R_B R_A^T) Q_A^T and leave a (rank, rank) matrix to decompose. Any square root of
the Gram matrix serves in place of R, so the roots here come from float64 Gram matrices: by Cholesky, or by eigenvectors
where zero or dependent rows need a pseudo-inverse:

    A A^T = root root^T,   Q_A^T = root^-1 A,   root^T (B^T B) root = V_c diag(s^2) V_c^T
    V^T = (V_c^T root^-1) A,   U diag(s) = B (root V_c)

U and V stay small matrices to apply to the factors; no Q is formed, which is a third of a float32 QR's time. The
relative error of a singular value s is about 1e-16 (s_max / s)^2: below float32's own rounding down to 1e-4 of the
largest, 1e-5 at 1e-5 of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from populora_trainer.population.factors import Pair

SMALL = 1e-6  # relative size below which a direction is rounding, in float32
_STRETCH = 0.1  # least singular value of a change of basis over its largest


class Spectrum(NamedTuple):
    """dW = U diag(values) V^T, with U and V held as small float64 matrices to apply to the factors.

    Attributes:
        values: singular values, descending (k,), k = min(rank, in, out).
        left: (rank, k); B @ left = U diag(values).
        right: (k, rank); right @ A = V^T, orthonormal rows.
    """

    values: Tensor
    left: Tensor
    right: Tensor


class Rows(NamedTuple):
    """Rows X (m, in), such as one A or two stacked, with an orthonormal basis Q (in, m) of them.

    Attributes:
        root: (m, m) float64; X = root Q^T.
        inverse: its pseudo-inverse (m, m); inverse @ X = Q^T. Directions that X does not have are zero in both.
    """

    root: Tensor
    inverse: Tensor


def rows_of(X: Tensor) -> Rows:
    """Return an orthonormal basis of the rows of X (m, in)."""
    X = X.double()
    gram = X @ X.T
    root, failed = torch.linalg.cholesky_ex(gram)
    diagonal = root.diagonal()
    if not failed and diagonal.min() > SMALL * diagonal.max():
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        return Rows(root, torch.linalg.solve_triangular(root, identity, upper=False))
    squares, axes = torch.linalg.eigh(gram)  # dependent rows have no triangular root
    live = squares > SMALL**2 * squares[-1]
    lengths = squares.where(live, 0.0).clamp(min=0).sqrt()
    return Rows(axes * lengths, (axes / lengths.where(live, 1.0) * live).T)


def spectrum(pair: Pair) -> Spectrum:
    """Return the singular value decomposition of dW = B A, for A (rank, in) and B (out, rank) of any float dtype."""
    rows = rows_of(pair.A)
    B = pair.B.double()
    squares, axes = _leading(rows.root.T @ (B.T @ B) @ rows.root, rows.root)
    k = min(*pair.A.shape, B.shape[0])
    return Spectrum(squares[:k].sqrt(), rows.root @ axes[:, :k], axes[:, :k].T @ rows.inverse)


def truncate(B: Tensor, stacked: Tensor, rows: Rows, rank: int) -> Pair:
    """Return the pair of the given rank nearest to dW = B @ stacked, in a basis near the two stacked A's mean.

    Directions that dW leaves free (all of them where B is zero) are filled with those of the mean A, so that no row
    of the child's A is lost and its B goes on receiving gradient.

    Args:
        B: (out, 2 rank) in the working dtype.
        stacked: A1 on top of A2 (2 rank, in), in the working dtype.
        rows: `rows_of(stacked)`.
        rank: of the child.
    """
    first, second = rows.root[:rank], rows.root[rank:]
    home = (first + second) / 2
    wide = B.double()
    _, axes = _leading(rows.root.T @ (wide.T @ wide) @ rows.root, home)
    axes = axes[:, : min(rank, stacked.shape[1])]
    size = (torch.linalg.vector_norm(first) + torch.linalg.vector_norm(second)) / 2
    basis, inverse = basis_near(home @ axes, size)
    return Pair((basis @ axes.T @ rows.inverse).to(B.dtype) @ stacked, B @ (rows.root @ axes @ inverse).to(B.dtype))


def basis_near(home: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Return the change of basis T that brings orthonormal directions V^T nearest to the parents' A, and its inverse.

    dW = L V^T fixes a child's factors only up to (L T^-1, T V^T). T = A V makes the child's A the projection of the
    parents' A onto V, so that it keeps their basis and scale, and with them the size of step that training takes on
    it. Singular values of T under a tenth of the largest are raised to that, so that B stays in proportion.

    Args:
        home: A V (rank, k), the parents' A in the coordinates of V, float64.
        size: Frobenius norm wanted of the child's A.

    Returns:
        T (rank, k) and its pseudo-inverse (k, rank).
    """
    P, stretch, Zt = torch.linalg.svd(home, full_matrices=False)
    stretch = torch.where(stretch[0] > 0, stretch.clamp(min=_STRETCH * stretch[0]), 1.0)
    stretch = stretch * (size / torch.linalg.vector_norm(stretch))
    return (P * stretch) @ Zt, (Zt.T / stretch) @ P.T


def shared_directions(first: Tensor, second: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return both deltas in one orthonormal basis of input directions: the right singular vectors of [dW1; dW2].

    Args:
        first, second: B1, B2 (out, rank) in the working dtype.
        rows: of A1 on top of A2.

    Returns:
        C1, C2 (out, 2 rank) and V^T as a matrix to apply to the rows (2 rank, 2 rank): dWi = Ci V^T.

    Source: KnOTS, Stoica et al. 2024, arXiv 2410.19735, with inputs and outputs exchanged.
    """
    rank = first.shape[1]
    root_1, root_2 = rows.root[:rank], rows.root[rank:]
    gram_1, gram_2 = (B.double().T @ B.double() for B in (first, second))
    _, axes = _leading(root_1.T @ gram_1 @ root_1 + root_2.T @ gram_2 @ root_2, rows.root)
    return first @ (root_1 @ axes).to(first.dtype), second @ (root_2 @ axes).to(second.dtype), axes.T @ rows.inverse


def retained_energy(parent: Pair, child: Pair) -> tuple[Tensor, Tensor]:
    """Return how much of the parent's |dW|^2 lies in the child's left and right singular spaces, and |dW|^2 itself.

    |U_c^T dW_p V_c|^2,   |dW_p|^2      float64 scalars
    """
    form = spectrum(child)
    live = form.values > SMALL * form.values[0]
    A, B, A_p, B_p = (tensor.double() for tensor in (*child, *parent))
    left = (form.left[:, live] / form.values[live]).T @ (B.T @ B_p)
    right = (A_p @ A.T) @ form.right[live].T
    return (left @ right).square().sum(), ((B_p.T @ B_p) * (A_p @ A_p.T)).sum()


def _leading(squares: Tensor, fallback: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, descending, and eigenvectors of a symmetric matrix; what it leaves free, `fallback` orders.

    Args:
        squares: V^T dW^T dW V (m, m), positive semi-definite.
        fallback: rows (n, m) whose directions come first among those where `squares` is zero.
    """
    scale, other = squares.trace(), fallback.square().sum()
    weight = torch.where(scale > 0, 1e-14 * scale, 1.0) / torch.where(other > 0, other, 1.0)
    axes = torch.linalg.eigh(squares + weight * (fallback.T @ fallback)).eigenvectors.flip(1)
    return (axes * (squares @ axes)).sum(0).clamp(min=0), axes
