"""Canonical literals: the only form in which values enter, leave and are compared by the verifier.

Values are None, bool, int, finite float and complex, str, bytes, and list, tuple, dict, set of such, each of exactly
that type: a subclass is refused, because its methods are the program's. Four types of `collections` have the literal
of what they are made of: Counter, defaultdict and OrderedDict that of a dict, which they equal, and deque that of a
list. frozenset has no literal and is refused.

Two values are equal for the verifier when their canonical texts are equal. That is Python's `==` made type-strict:
`1`, `1.0` and `True` differ, while the order of a dict, the order of a set and the sign of a zero make no difference.

Inputs keep the order of dicts and the sign of zeros (`as_written`), since a program can see both.
"""

import ast
import functools
import re
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable

MAX_DEPTH = 50
DEFAULT_MAX_CHARS = 4096

# Bound here, before any program runs: patching `builtins` later does not reach these.
_type, _repr, _len, _sorted = type, repr, len, sorted
_bool, _int, _float, _complex, _str, _bytes = bool, int, float, complex, str, bytes
_list, _tuple, _set, _dict = list, tuple, set, dict
_dict_items, _dict_length, _set_elements, _set_in_order = dict.items, dict.__len__, set.__iter__, frozenset.__iter__
_FORMS: dict[type, type] = {
    list: list,
    tuple: tuple,
    set: set,
    dict: dict,
    Counter: dict,
    defaultdict: dict,
    OrderedDict: dict,
    deque: list,
}
_get_name: Callable[[type], str] = type.__dict__["__name__"].__get__

_SCALAR = r"(?:0|-?[1-9][0-9]{0,18}|True|False|None|'[ !#-&(-\[\]-~]*')"
_PLAIN = re.compile(rf"{_SCALAR}|\[(?:{_SCALAR}(?:, {_SCALAR})*)?\]")

# A model may write '\d'; that is a valid literal, and the compiler's warning about it helps nobody here.
for _category in (SyntaxWarning, DeprecationWarning):
    warnings.filterwarnings("ignore", module=r"<literal>", category=_category)


class NotLiteral(ValueError):  # noqa: N818 - a finding about a value, not a failure of the verifier
    """A text is not a literal, or a value has no literal."""


class TooLarge(ValueError):  # noqa: N818
    """A literal has more characters than allowed; it is never cut."""


def canonical(value: object, max_chars: int = DEFAULT_MAX_CHARS, *, as_written: bool = False) -> str:
    """Return the canonical literal text of a value; it never calls a method of the value's own class.

    Args:
        value: any object; shared and cyclic containers are fine, cycles and anything deeper than 50 are refused.
        max_chars: longest text allowed, in characters.
        as_written: keep the order of dict items and the sign of zeros, which equality ignores.

    Raises:
        NotLiteral: a part of the value is of another type, not finite, cyclic or nested too deeply.
        TooLarge: the text would be longer than `max_chars`.
    """
    text = _write(value, 0, [0], max_chars, as_written)
    if _len(text) > max_chars:
        raise TooLarge(f"longer than {max_chars} characters")
    return text


def canonical_arguments(arguments: tuple[object, ...], max_chars: int = DEFAULT_MAX_CHARS) -> str:
    """Return an argument list as text without the outer parentheses, e.g. `3, [1, 2]`; as written, see `canonical`.

    Raises:
        NotLiteral, TooLarge: as `canonical`.
    """
    text = ", ".join([canonical(argument, max_chars, as_written=True) for argument in arguments])
    if len(text) > max_chars:
        raise TooLarge(f"longer than {max_chars} characters")
    return text


def parse_literal(text: str, max_chars: int = DEFAULT_MAX_CHARS) -> object:
    """Return the value of a literal text; nothing is executed.

    Surrounding white space is ignored. `1, 2` is the tuple `(1, 2)`, and `set()` the empty set, as in
    `ast.literal_eval`.

    Raises:
        NotLiteral: the text is anything else: a call, a name, a comprehension, an f-string, `inf`, ...
        TooLarge: the text is longer than `max_chars`.
    """
    return _evaluate(_parse(text.strip(), max_chars), 0)


