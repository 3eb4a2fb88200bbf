"""Programs that are kept for evaluation, known again whatever their variables are called."""

import ast
import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from populora_trainer.tasks.parsing import parse_source


@dataclass(frozen=True, slots=True)
class HeldOutPrograms:
    """A set of programs that no training may see; `program in held_out` ignores layout and the names of variables.

    Attributes:
        digests: `normalised_hash` of each.
    """

    digests: frozenset[str] = frozenset()

    @classmethod
    def of(cls, programs: Iterable[str]) -> Self:
        """Return the set of these programs."""
        return cls(frozenset(map(normalised_hash, programs)))

    def __contains__(self, program: object) -> bool:
        """Tell whether a program is one of them, up to a renaming of its variables."""
        return bool(self.digests) and isinstance(program, str) and normalised_hash(program) in self.digests


NOTHING_HELD_OUT = HeldOutPrograms()


@functools.lru_cache(maxsize=4096)
def normalised_hash(source: str) -> str:
    """Digest of a program up to layout, comments and the names of its variables.

    Two programs share it where one becomes the other by renaming arguments and local variables one to one, so holding
    one out holds out both. Names of functions, docstrings and the order of statements count. Text without a syntax tree
    has a digest of its own, and so has a tree too deep to be walked.
    """
    tree = parse_source(source)
    try:
        normal = source if tree is None else _without_names(tree)
    except RecursionError:
        normal = source
    return hashlib.sha256(normal.encode(errors="surrogatepass")).hexdigest()[:16]


def _without_names(tree: ast.Module) -> str:
    names = {name: f"v{index}" for index, name in enumerate(_binding_order(tree))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
        elif isinstance(node, ast.arg):
            node.arg = names[node.arg]
    return ast.dump(tree)


def _binding_order(tree: ast.Module) -> list[str]:
    """Names bound in the program, arguments first, then by position in the source."""
    arguments = [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    stores.sort(key=lambda node: (node.lineno, node.col_offset))
    return list(dict.fromkeys([*arguments, *(node.id for node in stores)]))
