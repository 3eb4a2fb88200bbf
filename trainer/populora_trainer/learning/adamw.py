"""AdamW over stacked parameters: every member has a step count, moments and a learning rate of its own."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from populora_trainer.errors import StorageError


class StackedAdamW:
    """AdamW on parameters (member, ...), equal to `torch.optim.AdamW` on each member alone.

        m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
        p = (1 - lr decay) p - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

    A member that takes no part in a step keeps its parameters, moments and step count.

    Args:
        parameters: stacks with one and the same leading size.
        learning_rate: one for all members, or one per member.
        warmup_steps: a member's t-th step runs at learning_rate * min(1, t / warmup_steps).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        learning_rate: float | Sequence[float],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        self.parameters = list(parameters)
        self.members = self.parameters[0].shape[0]
        rates = [learning_rate] * self.members if isinstance(learning_rate, int | float) else list(learning_rate)
        if len(rates) != self.members:
            raise ValueError(f"{len(rates)} learning rates for {self.members} members")
        self.learning_rates = rates
        self.betas, self.eps, self.weight_decay, self.warmup_steps = betas, eps, weight_decay, warmup_steps
        self.steps = [0] * self.members
        self._first = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._second = [torch.zeros_like(parameter) for parameter in self.parameters]

    def rate(self, member: int, step: int) -> float:
        """Return the learning rate of a member's `step`-th step, counted from 1."""
        warmth = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return self.learning_rates[member] * warmth

    @torch.no_grad()
    def step(self, members: Sequence[int]) -> None:
        """Apply the gradients of `members`; the others are not touched."""
        beta1, beta2 = self.betas
        for member in members:
            self.steps[member] += 1
            step = self.steps[member]
            rate = self.rate(member, step)
            parameters = [parameter[member] for parameter in self.parameters]
            gradients = [parameter.grad[member] for parameter in self.parameters if parameter.grad is not None]
            if len(gradients) != len(parameters):
                raise RuntimeError("a stack has no gradient; call step after backward")
            first = [moment[member] for moment in self._first]
            second = [moment[member] for moment in self._second]
            if self.weight_decay:
                torch._foreach_mul_(parameters, 1 - rate * self.weight_decay)
            torch._foreach_lerp_(first, gradients, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
            denominators = torch._foreach_sqrt(second)
            torch._foreach_div_(denominators, (1 - beta2**step) ** 0.5)
            torch._foreach_add_(denominators, self.eps)
            torch._foreach_addcdiv_(parameters, first, denominators, -(rate / (1 - beta1**step)))

    def zero_grad(self) -> None:
        """Forget the gradients of all stacks."""
        for parameter in self.parameters:
            parameter.grad = None

    def reset(self, member: int) -> None:
        """Start a member anew: moments and step count 0, warmup included. For a child in a used slot."""
        self.steps[member] = 0
        for moment in (*self._first, *self._second):
            moment[member].zero_()

    def moments(self) -> list[Tensor]:
        """Return the first moments (member, ...) of all stacks, then the second; not copies."""
        return [*self._first, *self._second]

    def state(self) -> dict[str, Tensor]:
        """Return a copy of everything that a resumed run needs, as CPU tensors by name."""
        tensors = {"steps": torch.tensor(self.steps, dtype=torch.long)}
        for index, (first, second) in enumerate(zip(self._first, self._second, strict=True)):
            tensors[f"first.{index:04d}"] = first.to("cpu", copy=True)
            tensors[f"second.{index:04d}"] = second.to("cpu", copy=True)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned.

        Raises:
            StorageError: a tensor is missing, unknown or of another shape; nothing is loaded then.
        """
        expected = {name: tensor.shape for name, tensor in self.state().items()}
        found = {name: tensor.shape for name, tensor in tensors.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise StorageError(
                    f"optimizer state: {name} has shape {_shape(found.get(name))}; "
                    f"this population needs {_shape(expected.get(name))}"
                )
        self.steps = [int(step) for step in tensors["steps"]]
        for index, (first, second) in enumerate(zip(self._first, self._second, strict=True)):
            first.copy_(tensors[f"first.{index:04d}"])
            second.copy_(tensors[f"second.{index:04d}"])


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))
