"""What differs between the runs of one program, so that a program whose output depends on it is found out.

The first run is made by the interpreter as it is. Every other one is made by an interpreter that `install` has changed
from inside, in a zygote of its own, before any program runs:

| a program sees                                       | in a varied run                                             |
|------------------------------------------------------|-------------------------------------------------------------|
| the order of a set (iteration, `pop`, `fromkeys`)    | a permutation of it; the same one for the same set in a run |
| `hash(x)`, `x.__hash__()`, however it was reached    | a mixed hash, equal for equal values                        |
| an address, in a `repr`, as an `id`, or of an array  | a mixed address                                             |
| when the garbage collector runs                      | another moment                                              |

This holds for what differs between two interpreters anyway: hashes of strings and bytes, addresses, and whatever hash
is made of those. Sets of numbers, of tuples of numbers and of objects whose `__hash__` is made of numbers keep their
order, since that follows from the program alone.

Permutations and mixed hashes follow from a key, which is drawn for each program from the seed of the training run,
and from the run's number. The order of run 2 is the reverse of run 1's, and its hashes are the complement; the order of
run 3 is run 1's, rotated. So what takes an element by its place in a set, the first of the best ones, or the parity of
a hash, differs for certain. What takes one of two values by any other rule agrees by chance once in 128: the first run
and seven of the eight varied ones are independent of each other.
A set of more than 256 elements is rotated, not shuffled.

A run also says whether the program saw anything of this. One that did not would see the same in any further run, so it
gets none.

Python reads sets by their iterator everywhere up to version 3.12. From 3.13 on `list` and its kin read them directly;
`unvaried` says so, and two hash seeds are all that stands against an order that a program sees in that way.
"""

import _thread
import array
import builtins
import contextlib
import ctypes
import dataclasses
import functools
import gc
import operator
import re
import reprlib
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar, Token
from decimal import Decimal
from itertools import chain

# For run 1, 2, ...: the permutation's family, by how many places it is rotated, whether it is reversed.
PLAN = ((0, 0, False), (0, 0, True), (0, 1, False), *[(family, 0, False) for family in range(1, 6)])
RUNS = 1 + len(PLAN)

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, as in SplitMix64
_SMALL = 256  # elements of a set, beyond which it is rotated and not shuffled
_COLLECTOR_THRESHOLD = 700

# Taken as they are, before `install` and before any program.
_hash, _id, _type, _map, _all, _filter = hash, id, type, map, all, filter
_iterate_set, _iterate_frozenset = set.__iter__, frozenset.__iter__
_set_length, _frozenset_length = set.__len__, frozenset.__len__
_pop, _discard, _iterate_tuple = set.pop, set.discard, tuple.__iter__
_set_contains, _difference = set.__contains__, set.difference
_fromkeys = dict.__dict__["fromkeys"]
_buffer_info = array.array.buffer_info
_PLAIN = frozenset({int, bool})
_OF_TEXT = (str, bytes)
_TEXTS = tuple([frozenset({kind}) for kind in _OF_TEXT])
_OF_NUMBERS = (int, float, complex, range, Decimal)
_HASHES_OF_NUMBERS = tuple([kind.__hash__ for kind in _OF_NUMBERS])
_HASH_OF_TUPLE, _HASH_OF_FROZENSET = tuple.__hash__, frozenset.__hash__

_ADDRESS = re.compile(" at 0x([0-9a-f]+)")

_number = 0  # 0 before any run
_key = 0
_salt = 0  # what hashes and addresses are mixed with in this run
_reversal = 0  # a mask
_seen = False  # the program saw something that varies
_unsettled = False  # a hash that was just made varies
_permutations: dict[int, list[int]] = {}  # of this run, by size
_sorted: list[object] = []  # the texts of a large set that was looked at last
_sorted_of = 0  # which set they were of, by its address, where the last thing done to it was `pop`