def parse_arguments(text: str, max_chars: int = DEFAULT_MAX_CHARS) -> tuple[object, ...]:
    """Return the values of a positional argument list, e.g. of `3, [1, 2]`; blank text is no argument at all.

    The text may have several lines, comments and a last comma, as between the parentheses of a call. Keyword arguments
    and `*unpacking` are not literals and are refused.

    Raises:
        NotLiteral, TooLarge: as `parse_literal`.
    """
    # Text that closes the bracket itself, such as `1], [2`, makes something else than one list.
    node = _parse(f"[\n{text.strip()}\n]", max_chars + 4)
    if not isinstance(node, ast.List):
        raise NotLiteral("not a list of arguments")
    return tuple([_evaluate(element, 0) for element in node.elts])


@functools.lru_cache(maxsize=256)  # the second run of a program usually says the same as the first
def is_canonical(text: str, max_chars: int = DEFAULT_MAX_CHARS) -> bool:
    """Say whether `text` is exactly what `canonical` returns for some value; for texts from untrusted processes."""
    if _len(text) <= max_chars and _PLAIN.fullmatch(text):
        return True
    try:
        return canonical(parse_literal(text, max_chars), max_chars) == text
    except (NotLiteral, TooLarge):
        return False


def _write(value: object, depth: int, spent: list[int], max_chars: int, as_written: bool) -> str:
    kind = _type(value)
    if value is None or kind is _bool:
        text = _repr(value)
    elif kind is _int:
        if value.bit_length() > 4 * max_chars:  # type: ignore[attr-defined]
            raise TooLarge(f"an int of more than {max_chars} digits")
        try:
            text = _repr(value)
        except ValueError as error:  # above the interpreter's own limit of digits
            raise TooLarge(str(error)) from None
    elif kind is _float or kind is _complex:
        if value - value != 0:  # type: ignore[operator]
            raise NotLiteral("a number that is not finite has no literal")
        if kind is _complex or not as_written:
            value = value + (0.0 if kind is _float else 0j)  # type: ignore[operator]
        text = _repr(value)
    elif kind is _str or kind is _bytes:
        if _len(value) > max_chars:  # type: ignore[arg-type]
            raise TooLarge(f"longer than {max_chars} characters")
        text = _repr(value)
    elif kind in _FORMS:
        return _write_container(value, _FORMS[kind], depth, spent, max_chars, as_written)  # type: ignore[arg-type]
    else:
        raise NotLiteral(f"a value of type {_name(kind)} has no literal")
    spent[0] += _len(text)
    if spent[0] > max_chars:
        raise TooLarge(f"longer than {max_chars} characters")
    return text


def _write_container(
    value: list[object] | tuple[object, ...] | set[object] | dict[object, object] | deque[object],
    form: type,
    depth: int,
    spent: list[int],
    max_chars: int,
    as_written: bool,
) -> str:
    if depth >= MAX_DEPTH:
        raise NotLiteral(f"nested deeper than {MAX_DEPTH}")
    spent[0] += 2
    # Both by the type's own methods: those of a class written in Python can be a program's.
    length = _dict_length(value) if form is _dict else _len(value)  # type: ignore[arg-type]
    if 3 * length > max_chars:  # n elements take n characters, 2 (n - 1) of separators and 2 brackets at least
        raise TooLarge(f"longer than {max_chars} characters")
    if form is _dict:
        items = [
            (
                _write(key, depth + 1, spent, max_chars, as_written),
                _write(item, depth + 1, spent, max_chars, as_written),
            )
            for key, item in _dict_items(value)  # type: ignore[arg-type]
        ]
        if not as_written:
            items = _sorted(items)
        return "{" + ", ".join([f"{key}: {item}" for key, item in items]) + "}"
    elements: Iterable[object] = _set_elements(value) if form is _set else value  # type: ignore[arg-type]
    parts = [_write(element, depth + 1, spent, max_chars, as_written) for element in elements]
    if form is _list:
        return "[" + ", ".join(parts) + "]"
    if form is _set:
        return "{" + ", ".join(_sorted(parts)) + "}" if parts else "set()"
    return "(" + ", ".join(parts) + (",)" if _len(parts) == 1 else ")")


