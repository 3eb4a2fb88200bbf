"""Time of every operator at the shapes of Qwen2.5-7B, beside the same operator of populora 0.4.5 in the same run.

    python benchmarks/operators.py [--layers 28] [--repeats 5] [--threads 1] [--json FILE]

28 layers x q, k, v, o; hidden 3584, key-value 512, rank 32: 112 slots, 20.2 M parameters an adapter, float32. Parents
descend from one shared A with B trained away from zero, as members do; the last columns have independent A's, where
crossovers stack both parents and truncate (populora averages the factors there, which is a different delta). populora
writes into tensors that exist, ours returns new ones; both are timed as their users call them, checks included. Each
figure is the best of the repeats, in milliseconds of the process's CPU time (wall time on a busy machine measures its
neighbours), repeats of the two libraries taken in turn. A new adapter is new memory, 81 MB to be
zeroed by the kernel (40 huge pages in place of 18,500 small ones), which populora does not need as it overwrites a
member. With MALLOC_TRIM_THRESHOLD_=4294967296 and
MALLOC_MMAP_THRESHOLD_=33554432 in the environment the allocator keeps freed children, as a long run does.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from populora import operators as peer

from populora_trainer.population.child_report import report
from populora_trainer.population.factors import Factors, Pair
from populora_trainer.population.operators import OPERATORS, breed

HIDDEN, KEY_VALUE, RANK = 3584, 512, 32
MODULES = {"q_proj": HIDDEN, "k_proj": KEY_VALUE, "v_proj": KEY_VALUE, "o_proj": HIDDEN}

Peer = Callable[[SimpleNamespace], None]


def peer_mutation(function: Callable[..., None]) -> Peer:
    return lambda population: function(population, torch.tensor([0]))


def peer_crossover(function: Callable[..., None]) -> Peer:
    return lambda population: function(population, torch.tensor([[0, 1]]), torch.tensor([2]))


PEERS: dict[str, Peer] = {
    "M1": peer_mutation(peer.mutation_svd_structured),
    "M2": peer_mutation(peer.mutation_layer_selective_gaussian),
    "M3": peer_mutation(peer.mutation_component_masking),
    "M4": peer_mutation(peer.mutation_full_gaussian),
    "M5": peer_mutation(peer.mutation_neftune_style),
    "X1": peer_crossover(peer.crossover_dare),
    "X2": peer_crossover(peer.crossover_layer_wise),
    "X3": peer_crossover(peer.crossover_svd_subspace),
    "X4": peer_crossover(peer.crossover_extrapolative),
    "X5": peer_crossover(peer.crossover_average),
    "C2": peer_crossover(peer.crossover_clone),
}


def parents(layers: int, drift: float) -> tuple[Factors, Factors]:
    """Two parents whose A's differ from the shared one by `drift` of its size each; 1.0 gives independent A's."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    first: Factors = {}
    second: Factors = {}
    for layer in range(layers):
        for name, out in MODULES.items():
            path = f"model.layers.{layer}.self_attn.{name}"
            shared = rand(RANK, HIDDEN) / (3 * HIDDEN) ** 0.5
            for adapter in (first, second):
                noise = rand(RANK, HIDDEN) / (3 * HIDDEN) ** 0.5
                A = noise if drift == 1.0 else shared + drift * noise
                adapter[path] = Pair(A, rand(out, RANK) * 1e-3)
    return first, second


def population_of(first: Factors, second: Factors) -> SimpleNamespace:
    """populora's storage of the same two adapters and a third slot for the child."""
    down, up = {}, {}
    for path, pair in first.items():
        other = second[path]
        down[path] = torch.nn.Parameter(torch.stack([pair.A.T, other.A.T, other.A.T]), requires_grad=False)
        up[path] = torch.nn.Parameter(torch.stack([pair.B, other.B, other.B]), requires_grad=False)
    return SimpleNamespace(device=torch.device("cpu"), weight_down=down, weight_up=up)


def child_of(id: str, parents: tuple[Factors, ...]) -> Factors:
    return breed(id, parents, torch.Generator().manual_seed(0))


def milliseconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return (time.process_time() - start) * 1e3


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    near, far = parents(options.layers, 0.01), parents(options.layers, 1.0)
    population = population_of(*near)
    print(f"{options.layers} layers, {options.threads} thread(s), load average {load:.1f} before the run")
    print(f"{'':4}{'ms':>8}{'populora':>10}{'ratio':>7}{'independent A':>15}{'cosine':>8}{'norm':>7}", flush=True)
    rows = []
    for id, operator in OPERATORS.items():
        contestants: list[Callable[[], object]] = [partial(child_of, id, near[: operator.arity])]
        if id in PEERS:
            contestants.append(partial(PEERS[id], population))
        if operator.arity == 2:
            contestants.append(partial(child_of, id, far))
        best = [float("inf")] * len(contestants)
        for repeat in range(options.repeats + 1):
            for index, contestant in enumerate(contestants):
                spent = milliseconds(contestant)
                if repeat:  # the first round warms up
                    best[index] = min(best[index], spent)
        theirs = best[1] if id in PEERS else None
        seen = report(near[: operator.arity], child_of(id, near[: operator.arity])).parents[0]
        row = {
            "ms": best[0],
            "populora_ms": theirs,
            "ratio": best[0] / theirs if theirs else None,
            "independent_A_ms": best[-1] if operator.arity == 2 else None,
            "cosine_to_first_parent": seen.cosine,
            "norm_ratio": seen.norm_ratio,
        }
        rows.append({"id": id, **row})
        cells = (
            f"{id:4}",
            _cell(row["ms"], 8, 0),
            _cell(row["populora_ms"], 10, 0),
            _cell(row["ratio"], 7, 2),
            _cell(row["independent_A_ms"], 15, 0),
            _cell(row["cosine_to_first_parent"], 8, 3),
            _cell(row["norm_ratio"], 7, 2),
        )
        print("".join(cells), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"layers": options.layers, "load": load, "operators": rows}, indent=2))


if __name__ == "__main__":
    main()
