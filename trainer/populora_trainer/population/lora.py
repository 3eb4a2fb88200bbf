"""The population as a batch dimension: the adapters of all members, stacked, inside one frozen base model.

Per target module with weight W (out, in) the stacks are A (member, rank, in) and B (member, out, rank). A row of the
batch belongs to one member m and sees

    y = x W^T + bias + (alpha / rank) (x A_m^T) B_m^T,

so one forward and one backward serve every member. Each run of consecutive rows of one member is a matrix product of
its own, on that member's factors only: neither a value nor a gradient of one member reaches another, not even NaN.
Sort the rows by member, or the runs become many.

Measured on 2 cores against one product over all members' factors with a mask (which lets NaN leak), against a product
per row over gathered factors and against one batched product of equal runs: benchmarks/rollout.py and
benchmarks/update.py report what this form costs over a single adapter.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from populora_trainer.errors import AdapterTargetError, PopuloraError, UnfitBaseError
from populora_trainer.population.factors import Factors, Pair
from populora_trainer.randomness import tensor_generator


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start` to `stop` of a batch, all of one member."""

    member: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Route:
    """Which member each row of a batch belongs to. No segments at all means the base model alone."""

    rows: int
    segments: tuple[Segment, ...]


class _Routing:
    """Where the wrapped layers of one population look up the open route and the shape of what the model computes."""

    def __init__(self) -> None:
        self.route: Route | None = None
        self.tokens: int | None = None

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Note the tokens per row that the model's body is called with, before it computes."""
        given = kwargs.get("input_ids", args[0] if args else None)
        inputs = given if given is not None else kwargs.get("inputs_embeds")
        if not isinstance(inputs, Tensor):
            return
        rows, self.tokens = inputs.shape[:2]
        if self.route is not None and self.route.segments and rows != self.route.rows:
            raise RuntimeError(f"the model got a batch of {rows} rows; the route is for {self.route.rows}")


