"""Work of known cost, spread evenly."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush


def shares(costs: Sequence[int], count: int) -> list[list[int]]:
    """Return `count` lists of indices into `costs` whose sums are nearly equal; each index is in one of them.

    The dearest goes first, always to who has least: no share costs more than 4/3 of the best possible largest one.
    Equal arguments give equal shares, each in ascending order.

    Source: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969 (LPT).
    """
    lots: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    heapify(loads)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, number = heappop(loads)
        lots[number].append(index)
        heappush(loads, (load + costs[index], number))
    return [sorted(lot) for lot in lots]
