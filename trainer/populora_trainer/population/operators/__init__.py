"""The seventeen evolution operators: pure functions from parents' factors and a generator to a child's factors.

They know factors and nothing else of a run; the package must not import members, ratings, evolution or storage.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from populora_trainer.errors import OperatorError
from populora_trainer.population.catalogue import OPERATORS, Operator, Parameter
from populora_trainer.population.factors import Factors
from populora_trainer.population.operators import crossovers, mutations

__all__ = ["FUNCTIONS", "OPERATORS", "Operator", "Parameter", "breed", "find"]

FUNCTIONS: dict[str, Callable[..., Factors]] = {
    operator.id: getattr(mutations if operator.arity == 1 else crossovers, operator.name)
    for operator in OPERATORS.values()
}
"""By id: `(parent, generator, **parameters)` or `(parent1, parent2, generator, **parameters)` to the child."""


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
    return FUNCTIONS[id](*parents, generator, **parameters)


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
