"""How complex a program is, by the four static measures that the paper follows over training."""

import ast
from dataclasses import dataclass

from populora_trainer.tasks.parsing import parse_source


@dataclass(frozen=True, slots=True)
class Complexity:
    """Static measures of one program, helpers and classes included.

    Attributes:
        ast_depth: edges on the longest path from the module down to a leaf of Python's own tree, contexts such as Load
            included. The paper gives no definition but an example, 5 for `return number * 3` in a function: Module,
            FunctionDef, Return, BinOp, Name, Load. (Nodes without contexts are 5 there as well; the two readings differ
            by one where no name is deepest.)
        cyclomatic: McCabe's number for the program as one graph: 1 + its decision points. A decision point is each
            `if`, `elif`, conditional expression, loop, loop `else`, `except`, try `else`, `assert`, each `and`/`or`
            beyond the first operand, each comprehension's `for` and `if`, each match case but a catch-all. For one
            function without inner functions this is radon's number (mccabe's ignores operators and expressions).
        loc: logical lines: those of the program as Python prints its syntax tree, so spacing, comments, docstrings
            and blank lines do not count and `a = 1; b = 2` counts twice.
        variables: different names that the program binds to values: arguments, assignments, loop, `with`, `except`
            and match targets. Names of functions, classes and modules are not variables.
    """

    ast_depth: int
    cyclomatic: int
    loc: int
    variables: int


def measure(program: str) -> Complexity | None:
    """Return the measures of a program, or None where the text is not Python."""
    tree = parse_source(program)
    return None if tree is None else measure_tree(tree)


def measure_tree(tree: ast.Module) -> Complexity | None:
    """Return the measures of a syntax tree, whose docstrings are taken out on the way; None where it is too deep."""
    nodes = list(ast.walk(tree))
    for node in nodes:
        _drop_docstring(node)
    try:
        text = ast.unparse(tree)
    except (ValueError, RecursionError):
        return None
    return Complexity(
        ast_depth=_depth(tree),
        cyclomatic=1 + sum(map(_decisions, nodes)),
        loc=sum(1 for line in text.splitlines() if line.strip()),
        variables=len(set().union(*map(_bound, nodes))),
    )


def _drop_docstring(node: ast.AST) -> None:
    if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and len(node.body) > 1:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            del node.body[0]


def _depth(tree: ast.Module) -> int:
    deepest, level = 0, list(ast.iter_child_nodes(tree))
    while level:
        deepest += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return deepest


def _decisions(node: ast.AST) -> int:
    match node:
        case ast.If() | ast.IfExp() | ast.Assert():
            return 1
        case ast.For() | ast.AsyncFor() | ast.While():
            return 1 + bool(node.orelse)
        case ast.Try() | ast.TryStar():
            return len(node.handlers) + bool(node.orelse)
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.comprehension():
            return 1 + len(node.ifs)
        case ast.Match():
            return sum(not _catches_all(case) for case in node.cases)
    return 0


def _catches_all(case: ast.match_case) -> bool:
    return isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None and case.guard is None


def _bound(node: ast.AST) -> set[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return {name}
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return {name}
        case ast.MatchMapping(rest=str(name)):
            return {name}
    return set()
