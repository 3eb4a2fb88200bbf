"""Dead code of generated programs: statements that cannot change what a program returns, and how to leave them out."""

import ast


def pruned(source: str) -> ast.FunctionDef:
    """The function of a generated program without statements that cannot change what it returns."""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body, _ = _prune(function.body, set())
    return function


def _prune(body: list[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
    """Walk backwards over a block; `needed` are the variables read after it, and the result those read before."""
    kept: list[ast.stmt] = []
    for node in reversed(body):
        match node:
            case ast.Return():
                kept, needed = [node], read_names(node)
                continue
            case ast.Assign(targets=[ast.Name(id=name)]) if name in needed:
                needed = (needed - {name}) | read_names(node.value)
            case ast.AugAssign(target=ast.Name(id=name)) if name in needed:
                needed = needed | read_names(node.value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))) if name in needed:
                needed = needed | read_names(node)
            case ast.If():
                first, before_first = _prune(node.body, needed)
                second, before_second = _prune(node.orelse, needed)
                if not first and not second:
                    continue
                if first:
                    node.body = first
                else:
                    before_first = needed | read_names(*node.body)
                node.orelse = second
                needed = before_first | before_second | read_names(node.test)
            case ast.For() | ast.While():
                inside = _read_in_loop(node, needed)
                live, _ = _prune(node.body, inside)
                if not live:
                    continue
                node.body = live
                needed = inside | read_names(node.iter if isinstance(node, ast.For) else node.test)
            case _:
                continue
        kept.insert(0, node)
    return kept, needed


def _read_in_loop(loop: ast.For | ast.While, needed: set[str]) -> set[str]:
    """Variables that matter at the start of a turn, when `needed` matter after the loop (empty when none changes)."""
    changed = {_target(part) for part in ast.walk(loop)} - {None}
    if not changed & needed:
        return set()
    inside, size = set(needed), -1
    while len(inside) > size:
        size = len(inside)
        for part in ast.walk(loop):
            if _target(part) in inside:
                inside |= read_names(part)
            elif isinstance(part, ast.If | ast.For | ast.While) and any(
                _target(one) in inside for one in ast.walk(part)
            ):
                inside |= read_names(part.iter if isinstance(part, ast.For) else part.test)
    return inside


def _target(node: ast.AST) -> str | None:
    """The variable that a statement changes."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)):
            return name
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name
        case _:
            return None


def read_names(*nodes: ast.AST) -> set[str]:
    """Every name in the given nodes, read or bound."""
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}