class LoraLinear(nn.Module):
    """A frozen linear layer plus the low-rank updates of every member.

    Attributes:
        base_layer: the wrapped layer, weight (out, in), or (in, out) of a `Conv1D`.
        lora_A: fp32 masters (member, rank, in).
        lora_B: fp32 masters (member, out, rank).
        path: of the layer in the model.
    """

    def __init__(
        self, base_layer: nn.Linear | Conv1D, A: Tensor, B: Tensor, scale: float, routing: _Routing, path: str
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Parameter(A)
        self.lora_B = nn.Parameter(B)
        self.scale = scale
        self.out_features, self.in_features = matrix_of(base_layer).shape
        self.path = path
        self._routing = routing

    @property
    def weight(self) -> Tensor:
        """The frozen weight as the base holds it; some architectures look at its dtype."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias."""
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (row, token, in) to (row, token, out), each row by its own member.

        Some architectures flatten rows and tokens, (row * token, in), or put an axis of heads between them.

        Raises:
            RuntimeError: outside of `LoraPopulation.route` or `base_only`.
            AdapterTargetError: the input's shape does not say which row a vector belongs to.
        """
        route = self._routing.route
        if route is None:
            raise RuntimeError("an adapted model was called outside of LoraPopulation.route() and base_only()")
        if not route.segments:
            unadapted: Tensor = self.base_layer(x)
            return unadapted
        if x.ndim == 3 and x.shape[0] == route.rows:
            return self._mixed(x, route)
        by_rows = x.ndim > 3 and x.shape[0] == route.rows
        flattened = x.ndim > 1 and self._routing.tokens is not None and len(x) == route.rows * self._routing.tokens
        if not by_rows and not flattened:
            raise AdapterTargetError(
                f"adapter.targetModules: {self.path} can't have an adapter for each member: for a batch of "
                f"{route.rows} rows of {self._routing.tokens} tokens its inputs have the shape {tuple(x.shape)}, "
                f"which does not tell the rows apart; leave {self.path.rpartition('.')[2]} out"
            )
        return self._mixed(x.reshape(route.rows, -1, self.in_features), route).view(*x.shape[:-1], self.out_features)

    def _mixed(self, x: Tensor, route: Route) -> Tensor:
        mixed: Tensor = _MixedLinear.apply(
            x, matrix_of(self.base_layer), self.bias, self.lora_A, self.lora_B, self.scale, route.segments
        )
        return mixed


def matrix_of(layer: nn.Linear | Conv1D) -> Tensor:
    """Return a layer's weight as (out, in); `Conv1D`, as GPT-2 has it, holds it as (in, out)."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


class _MixedLinear(torch.autograd.Function):
    """y = x W^T + bias, plus scale (x A_m^T) B_m^T on the rows of each segment; W and bias are frozen.

    The low-rank products run in the activations' dtype on accelerators and in fp32 on CPUs, where small bf16 products
    cost several times as much as fp32 ones (oneDNN repacks both operands on every call).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        A: Tensor,
        B: Tensor,
        scale: float,
        segments: tuple[Segment, ...],
    ) -> Tensor:
        y = nn.functional.linear(x, weight, bias)
        dtype = torch.float32 if x.device.type == "cpu" else x.dtype
        A_work, B_work, x_work = A.to(dtype), B.to(dtype), x.to(dtype)
        hidden = x_work.new_empty(*x.shape[:2], A.shape[1])  # (row, token, rank)
        for segment in segments:
            rows = slice(segment.start, segment.stop)
            torch.matmul(x_work[rows], A_work[segment.member].T, out=hidden[rows])
            _add_product(y[rows], hidden[rows], B_work[segment.member].T, scale)
        ctx.save_for_backward(x, weight, A, B, hidden)
        ctx.scale, ctx.segments = scale, segments  # type: ignore[attr-defined]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, A, B, hidden = ctx.saved_tensors  # type: ignore[attr-defined]
        scale, segments = ctx.scale, ctx.segments  # type: ignore[attr-defined]
        grad_y = grad_y.contiguous()
        grad_x = grad_y @ weight if ctx.needs_input_grad[0] else None  # type: ignore[attr-defined]
        grad_A, grad_B = torch.zeros_like(A), torch.zeros_like(B)
        A_work, B_work = A.to(hidden.dtype), B.to(hidden.dtype)
        x_work, grad_work = x.to(hidden.dtype), grad_y.to(hidden.dtype)
        for segment in segments:
            rows, member = slice(segment.start, segment.stop), segment.member
            grad_rows = grad_work[rows].flatten(0, 1)  # (row * token, out)
            grad_hidden = grad_rows @ B_work[member]  # (row * token, rank)
            grad_B[member].add_(grad_rows.T @ hidden[rows].flatten(0, 1), alpha=scale)
            grad_A[member].add_(grad_hidden.T @ x_work[rows].flatten(0, 1), alpha=scale)
            if grad_x is not None:
                _add_product(
                    grad_x[rows], grad_hidden.view(segment.stop - segment.start, -1, A.shape[1]), A_work[member], scale
                )
        return grad_x, None, None, grad_A, grad_B, None, None


def _add_product(target: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Add scale * left @ right to `target` (row, token, out) in place, in one call where the dtypes agree."""
    if target.dtype == left.dtype:
        target.view(-1, target.shape[-1]).addmm_(left.flatten(0, 1), right, alpha=scale)
    else:
        target.add_(left @ right, alpha=scale)


class LoraPopulation:
    """The stacked adapters of all members around one frozen causal language model.

    All members start from one A, drawn from `seed` as PEFT draws it (uniform in +-1/sqrt(in)), and B = 0: their mean
    factors are then the factors of their mean update.

    Args:
        model: a transformers causal language model; its target layers are replaced in place and its weights frozen.
        members: number of adapters.
        rank, alpha: of every adapter; the update is scaled by alpha / rank.
        target_modules: last parts of the names of the layers to adapt, as PEFT takes them, or "all-linear" for every
            linear layer but the output head.
        seed: of the shared A.

    Raises:
        AdapterTargetError: a target names no linear layer, or names the output head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        members: int,
        rank: int,
        alpha: float,
        target_modules: Sequence[str] | str,
        seed: int,
    ) -> None:
        self.model = model
        self.members = members
        self.rank = rank
        self.alpha = alpha
        self._routing = _Routing()
        self._layers: dict[str, LoraLinear] = {}
        model.requires_grad_(False)
        for module in (model, body_of(model)):  # some models call a part of their body, and the update the body alone
            module.register_forward_pre_hook(self._routing.enter, with_kwargs=True)
        for path in _target_paths(model, target_modules):
            parent, _, name = path.rpartition(".")
            linear = model.get_submodule(path)
            assert isinstance(linear, nn.Linear | Conv1D)
            self._layers[path] = self._adapt(linear, path, seed)
            setattr(model.get_submodule(parent), name, self._layers[path])

    def _adapt(self, linear: nn.Linear | Conv1D, path: str, seed: int) -> LoraLinear:
        out_features, in_features = matrix_of(linear).shape
        bound = in_features**-0.5
        generator = tensor_generator(seed, "lora_A", path)
        A = torch.empty(self.rank, in_features).uniform_(-bound, bound, generator=generator)
        device = linear.weight.device
        return LoraLinear(
            linear,
            A.expand(self.members, -1, -1).clone().to(device),
            torch.zeros(self.members, out_features, self.rank, device=device),
            self.alpha / self.rank,
            self._routing,
            path,
        )

    @property
    def device(self) -> torch.device:
        """Where the stacks live."""
        return next(iter(self._layers.values())).lora_A.device

    def named_stacks(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Yield (module path, A (member, rank, in), B (member, out, rank)) in the model's order."""
        for path, layer in self._layers.items():
            yield path, layer.lora_A, layer.lora_B

    def parameters(self) -> list[nn.Parameter]:
        """Return every stack, A before B per module, in the model's order."""
        return [stack for _, A, B in self.named_stacks() for stack in (A, B)]

    def factors(self, member: int) -> Factors:
        """Return a copy of one member's factors."""
        return {
            path: Pair(A[member].detach().clone(), B[member].detach().clone()) for path, A, B in self.named_stacks()
        }

    def set_factors(self, member: int, factors: Factors) -> None:
        """Write one member's factors; any float dtype and device is taken.

        Raises:
            PopuloraError: the modules or the shapes are not the population's; nothing is written then.
        """
        if factors.keys() != self._layers.keys():
            odd = sorted(factors.keys() ^ self._layers.keys())[0]
            raise PopuloraError(f"factors for member {member} differ from the population in module {odd}")
        for path, A, B in self.named_stacks():
            if factors[path].A.shape != A.shape[1:] or factors[path].B.shape != B.shape[1:]:
                raise PopuloraError(
                    f"factors for member {member}, module {path}: A {tuple(factors[path].A.shape)} and "
                    f"B {tuple(factors[path].B.shape)}; they must be {tuple(A.shape[1:])} and {tuple(B.shape[1:])}"
                )
        with torch.no_grad():
            for path, A, B in self.named_stacks():
                A[member].copy_(factors[path].A)
                B[member].copy_(factors[path].B)

    def route(self, member_of_row: Sequence[int]) -> AbstractContextManager[None]:
        """Let every forward of the model apply the adapter of `member_of_row[i]` to row i.

        Raises:
            IndexError: a number that is no member's.
        """
        if not member_of_row or min(member_of_row) < 0 or max(member_of_row) >= self.members:
            raise IndexError(
                f"member_of_row is {list(member_of_row)}; allowed are 0 to {self.members - 1}, at least one"
            )
        segments, start = [], 0
        for member, run in groupby(member_of_row):
            stop = start + sum(1 for _ in run)
            segments.append(Segment(member, start, stop))
            start = stop
        return self._open(Route(start, tuple(segments)))

    def base_only(self) -> AbstractContextManager[None]:
        """Let every forward of the model leave the adapters out."""
        return self._open(Route(0, ()))

    @contextmanager
    def _open(self, route: Route | None, tokens: int | None = None) -> Iterator[None]:
        routing = self._routing
        outer = routing.route, routing.tokens
        routing.route, routing.tokens = route, tokens
        try:
            yield
        finally:
            routing.route, routing.tokens = outer

    def checkpoint_activations(self) -> None:
        """Recompute each layer's activations in the backward pass instead of keeping them.

        The route that is open during a forward is opened again for its recomputation, whatever is open by then.
        """
        self.model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": self._recompute_contexts})

    def _recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._open(self._routing.route, self._routing.tokens)


def body_of(model: PreTrainedModel) -> nn.Module:
    """Return what computes the hidden states of a causal language model: all of it but the output head.

    Raises:
        UnfitBaseError: the architecture keeps no such part.
    """
    body = model.base_model  # the model itself where its class names a part that it does not have, as Llama 4 does
    body = getattr(model, "model", None) if body is model else body
    if not isinstance(body, nn.Module):
        raise UnfitBaseError(f"baseModel.uri: {type(model).__name__} has no part that computes its hidden states alone")
    return body


def _target_paths(model: PreTrainedModel, target_modules: Sequence[str] | str) -> list[str]:
    """Return the paths of the layers to adapt, in the model's order."""
    head = model.get_output_embeddings()
    linear = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    if target_modules == "all-linear":
        paths = [path for path, module in linear.items() if module is not head]
        if not paths:
            raise AdapterTargetError("adapter.targetModules: all-linear names no linear layer; the base has none")
        return paths
    targets = (target_modules,) if isinstance(target_modules, str) else tuple(target_modules)
    matches = {target: [path for path in linear if f".{path}".endswith(f".{target}")] for target in targets}
    for target, paths in matches.items():
        if not paths:
            names = sorted({path.rpartition(".")[2] for path, module in linear.items() if module is not head})
            raise AdapterTargetError(
                f"adapter.targetModules: {target} is no linear layer of the base; it has {', '.join(names)}"
            )
        if any(linear[path] is head for path in paths):
            raise AdapterTargetError(
                f"adapter.targetModules: {target} is the output head, which serving engines do not adapt"
            )
    chosen = {path for paths in matches.values() for path in paths}
    return [path for path in linear if path in chosen]
