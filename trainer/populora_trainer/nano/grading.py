"""Grades the base's own answers while it is trained, in this process and only for the grammar's harmless subset.

Text that uses anything outside the subset is not run at all and counts as wrong. Runs of a population are judged by
the sandboxed verifier instead, never by this module.
"""

import ast
from collections.abc import Callable

from populora_trainer.nano.programs import MAX_LOOP
from populora_trainer.tasks.compact import argument_list, is_program
from populora_trainer.tasks.problem import Problem

_NODES = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.For, ast.While),
    *(ast.If, ast.Expr, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Constant, ast.Subscript),
    *(ast.Name, ast.List, ast.Tuple, ast.Slice, ast.ListComp, ast.comprehension, ast.expr_context, ast.boolop),
    *(ast.operator, ast.unaryop, ast.cmpop, ast.Attribute, ast.IfExp, ast.Load, ast.Store),
)
_CALLS = {"len": len, "sum": sum, "max": max, "min": min, "abs": abs, "sorted": sorted, "str": str, "list": list}
_METHODS = {"append", "count", "join", "upper", "lower", "replace", "index"}
_BUDGET = 400  # loop turns of one call


class _OverBudgetError(RuntimeError):
    """A program loops or grows beyond what grading follows."""


def harmless_function(source: str) -> Callable[..., object] | None:
    """Compile `f` if the source stays inside the subset, with loops and sizes bounded; else None."""
    if not is_program(source):
        return None
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, _NODES) or isinstance(node, ast.Pow | ast.LShift):
            return None
        if isinstance(node, ast.Attribute) and node.attr not in _METHODS:
            return None
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            return None
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Mult):
            node.op = ast.MatMult()
    if len(tree.body) != 1:
        return None
    budget = [0]

    def spend(turns: int) -> None:
        budget[0] += turns
        if budget[0] > _BUDGET:
            raise _OverBudgetError

    def tick(*_: object) -> bool:
        spend(1)
        return True

    def bounded_range(*bounds: int) -> list[int]:
        numbers = range(*bounds)
        if len(numbers) > MAX_LOOP:
            raise _OverBudgetError
        return list(numbers)

    tree = ast.fix_missing_locations(_Bounded().visit(tree))
    namespace: dict[str, object] = {"__builtins__": {}, **_CALLS, "range": bounded_range, "_tick": tick, "_mul": _times, "_add": _plus}
    try:
        exec(compile(tree, "<answer>", "exec"), namespace)  # noqa: S102 - only the whitelisted subset gets here
    except (SyntaxError, ValueError, TypeError, NameError, RecursionError):
        return None
    function = namespace["f"]

    def run(*values: object) -> object:
        budget[0] = 0
        return function(*values)  # type: ignore[operator]

    return run


class _Bounded(ast.NodeTransformer):
    """Counts loop turns and routes sums and products through functions that check the size of the result."""

    def visit_While(self, node: ast.While) -> ast.AST:  # noqa: N802
        self.generic_visit(node)
        node.test = ast.BoolOp(ast.And(), [_call("_tick"), node.test])
        return node

    def visit_For(self, node: ast.For) -> ast.AST:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(_call("_tick")))
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.op, ast.MatMult):
            return _call("_mul", node.left, node.right)
        return _call("_add", node.left, node.right) if isinstance(node.op, ast.Add) else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:  # noqa: N802
        self.generic_visit(node)
        name = {ast.MatMult: "_mul", ast.Add: "_add"}.get(type(node.op))
        if name is None or not isinstance(node.target, ast.Name):
            return node
        return ast.Assign([node.target], _call(name, ast.Name(node.target.id, ast.Load()), node.value))


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _plus(left: object, right: object) -> object:
    _check(left, right)
    return left + right  # type: ignore[operator]


def _times(left: object, right: object) -> object:
    _check(left, right)
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int) and not isinstance(other, int) and one > MAX_LOOP:
            raise _OverBudgetError
    return left * right  # type: ignore[operator]


def _check(*values: object) -> None:
    for value in values:
        if isinstance(value, list | str) and len(value) > 1000 or isinstance(value, int) and abs(value) > 10**12:
            raise _OverBudgetError


def run_text(function: Callable[..., object], arguments: str) -> str | None:
    """`repr(f(*arguments))`, or None where the arguments are no literals or the call fails."""
    try:
        values = ast.literal_eval(f"({arguments},)")
        return repr(function(*values))
    except (Exception, RecursionError):  # noqa: BLE001 - any failure of an answer means the same: no value
        return None


def is_correct(problem: Problem, answer: str | None) -> bool:
    """Whether a parsed answer solves a held-out problem; code_f on every input, hidden ones included."""
    if answer is None:
        return False
    if problem.task == "code_o":
        return answer == problem.outputs[0]
    function = harmless_function(problem.program if problem.task == "code_i" else answer)
    if function is None:
        return False
    if problem.task == "code_i":
        return run_text(function, answer) == problem.outputs[0]
    return all(
        run_text(function, arguments) == output
        for arguments, output in zip(problem.inputs, problem.outputs, strict=True)
    )


def is_valid_proposal(problem: Problem | None) -> bool:
    """Whether a parsed proposal runs on its inputs inside the subset."""
    if problem is None:
        return False
    function = harmless_function(problem.program)
    return function is not None and all(run_text(function, text) is not None for text in problem.inputs)


__all__ = ["argument_list", "harmless_function", "is_correct", "is_valid_proposal", "run_text"]
