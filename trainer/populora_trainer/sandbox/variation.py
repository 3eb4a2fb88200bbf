"""What differs between the runs of one program, so that a program whose output depends on it is found out.

The first run is made by the interpreter as it is. Every other one is made by an interpreter that `install` has changed
from inside, in a zygote of its own, before any program runs:

| a program sees                                       | in a varied run                                             |
|------------------------------------------------------|-------------------------------------------------------------|
| the order of a set (iteration, `pop`, `fromkeys`)    | a permutation of it; the same one for the same set in a run |
| `hash(x)`, `x.__hash__()`, however it was reached    | a mixed hash, equal for equal values                        |
| an address, in a `repr` or as an `id`                | a mixed address                                             |
| when the garbage collector runs                      | another moment                                              |

This holds for what differs between two interpreters anyway: hashes of strings and bytes, addresses, and whatever hash
is made of those. Sets of numbers, of tuples of numbers and of objects whose `__hash__` is made of numbers keep their
order, since that follows from the program alone.

Permutations and mixed hashes follow from a key, which is drawn for each program from the seed of the training run,
and from the run's number. The order of run 2 is the reverse of run 1's, and its hashes are the complement; the order of
run 3 is run 1's, rotated. So what takes an element by its place in a set, the first of the best ones, or the parity of
a hash, differs for certain. What takes one of two values by any other rule agrees by chance once in 128: the first run
and seven of the eight varied ones are independent of each other.

A run also says whether the program saw anything of this. One that did not would see the same in any further run, so it
gets none.

Python reads sets by their iterator everywhere up to version 3.12. From 3.13 on `list` and its kin read them directly;
`unvaried` says so, and two hash seeds are all that stands against an order that a program sees in that way.
"""

import builtins
import contextlib
import copy
import ctypes
import dataclasses
import gc
import re
import reprlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from itertools import islice

# For run 1, 2, ...: the permutation's family, by how many places it is rotated, whether it is reversed.
PLAN = ((0, 0, False), (0, 0, True), (0, 1, False), *[(family, 0, False) for family in range(1, 6)])
RUNS = 1 + len(PLAN)

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, as in SplitMix64
_SMALL = 256  # elements of a set, beyond which less is done, so that draining one takes no longer than its square
_LOOKED_AT = 64  # elements of a larger set, by which it is judged; they stand anywhere in it
_COLLECTOR_THRESHOLD = 700

# Taken as they are, before `install` and before any program.
_hash, _id, _type, _map, _all = hash, id, type, map, all
_iterate_set, _iterate_frozenset = set.__iter__, frozenset.__iter__
_set_length, _frozenset_length = set.__len__, frozenset.__len__
_pop, _discard, _iterate_tuple = set.pop, set.discard, tuple.__iter__
_fromkeys = dict.__dict__["fromkeys"]
_PLAIN = frozenset({int, bool})
_OF_NUMBERS = (int, float, complex, range, Decimal)
_OF_PARTS = (tuple, frozenset)
_HASHES_OF_NUMBERS = tuple([kind.__hash__ for kind in _OF_NUMBERS])
_HASHES_OF_PARTS = tuple([kind.__hash__ for kind in _OF_PARTS])

_ADDRESS = re.compile(" at 0x([0-9a-f]+)")

_number = 0  # 0 before any run
_key = 0
_seen = False  # the program saw something that varies
_unsettled = False  # a hash that was just made varies