def pack(argument_lists: list[tuple[object, ...]]) -> tuple[bool, object]:
    """Return argument lists in a form that `marshal` keeps as it is.

    Marshalling sorts a set, and the order in which a set was built can be seen in the order of its elements. So where
    there is one, every container becomes a tuple of its type and its elements, those of a set in the order of their
    canonical text.
    """
    if _holds_set(argument_lists):
        return True, _packed(argument_lists)
    return False, argument_lists


def unpack(packed: object) -> list[tuple[object, ...]]:
    """Return what was packed as True; equal parts of it are no more the same object than they were."""
    return _unpacked(packed)  # type: ignore[return-value]


def _holds_set(value: object) -> bool:
    if isinstance(value, dict):
        return any(_holds_set(key) or _holds_set(item) for key, item in value.items())
    return isinstance(value, set) or (isinstance(value, list | tuple) and any(map(_holds_set, value)))


def _packed(value: object) -> object:
    match value:
        case list() | tuple():
            return (type(value).__name__, [_packed(element) for element in value])
        case set():
            elements = sorted(value, key=lambda element: canonical(element, 1 << 30, as_written=True))
            return ("set", [_packed(element) for element in elements])
        case dict():
            return ("dict", [(_packed(key), _packed(item)) for key, item in value.items()])
    return value


def _unpacked(value: object) -> object:
    if not isinstance(value, tuple):
        return value
    form, parts = value
    if form == "dict":
        return {_unpacked(key): _unpacked(item) for key, item in parts}
    elements = [_unpacked(part) for part in parts]
    if form == "set":
        if len(elements) <= 2:
            return set(elements)
        # As the compiler builds one from a text, which shows in the order: by way of a constant that it makes twice.
        made: set[object] = set()
        made.update(frozenset(_set_in_order(frozenset(elements))))
        return made
    return tuple(elements) if form == "tuple" else elements


def _name(kind: type) -> str:
    # A metaclass can override __name__; type's own descriptor cannot be overridden.
    return _get_name(kind)[:80]


def _parse(text: str, max_chars: int) -> ast.expr:
    if len(text) > max_chars:
        raise TooLarge(f"longer than {max_chars} characters")
    try:
        tree = compile(text, "<literal>", "eval", ast.PyCF_ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise NotLiteral(f"not a literal: {getattr(error, 'msg', None) or type(error).__name__}") from None
    assert isinstance(tree, ast.Expression)
    return tree.body


def _evaluate(node: ast.expr, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise NotLiteral(f"nested deeper than {MAX_DEPTH}")
    match node:
        case ast.Constant(value=value) if value is not Ellipsis:
            if isinstance(value, float | complex) and value - value != 0:
                raise NotLiteral("a number that is not finite has no literal")
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float() | complex() as number)):
            if isinstance(number, bool) or number - number != 0:
                raise NotLiteral("not a literal: a sign belongs to a finite number")
            return -number if isinstance(node.op, ast.USub) else number
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=ast.Constant(value=complex() as imaginary)):
            real = _evaluate(left, depth + 1)
            if not isinstance(real, int | float) or isinstance(real, bool):
                raise NotLiteral("not a literal: an operator outside a complex number")
            return _finite(real, imaginary if isinstance(node.op, ast.Add) else -imaginary)
        case ast.List(elts=elements):
            return [_evaluate(element, depth + 1) for element in elements]
        case ast.Tuple(elts=elements):
            return tuple([_evaluate(element, depth + 1) for element in elements])
        case ast.Call(func=ast.Name(id="set"), args=[], keywords=[]):
            return set()
        case ast.Set(elts=elements):
            return _hashed(lambda: {_evaluate(element, depth + 1) for element in elements})
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            pairs = [
                (_evaluate(key, depth + 1), _evaluate(item, depth + 1))
                for key, item in zip(keys, values, strict=True)
                if key is not None
            ]
            return _hashed(lambda: dict(pairs))
    raise NotLiteral(f"not a literal: {type(node).__name__}")


def _finite(real: int | float, imaginary: complex) -> complex:
    try:
        value = real + imaginary
    except OverflowError:
        value = complex("inf")
    if value - value != 0:
        raise NotLiteral("a number that is not finite has no literal")
    return value


def _hashed(build: Callable[[], object]) -> object:
    try:
        return build()
    except TypeError as error:
        raise NotLiteral(f"not a literal: {error}") from None
