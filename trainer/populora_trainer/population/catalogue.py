"""The seventeen evolution operators as a table: ids, names, parameters with their defaults, sources.

The functions are in `operators/`, which computes with torch; who only lists or checks operators reads this instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Parameter = float | bool | None


@dataclass(frozen=True, slots=True)
class Operator:
    """One line of the table.

    Attributes:
        id: as the paper numbers it, M1 to M6 and X1 to X9; C1 and C2 are the controls.
        name: of the function in `operators/`, e.g. "mask_components".
        arity: number of parents, 1 or 2.
        description: one line.
        parameters: the function's keyword arguments with their defaults.
        source: where it comes from.
        fitter: which parent is meant to be the fitter one, where it matters.
    """

    id: str
    name: str
    arity: Literal[1, 2]
    description: str
    parameters: Mapping[str, Parameter]
    source: str
    fitter: Literal["first", "second"] | None = None


_PAPER = "arXiv 2605.16727, appendix"

OPERATORS: dict[str, Operator] = {
    operator.id: operator
    for operator in (
        Operator(
            "M1",
            "perturb_spectrum",
            1,
            "Log-normal noise on the singular values and a small rotation of both singular bases.",
            {"epsilon": 0.1, "rotation": 0.1, "first_order": False},
            f"{_PAPER}, M1",
        ),
        Operator(
            "M2",
            "jitter_slots",
            1,
            "Gaussian noise on both factors of a random third of the module slots.",
            {"epsilon": 0.1, "fraction": 1 / 3},
            f"{_PAPER}, M2",
        ),
        Operator(
            "M3",
            "mask_components",
            1,
            "Silences a random 30 % of each slot's singular components, which can be learned again.",
            {"fraction": 0.3},
            f"{_PAPER}, M3",
        ),
        Operator(
            "M4",
            "jitter",
            1,
            "Gaussian noise on both factors of every module slot.",
            {"epsilon": 0.15},
            f"{_PAPER}, M4",
        ),
        Operator(
            "M5",
            "jitter_inputs",
            1,
            "Uniform noise on the input factor A alone, as in NEFTune.",
            {"alpha": 1.0},
            f"{_PAPER}, M5; arXiv 2310.05914",
        ),
        Operator(
            "M6",
            "collapse",
            1,
            "Keeps the leading half of the singular components and shakes what survives.",
            {"keep": 0.5, "epsilon": 0.05},
            f"{_PAPER}, M6",
        ),
        Operator(
            "X1",
            "dare",
            2,
            "DARE: drops entries of each parent at random, rescales the rest, averages the parents.",
            {"p": 0.1},
            f"{_PAPER}, X1; arXiv 2311.03099",
        ),
        Operator(
            "X2", "pick_slots", 2, "Takes each module slot whole from one parent, by a fair coin.", {}, f"{_PAPER}, X2"
        ),
        Operator(
            "X3",
            "splice_spectrum",
            2,
            "Leading singular components of parent 1, the remaining ones of parent 2.",
            {"share": None},
            f"{_PAPER}, X3",
            fitter="first",
        ),
        Operator(
            "X4",
            "extrapolate",
            2,
            "Moves along the line from parent 1 through parent 2 and past it.",
            {"eta_min": 1.0, "eta_max": 1.5},
            f"{_PAPER}, X4",
            fitter="second",
        ),
        Operator(
            "X5",
            "interpolate",
            2,
            "Weighted mean of the two deltas.",
            {"weight": 0.5},
            f"{_PAPER}, X5; arXiv 2212.04089",
        ),
        Operator(
            "X6",
            "ties",
            2,
            "TIES: trims small entries, elects a sign per entry, averages those that agree.",
            {"density": 0.5},
            f"{_PAPER}, X6; arXiv 2306.01708",
        ),
        Operator(
            "X7",
            "della",
            2,
            "DELLA: drops entries, small ones more often, rescales the rest, elects signs as TIES does.",
            {"density": 0.7, "epsilon": 0.15},
            f"{_PAPER}, X7; arXiv 2406.11617",
        ),
        Operator(
            "X8",
            "slerp",
            2,
            "Spherical interpolation of each slot's delta; linear where the parents are parallel.",
            {"weight": 0.5},
            f"{_PAPER}, X8",
        ),
        Operator(
            "X9",
            "fisher",
            2,
            "Average weighted by each entry's square, in place of its Fisher information.",
            {},
            f"{_PAPER}, X9; arXiv 2111.09832",
        ),
        Operator("C1", "copy", 1, "Control of the mutations: copies the parent.", {}, "this project"),
        Operator(
            "C2",
            "copy_first",
            2,
            "Control of the crossovers: copies parent 1, the fitter one.",
            {},
            "this project",
            fitter="first",
        ),
    )
}
"""The operators by id, in the paper's order."""