def begin(number: int, key: int) -> None:
    """Start varied run `number` of a program, from 1; what varies follows from the 64-bit `key` and the number."""
    global _number, _key, _seen
    _number, _key, _seen = number, key, False
    gc.set_threshold(_COLLECTOR_THRESHOLD // 2 + _mix(number) % _COLLECTOR_THRESHOLD)


def seen() -> bool:
    """Whether the program of this run saw anything that would be different in another varied run."""
    return _seen


def _mix(value: int, salt: int = 0) -> int:
    """Return 64 bits that follow from a value, the key and a salt."""
    return _finalized(value & _MASK ^ _finalized(_key + salt * _ODD & _MASK))


def _finalized(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _mixed(native: int) -> int:
    """Return 64 bits, in a reversed run the complement of those in the run before it."""
    family, rotated, reverse = PLAN[_number - 1]
    return _mix(native, 2 * family + rotated) ^ (_MASK if reverse else 0)


def _mixed_hash(native: int) -> int:
    mixed = _mixed(native) - (1 << 63)
    return mixed if mixed != -1 else -2


def _mixed_address(native: int) -> int:
    return 1 << 47 | _mixed(native) >> 17


def _is_settled(value: object) -> bool:
    """Whether a value's hash follows from the value alone.

    A class's own `__hash__` is made of others, which have been asked for by then and have set `_unsettled`.
    """
    kind = _type(value)
    if kind in _PLAIN:
        return True
    method = kind.__hash__
    if method in _HASHES_OF_NUMBERS:
        return value == value  # the hash of what is not a number is its address
    if method in _HASHES_OF_PARTS:
        parts = _iterate_tuple(value) if isinstance(value, tuple) else _iterate_frozenset(value)  # type: ignore[arg-type]
        return _all(_map(_is_settled, parts))
    return _type(method) is types.FunctionType


def _hash_and_whether_settled(value: object) -> tuple[int, bool]:
    global _unsettled
    before, _unsettled = _unsettled, False
    try:
        native = _hash(value)
        return native, not _unsettled and _is_settled(value)
    finally:
        _unsettled |= before


def varied_hash(value: object, /) -> int:
    """Take the place of `hash`.

    Raises:
        TypeError: the value is unhashable.
    """
    global _seen, _unsettled
    native, settled = _hash_and_whether_settled(value)
    if settled or not _number:
        return native
    _seen = _unsettled = True
    return _mixed_hash(native)


def varied_id(value: object, /) -> int:
    """Take the place of `id`, for programs that get hold of it."""
    global _seen
    if not _number:
        return _id(value)
    _seen = True
    return _mixed_address(_id(value))


def _arrange(elements: list[object]) -> list[object]:
    """Return the elements of a set in this run's order."""
    first = _type(elements[0])
    if (first is str or first is bytes) and _all([_type(element) is first for element in elements]):
        elements.sort()  # whatever the hash seed
    else:
        elements.sort(key=_id)  # as they were made, more or less, wherever the heap lies
    size = len(elements)
    family, rotated, reverse = PLAN[_number - 1]
    state = _mix(size, family)
    if size <= _SMALL:
        for index in range(size - 1, 0, -1):
            state = (state * 6364136223846793005 + 1442695040888963407) & _MASK
            other = (state >> 33) % (index + 1)
            elements[index], elements[other] = elements[other], elements[index]
    else:
        rotated += state % size
    elements = elements[rotated:] + elements[:rotated]
    return elements[::-1] if reverse else elements


def _walk(elements: list[object], owner: set[object]) -> Iterator[object]:
    """Iterate as a set's own iterator does, which finds out when the set has changed."""
    size = len(elements)
    for element in elements:
        if _set_length(owner) != size:
            raise RuntimeError("Set changed size during iteration")
        yield element
    if _set_length(owner) != size:
        raise RuntimeError("Set changed size during iteration")


def _has_settled_order(size: int, elements: Iterator[object]) -> bool:
    """Whether a set's own order is that of every run; note where the program is about to see another."""
    global _seen
    if not _number or size < 2:
        return True
    looked_at = list(islice(elements, size if size <= _SMALL else _LOOKED_AT))
    if _PLAIN.issuperset(_map(_type, looked_at)):
        return True
    for element in looked_at:
        if isinstance(element, tuple) and _PLAIN.issuperset(_map(_type, _iterate_tuple(element))):
            continue
        if not _hash_and_whether_settled(element)[1]:
            _seen = True
            return False
    return True


def _set_iter(self: set[object], /) -> Iterator[object]:
    if _has_settled_order(_set_length(self), _iterate_set(self)):
        return _iterate_set(self)
    return _walk(_arrange(list(_iterate_set(self))), self)


def _frozenset_iter(self: frozenset[object], /) -> Iterator[object]:
    if _has_settled_order(_frozenset_length(self), _iterate_frozenset(self)):
        return _iterate_frozenset(self)
    return iter(_arrange(list(_iterate_frozenset(self))))


def _set_pop(self: set[object], /) -> object:
    size = _set_length(self)
    if _has_settled_order(size, _iterate_set(self)) or size > _SMALL:
        return _pop(self)
    element = _arrange(list(_iterate_set(self)))[0]
    _discard(self, element)
    return element


def _dict_fromkeys(cls: type, iterable: object, value: object = None, /) -> object:
    keys = list(iterable) if isinstance(iterable, set | frozenset) else iterable
    return _fromkeys.__get__(None, cls)(keys, value)


def _varied_address(match: re.Match[str]) -> str:
    return f" at {_mixed_address(int(match[1], 16)):#x}"


def _varied_repr(native: Callable[[object], str]) -> Callable[[object], str]:
    def varied(self: object, /) -> str:
        global _seen
        text, found = _ADDRESS.subn(_varied_address, native(self)) if _number else (native(self), 0)
        _seen |= found > 0
        return text

    return varied


async def _coroutine() -> None: ...


def _types_with_an_address() -> list[type]:
    """Return the types whose own `repr` tells an address; those without one of their own have that of `object`."""
    coroutine = _coroutine()
    coroutine.close()
    return [
        object,
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodWrapperType,
        types.GeneratorType,
        type(coroutine),
        types.CodeType,
        types.CellType,
        memoryview,
    ]


# Places in CPython's structures, in bytes, without debugging and with the global lock (Include/cpython/object.h,
# Include/cpython/descrobject.h). `_flags` makes sure of the first before it writes.
_FLAGS_OF_TYPE = 168
_IMMUTABLE = 1 << 8
_BASE_OF_WRAPPER, _FUNCTION_OF_WRAPPER = 40, 48
_NAME_OF_BASE, _CALL_OF_BASE = 0, 24
_KEPT: list[object] = []  # what the interpreter has a pointer to


def _flags(kind: type) -> ctypes.c_ulong:
    flags = ctypes.c_ulong.from_address(_id(kind) + _FLAGS_OF_TYPE)
    if flags.value != kind.__flags__:
        raise OSError("this interpreter's types are laid out in another way")
    return flags


@contextlib.contextmanager
def _mutable(kind: type) -> Iterator[None]:
    flags = _flags(kind)
    before = flags.value
    flags.value = before & ~_IMMUTABLE
    try:
        yield
    finally:
        flags.value |= before & _IMMUTABLE


def _vary_slot_wrappers() -> None:
    """Change what calling `x.__hash__` does, for all types at once: they share one entry in a table of the interpreter.

    The types' own functions stay, so that sets and dicts go on as before.
    """
    wrapper = object.__dict__["__hash__"]
    base = ctypes.c_void_p.from_address(_id(wrapper) + _BASE_OF_WRAPPER).value or 0
    name = ctypes.c_void_p.from_address(base + _NAME_OF_BASE).value or 0
    if sys.version_info >= (3, 13) or ctypes.string_at(name, 9) != b"__hash__\0":
        raise OSError("this interpreter's slot wrappers are laid out in another way")
    of_numbers = {
        ctypes.c_void_p.from_address(_id(kind.__dict__["__hash__"]) + _FUNCTION_OF_WRAPPER).value
        for kind in (*_OF_NUMBERS, *_OF_PARTS)
    }
    native_type = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, ctypes.py_object)

    def call(self: object, arguments: object, function: int) -> int:
        global _seen, _unsettled
        native: int = native_type(function)(self)
        if not _number or (function in of_numbers and _is_settled(self)):
            return native
        _seen = _unsettled = True
        return _mixed_hash(native)

    # An error in it reaches the program as a SystemError.
    callback = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_void_p)(call)
    _KEPT.append(callback)
    ctypes.c_void_p.from_address(base + _CALL_OF_BASE).value = ctypes.cast(callback, ctypes.c_void_p).value


