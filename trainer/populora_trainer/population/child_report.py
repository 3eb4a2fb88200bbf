"""How a child's delta stands to its parents', measured through the factors, for the lineage."""

from collections.abc import Sequence
from dataclasses import dataclass

from populora_trainer.population.factors import Factors, distance_of_a, inner_product
from populora_trainer.population.operators.svd import retained_energy


@dataclass(frozen=True, slots=True)
class Resemblance:
    """A child beside one parent, all module slots together; None where a delta is zero.

    Attributes:
        norm_ratio: |dW_child| / |dW_parent|.
        cosine: of the two deltas as vectors, in [-1, 1].
        retained_energy: share of |dW_parent|^2 that lies in the child's singular spaces, in [0, 1].
        input_factor_distance: |A_child - A_parent| / (|A_child| + |A_parent|); 0 where the child holds the parent's A.
    """

    norm_ratio: float | None
    cosine: float | None
    retained_energy: float | None
    input_factor_distance: float


@dataclass(frozen=True, slots=True)
class ChildReport:
    """What the lineage keeps of a child's weights.

    Attributes:
        norm: Frobenius norm of the child's delta, without alpha / rank, all module slots together.
        parents: one entry a parent, in their order.
    """

    norm: float
    parents: tuple[Resemblance, ...]


def report(parents: Sequence[Factors], child: Factors) -> ChildReport:
    """Measure a child against its parents.

    Args:
        parents: factors of the child's module slots and shapes.
        child: what an operator made of them.
    """
    norm = sum(float(inner_product(pair, pair)) for pair in child.values()) ** 0.5
    return ChildReport(norm, tuple(_resemblance(parent, child, norm) for parent in parents))


def _resemblance(parent: Factors, child: Factors, norm: float) -> Resemblance:
    along = kept = total = 0.0
    apart = distance_of_a(child, parent)
    for path, pair in child.items():
        retained, energy = retained_energy(parent[path], pair)
        kept += float(retained)
        total += float(energy)
        along += float(inner_product(parent[path], pair))
    if total == 0.0:
        return Resemblance(None, None, None, apart)
    cosine = max(-1.0, min(1.0, along / (norm * total**0.5))) if norm else None
    return Resemblance(norm / total**0.5, cosine, min(1.0, kept / total), apart)
