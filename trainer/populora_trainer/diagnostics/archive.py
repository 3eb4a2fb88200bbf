"""A CVT archive of the programs proposed in a run: how much of the space of programs the teachers have covered.

Centroidal Voronoi tessellation (Vassiliades et al., CVT-MAP-Elites, 2017): 4,096 cells over a bounded space of
descriptors; each cell keeps its hardest problem that somebody solved. The cells follow from a constant seed alone, so
they are not stored, and the coverage of different runs is comparable.
"""

import ast
import functools
import json
import math
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from populora_trainer.diagnostics.complexity import measure_tree
from populora_trainer.errors import StorageError
from populora_trainer.randomness import draw
from populora_trainer.tasks.parsing import parse_source

CELLS = 4096
DESCRIPTOR = ("ast_depth", "cyclomatic", "loc", "variables", "iteration", "arithmetic")
_FORMAT = 2
_OTHER_CELLS = 1  # the format whose cells follow from another measure of depth
_SAMPLES_PER_CELL = 8
_LLOYD_ITERATIONS = 8
_TESSELLATION_SEED = 0
_FLOOR = {"ast_depth": 4, "cyclomatic": 1, "loc": 2, "variables": 1}  # the identity program
_CEILING = {"ast_depth": 17, "cyclomatic": 16, "loc": 48, "variables": 16}

_ITERATIONS = (ast.For, ast.While, ast.AsyncFor, ast.comprehension)
_ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.AugAssign, ast.Compare, ast.BoolOp)
_ACCESSES = (ast.Call, ast.Subscript, ast.Attribute)


def descriptor(program: str) -> NDArray[np.float64] | None:
    """Return where a program lies in the unit cube, or None where the text is not Python.

    Six axes. The four measures of `complexity.Complexity` on logarithmic scales, 0 at the identity program and 1 at a
    depth of 17, a cyclomatic number of 16, 48 lines, 16 variables and beyond. Then two of the mix: the share of loops
    and comprehensions among all statements and comprehensions, doubled, and the share of operators among operators,
    calls, subscripts and attributes (a half where there are none).

    Returns:
        Shape (6,), in the order of `DESCRIPTOR`.
    """
    tree = parse_source(program)
    complexity = None if tree is None else measure_tree(tree)
    if tree is None or complexity is None:
        return None
    scaled = [_log_scale(name, value) for name, value in asdict(complexity).items()]
    nodes = list(ast.walk(tree))
    loops = sum(isinstance(node, _ITERATIONS) for node in nodes)
    statements = sum(isinstance(node, ast.stmt | ast.comprehension) for node in nodes)
    operators = sum(isinstance(node, _ARITHMETIC) for node in nodes)
    accesses = sum(isinstance(node, _ACCESSES) for node in nodes)
    iteration = min(1.0, 2.0 * loops / statements) if statements else 0.0
    arithmetic = operators / (operators + accesses) if operators + accesses else 0.5
    return np.array([*scaled, iteration, arithmetic])


def _log_scale(name: str, value: int) -> float:
    low, high = math.log(_FLOOR[name]), math.log(_CEILING[name])
    return min(1.0, max(0.0, (math.log(max(value, 1)) - low) / (high - low)))


@functools.cache
def centroids(cells: int = CELLS) -> NDArray[np.float64]:
    """Return the cells' centres, shape (cells, 6), by Lloyd's iterations over uniform samples of the unit cube."""
    generator = np.random.Generator(np.random.PCG64(draw(_TESSELLATION_SEED, "cvt", cells)))
    samples = generator.random((cells * _SAMPLES_PER_CELL, len(DESCRIPTOR)))
    centres = samples[:cells].copy()
    for _ in range(_LLOYD_ITERATIONS):
        _, owner = cKDTree(centres).query(samples)
        counts = np.bincount(owner, minlength=cells)
        filled = counts > 0
        for axis in range(len(DESCRIPTOR)):
            sums = np.bincount(owner, weights=samples[:, axis], minlength=cells)
            centres[filled, axis] = sums[filled] / counts[filled]
    centres.flags.writeable = False
    return centres


@functools.cache
def _tree(cells: int) -> cKDTree:
    return cKDTree(centroids(cells))


@dataclass(frozen=True, slots=True)
class Elite:
    """The problem that holds a cell.

    Attributes:
        program: source of `f`.
        solve_rate: in [0, 1], when it was proposed.
        author: the teacher's name.
        step: when it was proposed.
    """

    program: str
    solve_rate: float
    author: str
    step: int

    @property
    def quality(self) -> float:
        """1 - rho where somebody solved it, and -1 for what nobody solved: it may be no more than noise."""
        return 1.0 - self.solve_rate if self.solve_rate > 0 else -1.0


class Archive:
    """The elites of the occupied cells. Any valid program occupies its cell, solved or not."""

    def __init__(self, cells: int = CELLS) -> None:
        self.cells = cells
        self._elites: dict[int, Elite] = {}

    def insert(self, program: str, *, solve_rate: float, author: str, step: int) -> bool:
        """Offer a valid problem's program; return True where it takes its cell. Equal quality leaves the older one.

        Raises:
            ValueError: the solve rate is not in [0, 1].
        """
        if not 0.0 <= solve_rate <= 1.0:
            raise ValueError(f"a solve rate lies in [0, 1], not {solve_rate!r}")
        point = descriptor(program)
        if point is None:
            return False
        cell = int(_tree(self.cells).query(point)[1])
        elite = Elite(program, solve_rate, author, step)
        holder = self._elites.get(cell)
        if holder is not None and holder.quality >= elite.quality:
            return False
        self._elites[cell] = elite
        return True

    @property
    def coverage(self) -> float:
        """Share of cells occupied, in [0, 1]."""
        return len(self._elites) / self.cells

    def elites(self) -> dict[int, Elite]:
        """Return the occupied cells in order of their number."""
        return dict(sorted(self._elites.items()))

    def to_bytes(self) -> bytes:
        """Return the archive as JSON lines; equal archives give equal bytes."""
        lines: list[object] = [{"format": _FORMAT, "cells": self.cells}]
        lines += [[cell, e.program, e.solve_rate, e.author, e.step] for cell, e in self.elites().items()]
        return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes) -> "Archive":
        """Return the archive that `to_bytes` wrote; programs of an older format are put into their cells anew.

        Raises:
            StorageError: the bytes are not such an archive.
        """
        try:
            header, *rows = [json.loads(line) for line in data.decode("ascii").splitlines()]
            if header["format"] not in (_OTHER_CELLS, _FORMAT):
                raise ValueError(f"format {header['format']!r}, this version reads {_FORMAT}")
            archive = cls(int(header["cells"]))
            for cell, program, solve_rate, author, step in rows:
                if header["format"] == _OTHER_CELLS:
                    archive.insert(program, solve_rate=solve_rate, author=author, step=step)
                    continue
                if not 0 <= cell < archive.cells or cell in archive._elites or not 0.0 <= solve_rate <= 1.0:
                    raise ValueError(f"cell {cell!r}")
                archive._elites[cell] = Elite(program, solve_rate, author, step)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StorageError(f"the stored archive is damaged ({error})") from error
        return archive