def install() -> None:
    """Change this process's interpreter for good; call it after every import and before any program.

    Raises:
        OSError: this interpreter cannot be changed in this way.
    """
    changed: tuple[tuple[type, dict[str, object]], ...] = (
        (set, {"__iter__": _set_iter, "pop": _set_pop}),
        (frozenset, {"__iter__": _frozenset_iter}),
        (dict, {"fromkeys": classmethod(_dict_fromkeys)}),
    )
    for kind, changes in changed:
        with _mutable(kind):
            for name, change in changes.items():
                setattr(kind, name, change)
    for kind in _types_with_an_address():
        with _mutable(kind):
            type.__setattr__(kind, "__repr__", _varied_repr(vars(kind)["__repr__"]))
    _vary_slot_wrappers()
    builtins.hash = varied_hash
    builtins.id = varied_id
    for module in (copy, reprlib, dataclasses):  # they remember by `id` what they have met, and tell nobody
        vars(module)["id"] = _id


def unvaried() -> str | None:
    """Try what a varied run must vary; return what it does not, or None."""
    begin(1, 1)
    words: set[str] = {"a", "b", "c", "d"}
    first = "".join(_arrange(list(words)))  # type: ignore[arg-type]
    ways: dict[str, Callable[[], Iterable[str]]] = {
        "a loop over a set": lambda: iter(words),
        "a list of a set": lambda: list(words),
        "a tuple of a set": lambda: tuple(words),
        "a starred set": lambda: [*words],
        "a joined set": lambda: "".join(words),
        "a sorted set": lambda: sorted(words, key=len),
        "the keys of a set": lambda: dict.fromkeys(words),
        "an extended list": lambda: list[str]().__iadd__(words),
        "arguments of a set": lambda: (lambda *given: given)(*words),  # type: ignore[arg-type]
    }
    lacking = [way for way, take in ways.items() if "".join(iter(take())) != first]
    begin(0, 0)
    gc.set_threshold(_COLLECTOR_THRESHOLD)
    return f"{' and '.join(lacking)} cannot be varied in this interpreter" if lacking else None
