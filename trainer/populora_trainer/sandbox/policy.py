"""What a program may name. This keeps programs deterministic and readable; isolation, not this list, keeps them in.

Imports: only modules whose results follow from their arguments. No clock, no randomness, no interpreter internals, no
files, no network, no dynamic import. `datetime`, `time`, `random`, `sys`, `os`, `types` and all others are refused.

Names: `open`, `eval`, `exec`, `compile`, `input`, `globals`, `locals`, `id`, `breakpoint`, `help`, `exit`, `quit`,
unless the program binds the name itself (a parameter called `input` is fine). Attributes: those that lead from a value
to the interpreter (`__globals__`, `__subclasses__`, frames, code objects, `__reduce__`, ...). Defining and calling
ordinary special methods (`__init__`, `__eq__`, `__len__`, ...) is allowed.
"""

import ast
import re
from typing import NamedTuple

from populora_trainer.sandbox.verdicts import Verdict

ALLOWED_MODULES = frozenset(
    {
        "__future__", "abc", "array", "base64", "binascii", "bisect", "cmath", "collections", "collections.abc",
        "contextlib", "copy", "dataclasses", "decimal", "difflib", "enum", "fractions", "functools", "heapq",
        "itertools", "json", "math", "numbers", "operator", "queue", "re", "statistics", "string", "struct", "textwrap",
        "typing", "unicodedata", "zlib",
    }
)  # fmt: skip

FORBIDDEN_NAMES = frozenset(
    {
        "open", "eval", "exec", "compile", "input", "globals", "locals", "id", "breakpoint", "help", "exit", "quit",
        "copyright", "credits", "license", "__import__", "__builtins__", "__loader__", "__spec__", "__build_class__",
        "__file__",
    }
)  # fmt: skip

FORBIDDEN_ATTRIBUTES = frozenset(
    {
        "__subclasses__", "__globals__", "__builtins__", "__code__", "__closure__", "__func__", "__self__", "__bases__",
        "__base__", "__mro__", "mro", "__getattribute__", "__import__", "__loader__", "__spec__", "__reduce__",
        "__reduce_ex__", "__traceback__", "__file__", "__path__", "__cached__", "gi_frame", "gi_code", "gi_yieldfrom",
        "cr_frame", "cr_code", "cr_await", "cr_origin", "ag_frame", "ag_code", "ag_await", "tb_frame", "tb_next",
        "tb_lasti", "f_back", "f_builtins", "f_code", "f_globals", "f_locals", "f_trace", "f_lasti", "with_traceback",
    }
)  # fmt: skip

# Everything the checks below can object to contains one of these, so that most programs need no syntax tree.
_SUSPECT = re.compile(
    "import|mro|with_traceback|__(?!(?:init|len|eq|repr|str|name|call|iter|next|getitem|add|lt|hash|contains)__)|"
    r"\b(?:gi|cr|ag|tb|f)_|\b(?:"
    + "|".join(sorted(name for name in FORBIDDEN_NAMES if not name.startswith("_")))
    + r")\b"
)


class Finding(NamedTuple):
    """Why a program is refused."""

    verdict: Verdict
    detail: str


def is_plain(program: str) -> bool:
    """Say whether a search of the text alone shows that `check` would find nothing; most programs are plain.

    Identifiers are normalised by the parser (full-width letters become plain ones), so only ASCII text can be searched
    as it stands.
    """
    return program.isascii() and not _SUSPECT.search(program)


def check(program: str) -> Finding | None:
    """Return the first thing in a program that policy forbids, or None.

    Raises:
        SyntaxError, ValueError, MemoryError, RecursionError: the program cannot be parsed.
    """
    tree = ast.parse(program)
    nodes = list(ast.walk(tree))
    bound = {name for node in nodes for name in _bindings(node)}
    for node in nodes:
        finding = _check_node(node, bound)
        if finding:
            return finding
    return None


def _check_node(node: ast.AST, bound: set[str]) -> Finding | None:
    match node:
        case ast.Import(names=aliases):
            for alias in aliases:
                if alias.name not in ALLOWED_MODULES:
                    return Finding(Verdict.FORBIDDEN_IMPORT, f"line {node.lineno}: import of {alias.name}")
        case ast.ImportFrom(module=module, level=level):
            if level or module not in ALLOWED_MODULES:
                return Finding(Verdict.FORBIDDEN_IMPORT, f"line {node.lineno}: import from {'.' * level}{module or ''}")
            for alias in node.names:
                if alias.name in FORBIDDEN_ATTRIBUTES:
                    return Finding(Verdict.FORBIDDEN_NAME, f"line {node.lineno}: name {alias.name}")
        case ast.Name(id=name):
            if name in FORBIDDEN_NAMES and (name not in bound or name.startswith("__")):
                return Finding(Verdict.FORBIDDEN_NAME, f"line {node.lineno}: name {name}")
        case ast.Attribute(attr=name):
            if name in FORBIDDEN_ATTRIBUTES:
                return Finding(Verdict.FORBIDDEN_NAME, f"line {node.lineno}: attribute {name}")
    return None


def _bindings(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name.partition(".")[0] for alias in aliases]
    return []