def begin(number: int, key: int) -> None:
    """Start varied run `number` of a program, from 1; what varies follows from the 64-bit `key` and the number."""
    global _number, _key, _seen, _salt, _reversal
    _number, _key, _seen = number, key, False
    family, rotated, reverse = PLAN[number - 1]
    _salt, _reversal = _salted(2 * family + rotated), _MASK if reverse else 0
    _permutations.clear()
    gc.set_threshold(_COLLECTOR_THRESHOLD // 2 + _mix(number) % _COLLECTOR_THRESHOLD)


def _end() -> None:
    global _number, _seen, _unsettled, _sorted, _sorted_of
    _number, _seen, _unsettled, _sorted, _sorted_of = 0, False, False, [], 0


def seen() -> bool:
    """Whether the program of this run saw anything that would be different in another varied run."""
    return _seen


def _salted(salt: int) -> int:
    return _finalized(_key + salt * _ODD & _MASK)


def _mix(value: int, salt: int = 0) -> int:
    """Return 64 bits that follow from a value, the key and a salt."""
    return _finalized(value & _MASK ^ _salted(salt))


def _finalized(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _mixed(native: int) -> int:
    """Return 64 bits, in a reversed run the complement of those in the run before it."""
    return _finalized(native & _MASK ^ _salt) ^ _reversal


def _mixed_hash(native: int) -> int:
    mixed = _mixed(native) - (1 << 63)
    return mixed if mixed != -1 else -2


def _mixed_address(native: int) -> int:
    return 1 << 47 | _mixed(native) >> 17


def _are_settled(values: list[object]) -> bool:
    """Whether the hashes of all values follow from the values alone.

    It looks at tuples and frozensets level by level, since they may be nested more deeply than functions may be.
    """
    global _unsettled
    hashed_in_python: list[object] = []
    while values:
        kinds = frozenset(_map(_type, values))
        parts: list[object] = []
        if not kinds <= _PLAIN:
            for kind in _iterate_frozenset(kinds):
                if kind in _PLAIN:
                    continue
                method: object = kind.__hash__
                if method is _HASH_OF_TUPLE:
                    parts += chain.from_iterable(_map(_iterate_tuple, _of_kind(values, kind, kinds)))  # type: ignore[arg-type]
                elif method is _HASH_OF_FROZENSET:
                    parts += chain.from_iterable(_map(_iterate_frozenset, _of_kind(values, kind, kinds)))  # type: ignore[arg-type]
                elif method in _HASHES_OF_NUMBERS:
                    numbers = _of_kind(values, kind, kinds)
                    if not _all(_map(operator.eq, numbers, numbers)):
                        return False  # the hash of what is not a number is its address
                elif _type(method) is types.WrapperDescriptorType:
                    return False
                else:
                    hashed_in_python += _of_kind(values, kind, kinds)
        # The same part may be in many others.
        values = list(dict(zip(_map(_id, parts), parts, strict=True)).values())
    if not hashed_in_python or not _seen:
        return True  # what a class's own `__hash__` is made of has been asked for by then, and nothing of it varied
    before, _unsettled = _unsettled, False
    try:
        for value in hashed_in_python:
            _hash(value)
            if _unsettled:
                return False
        return True
    finally:
        _unsettled |= before


def _of_kind(values: list[object], kind: type, kinds: frozenset[type]) -> list[object]:
    return values if len(kinds) == 1 else [value for value in values if _type(value) is kind]


def varied_hash(*arguments: object) -> int:
    """Take the place of `hash`.

    Raises:
        TypeError: the value is unhashable.
    """
    global _seen, _unsettled
    if len(arguments) != 1:
        raise TypeError(f"hash() takes exactly one argument ({len(arguments)} given)")
    (value,) = arguments
    if not _number:
        return _hash(value)
    kind = _type(value)
    if kind in _OF_TEXT:
        if not value:
            return 0
        _seen = _unsettled = True
        return _mixed_hash(_hash(value))
    if kind in _PLAIN:
        return _hash(value)
    before, _unsettled = _unsettled, False
    try:
        native = _hash(value)
        if _type(kind.__hash__) is not types.WrapperDescriptorType:
            return native  # a class's own, which is made of varied ones
        if not _unsettled and _are_settled([value]):
            return native
        _seen = _unsettled = True
        return _mixed_hash(native)
    finally:
        _unsettled |= before


def varied_id(value: object, /) -> int:
    """Take the place of `id`, for programs that get hold of it."""
    global _seen
    if not _number:
        return _id(value)
    _seen = True
    return _mixed_address(_id(value))


def _start(size: int) -> int:
    """Where the order of a large set starts among its elements; the same while it shrinks by less than a half."""
    family, rotated, _ = PLAN[_number - 1]
    bits = size.bit_length() - 1
    return _mix(bits, family) % (1 << bits) + rotated


def _permutation(size: int) -> list[int]:
    """Return the places of a small set's elements in this run's order."""
    known = _permutations.get(size)
    if known is not None:
        return known
    places = list(range(size))
    family, rotated, reverse = PLAN[_number - 1]
    state = _mix(size, family)
    for index in range(size - 1, 0, -1):
        state = (state * 6364136223846793005 + 1442695040888963407) & _MASK
        other = (state >> 33) % (index + 1)
        places[index], places[other] = places[other], places[index]
    places = places[rotated:] + places[:rotated]
    _permutations[size] = places = places[::-1] if reverse else places
    return places


def _first(size: int) -> int:
    """Return the place among its elements of what a set of this size gives first."""
    if size <= _SMALL:
        return _permutation(size)[0]
    return (_start(size) - PLAN[_number - 1][2]) % size


def _in_stable_order(elements: list[object], owner: set[object] | None = None) -> list[object]:
    """Return the elements of a set in an order that depends neither on the hash seed nor on where the heap lies."""
    global _sorted, _sorted_of
    if frozenset(_map(_type, elements)) not in _TEXTS:
        elements.sort(key=_id)  # as they were made, more or less
    elif len(elements) <= _SMALL or owner is None:
        elements.sort()
    else:
        # Most of them have mostly been sorted before, and what is sorted is sorted quickly.
        kept = list(_filter(_set_contains.__get__(owner), _sorted)) if _sorted else []
        if len(kept) < len(elements):
            kept += _iterate_set(_difference(owner, kept))
            kept.sort()
        _sorted, _sorted_of = kept, 0
        return kept
    return elements


def _arrange(elements: list[object], owner: set[object] | None = None) -> list[object]:
    """Return the elements of a set in this run's order."""
    size = len(elements)
    elements = _in_stable_order(elements, owner)
    if size <= _SMALL:
        return [elements[place] for place in _permutation(size)]
    start = _start(size) % size
    elements = elements[start:] + elements[:start]
    return elements[::-1] if PLAN[_number - 1][2] else elements


def _walk(elements: Iterator[object], size: int, owner: set[object]) -> Iterator[object]:
    """Iterate as a set's own iterator does, which finds out when the set has changed."""
    for element in elements:
        if _set_length(owner) != size:
            raise RuntimeError("Set changed size during iteration")
        yield element
    if _set_length(owner) != size:
        raise RuntimeError("Set changed size during iteration")


class _SetIterator(chain[object]):
    """What a set's own iterator looks like to a program."""

    _elements: Iterator[object]

    def __length_hint__(self) -> int:
        return operator.length_hint(self._elements)


_SetIterator.__name__ = _SetIterator.__qualname__ = "set_iterator"
_SetIterator.__module__ = "builtins"


def _set_iterator(elements: list[object], owner: set[object] | None) -> Iterator[object]:
    iterator = iter(elements)
    made = _SetIterator(iterator if owner is None else _walk(iterator, len(elements), owner))
    made._elements = iterator
    return made


def _has_settled_order(elements: list[object]) -> bool:
    """Whether a set's own order is that of every run; note where the program is about to see another."""
    global _seen
    if not _number or len(elements) < 2 or _are_settled(elements):
        return True
    _seen = True
    return False


def _set_iter(self: set[object], /) -> Iterator[object]:
    elements = list(_iterate_set(self))
    if _has_settled_order(elements):
        return _iterate_set(self)
    return _set_iterator(_arrange(elements, self), self)


def _frozenset_iter(self: frozenset[object], /) -> Iterator[object]:
    elements = list(_iterate_frozenset(self))
    if _has_settled_order(elements):
        return _iterate_frozenset(self)
    return _set_iterator(_arrange(elements), None)


def _set_pop(self: set[object], /, *arguments: object) -> object:
    global _sorted_of
    if arguments:
        raise TypeError(f"set.pop() takes no arguments ({len(arguments)} given)")
    size = _set_length(self)
    # Draining a large set: what it is made of is known from the last time.
    if size > _SMALL and _sorted_of == _id(self) and len(_sorted) == size:
        element = _sorted[_first(size)]
        if _set_contains(self, element):
            del _sorted[_first(size)]
            _discard(self, element)
            return element
    elements = list(_iterate_set(self))
    if _has_settled_order(elements):
        return _pop(self)
    place, elements = _first(size), _in_stable_order(elements, self)
    element = elements[place]
    if elements is _sorted:
        del elements[place]
        _sorted_of = _id(self)
    _discard(self, element)
    return element


def _dict_fromkeys(cls: type, iterable: object, value: object = None, /) -> object:
    keys = list(iterable) if isinstance(iterable, set | frozenset) else iterable
    return _fromkeys.__get__(None, cls)(keys, value)


def _varied_buffer_info(self: "array.array[int]", /) -> tuple[int, int]:
    global _seen
    address, size = _buffer_info(self)
    if not _number:
        return address, size
    _seen = True
    return _mixed_address(address), size


def _varied_address(match: re.Match[str]) -> str:
    return f" at {_mixed_address(int(match[1], 16)):#x}"


def _varied_repr(native: Callable[[object], str]) -> Callable[[object], str]:
    def varied(self: object, /) -> str:
        global _seen
        text, found = _ADDRESS.subn(_varied_address, native(self)) if _number else (native(self), 0)
        if found and _id(self) in _disguises:
            return _disguises[_id(self)]
        _seen |= found > 0
        return text

    return varied


_disguises: dict[int, str] = {}  # what those in the place of others look like, by their address


def _disguise(change: object, native: object) -> None:
    _disguises[_id(change)] = repr(native)
    if isinstance(change, types.FunctionType):
        change.__name__ = native.__name__  # type: ignore[attr-defined]
        change.__qualname__ = native.__qualname__  # type: ignore[attr-defined]


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
        types.AsyncGeneratorType,
        type(coroutine),
        types.FrameType,
        weakref.ReferenceType,
        weakref.ProxyType,
        _thread.LockType,
        _thread.RLock,
        ContextVar,
        Token,
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


_told: list[object] = []


class _Guard:
    """Dies when a call ends."""


_SET_ASYNCHRONOUS = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


def _raise_after_this_call(error: BaseException) -> _Guard:
    """Have an error raised where the calling function was called, as soon as it drops what this one returns.

    ctypes drops the errors of functions that C calls. So the interpreter is told to raise one by itself, at its next
    look, which must not come before the function has ended: a weak reference's callback, which runs no bytecode, does
    it when the function's variables are dropped.
    """

    class Carrier(BaseException):  # the interpreter asks a class for its instance
        def __new__(cls) -> BaseException:  # type: ignore[misc]
            return error

    guard = _Guard()
    # The third argument is the weak reference itself, which C does not look at.
    tell = functools.partial(_SET_ASYNCHRONOUS, _thread.get_ident(), Carrier)
    _told[:] = [weakref.ref(guard, tell)]
    return guard


def _vary_slot_wrappers() -> None:
    """Change what calling `x.__hash__` does, for all types at once: they share one entry in a table of the interpreter.

    The types' own functions stay, so that sets and dicts go on as before.
    """
    wrapper = object.__dict__["__hash__"]
    base = ctypes.c_void_p.from_address(_id(wrapper) + _BASE_OF_WRAPPER).value or 0
    name = ctypes.c_void_p.from_address(base + _NAME_OF_BASE).value or 0
    if sys.version_info >= (3, 13) or ctypes.string_at(name, 9) != b"__hash__\0":
        raise OSError("this interpreter's slot wrappers are laid out in another way")
    function_of = {
        kind: ctypes.c_void_p.from_address(_id(kind.__dict__["__hash__"]) + _FUNCTION_OF_WRAPPER).value
        for kind in (*_OF_NUMBERS, *_OF_TEXT, tuple, frozenset)
    }
    of_numbers = {function_of[kind] for kind in _OF_NUMBERS}
    of_text = {function_of[kind] for kind in _OF_TEXT}
    parts_of = {function_of[tuple]: _iterate_tuple, function_of[frozenset]: _iterate_frozenset}
    native_type = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, ctypes.py_object)

    def hashed(self: object, arguments: tuple[object, ...], function: int) -> int:
        global _seen, _unsettled
        if arguments:
            raise TypeError(f"expected 0 arguments, got {len(arguments)}")
        before, _unsettled = _unsettled, False
        try:
            native: int = native_type(function)(self)
            settled = not _unsettled and (
                (function in of_numbers and self == self)
                or (function in parts_of and _are_settled(list(parts_of[function](self))))  # type: ignore[operator]
                or (function in of_text and not native)
            )
            if settled or not _number:
                return native
            _seen = _unsettled = True
            return _mixed_hash(native)
        finally:
            _unsettled |= before

    def call(self: object, arguments: tuple[object, ...], function: int) -> int | None:
        try:
            return hashed(self, arguments, function)
        except BaseException as error:
            guard = _raise_after_this_call(error.with_traceback(None))  # whose frames would keep the guard alive
            return None if guard else 0

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
        (array.array, {"buffer_info": _varied_buffer_info}),
    )
    for kind, changes in changed:
        with _mutable(kind):
            for name, change in changes.items():
                if not isinstance(change, classmethod):
                    _disguise(change, vars(kind)[name])
                setattr(kind, name, change)
    for kind in _types_with_an_address():
        with _mutable(kind):
            type.__setattr__(kind, "__repr__", _varied_repr(vars(kind)["__repr__"]))
    _vary_slot_wrappers()
    _disguise(varied_hash, _hash)
    builtins.hash = varied_hash
    builtins.id = varied_id
    for module in (reprlib, dataclasses):  # they remember by `id` what they have met, and tell nobody; `copy` does
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
    _end()
    gc.set_threshold(_COLLECTOR_THRESHOLD)
    return f"{' and '.join(lacking)} cannot be varied in this interpreter" if lacking else None
