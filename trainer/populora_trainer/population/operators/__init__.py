"""The seventeen evolution operators: pure functions from parents' factors and a generator to a child's factors.

They know factors and nothing else of a run; the package must not import members, ratings, evolution or storage.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from populora_trainer.errors import OperatorError
from populora_trainer.population.factors import Factors
from populora_trainer.population.operators import crossovers, mutations

Parameter = float | bool | None


@dataclass(frozen=True, slots=True)
class Operator:
    """One entry of the table.

    Attributes:
        id: as the paper numbers it, M1 to M6 and X1 to X9; C1 and C2 are the controls.
        name: of the function, e.g. "mask_components".
        arity: number of parents, 1 or 2.
        description: one line.
        run: `run(parent, generator, **parameters)` or `run(parent1, parent2, generator, **parameters)`.
        parameters: names with their defaults.
        source: where it comes from.
        fitter: which parent is meant to be the fitter one, where it matters.
    """

    id: str
    name: str
    arity: Literal[1, 2]
    description: str
    run: Callable[..., Factors]
    parameters: Mapping[str, Parameter]
    source: str
    fitter: Literal["first", "second"] | None = None


def _operator(
    id: str,
    run: Callable[..., Factors],
    description: str,
    source: str,
    fitter: Literal["first", "second"] | None = None,
) -> Operator:
    signature = inspect.signature(run).parameters.values()
    parameters = {p.name: p.default for p in signature if p.kind is inspect.Parameter.KEYWORD_ONLY}
    arity: Literal[1, 2] = 1 if "parent" in inspect.signature(run).parameters else 2
    return Operator(id, run.__name__, arity, description, run, parameters, source, fitter)


_PAPER = "arXiv 2605.16727, appendix"

OPERATORS: dict[str, Operator] = {
    operator.id: operator
    for operator in (
        _operator(
            "M1",
            mutations.perturb_spectrum,
            "Log-normal noise on the singular values and a small rotation of both singular bases.",
            f"{_PAPER}, M1",
        ),
        _operator(
            "M2",
            mutations.jitter_slots,
            "Gaussian noise on both factors of a random third of the module slots.",
            f"{_PAPER}, M2",
        ),
        _operator(
            "M3",
            mutations.mask_components,
            "Silences a random third of each slot's singular components, which can be learned again.",
            f"{_PAPER}, M3",
        ),
        _operator(
            "M4",
            mutations.jitter,
            "Gaussian noise on both factors of every module slot.",
            f"{_PAPER}, M4",
        ),
        _operator(
            "M5",
            mutations.jitter_inputs,
            "Uniform noise on the input factor A alone, as in NEFTune.",
            f"{_PAPER}, M5; arXiv 2310.05914",
        ),
        _operator(
            "M6",
            mutations.collapse,
            "Keeps the leading half of the singular components, then shakes both factors.",
            f"{_PAPER}, M6",
        ),
        _operator(
            "X1",
            crossovers.dare,
            "DARE: drops entries of each parent at random, rescales the rest, averages the parents.",
            f"{_PAPER}, X1; arXiv 2311.03099",
        ),
        _operator(
            "X2",
            crossovers.pick_slots,
            "Takes each module slot whole from one parent, by a fair coin.",
            f"{_PAPER}, X2",
        ),
        _operator(
            "X3",
            crossovers.splice_spectrum,
            "Leading singular components of parent 1, the remaining ones of parent 2.",
            f"{_PAPER}, X3",
            "first",
        ),
        _operator(
            "X4",
            crossovers.extrapolate,
            "Moves along the line from parent 1 through parent 2 and past it.",
            f"{_PAPER}, X4",
            "second",
        ),
        _operator(
            "X5",
            crossovers.interpolate,
            "Weighted mean of the two deltas.",
            f"{_PAPER}, X5; arXiv 2212.04089",
        ),
        _operator(
            "X6",
            crossovers.ties,
            "TIES: trims small entries, elects a sign per entry, averages those that agree.",
            f"{_PAPER}, X6; arXiv 2306.01708",
        ),
        _operator(
            "X7",
            crossovers.della,
            "DELLA: drops entries at random, small ones more often, then elects signs as TIES does.",
            f"{_PAPER}, X7; arXiv 2406.11617",
        ),
        _operator(
            "X8",
            crossovers.slerp,
            "Spherical interpolation of each slot's delta; linear where the parents are parallel.",
            f"{_PAPER}, X8",
        ),
        _operator(
            "X9",
            crossovers.fisher,
            "Average weighted by each entry's square, in place of its Fisher information.",
            f"{_PAPER}, X9; arXiv 2111.09832",
        ),
        _operator("C1", mutations.copy, "Control of the mutations: copies the parent.", "this project"),
        _operator(
            "C2",
            crossovers.copy_first,
            "Control of the crossovers: copies parent 1, the fitter one.",
            "this project",
            "first",
        ),
    )
}
"""The operators by id, in the paper's order."""


def find(id: str) -> Operator:
    """Return the operator of an id.

    Raises:
        OperatorError: there is none.
    """
    if id not in OPERATORS:
        raise OperatorError(f"operator {id} does not exist; it must be one of {', '.join(OPERATORS)}")
    return OPERATORS[id]


def breed(
    id: str,
    parents: Sequence[Factors],
    generator: torch.Generator,
    parameters: Mapping[str, Parameter] | None = None,
) -> Factors:
    """Make a child by the operator of an id.

    Args:
        id: one of `OPERATORS`.
        parents: as many as the operator takes.
        generator: for every draw that it makes.
        parameters: values in place of the defaults.

    Returns:
        The child's factors, of the parents' rank, shapes, dtype and device, in memory of their own.

    Raises:
        OperatorError: no such operator, the wrong number of parents, an unknown parameter or one out of range, parents
            that do not fit together, or a value that is not finite in a parent or in the child.
    """
    operator = find(id)
    if len(parents) != operator.arity:
        raise OperatorError(
            f"{id} takes {operator.arity} parent{'s' if operator.arity > 1 else ''}; {len(parents)} given"
        )
    parameters = parameters or {}
    for name, value in parameters.items():
        _check_parameter(operator, name, value)
    return operator.run(*parents, generator, **parameters)


def _check_parameter(operator: Operator, name: str, value: Parameter) -> None:
    if name not in operator.parameters:
        allowed = ", ".join(operator.parameters) or "none"
        raise OperatorError(f"{operator.id} has no parameter {name}; it has: {allowed}")
    default = operator.parameters[name]
    if isinstance(default, bool):
        fits, kind = isinstance(value, bool), "true or false"
    else:
        fits, kind = isinstance(value, int | float) and not isinstance(value, bool), "a number"
        if default is None:
            fits, kind = fits or value is None, "a number or null"
    if not fits:
        raise OperatorError(f"{operator.id}: {name} is {value!r}; it must be {kind}")
