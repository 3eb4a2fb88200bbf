import ast
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.sandbox.literals import (
    NotLiteral,
    TooLarge,
    canonical,
    canonical_arguments,
    is_canonical,
    parse_arguments,
    parse_literal,
)

BIG = 10**6
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.complex_numbers(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec=None), max_size=8)
    | st.binary(max_size=8)
)
hashable = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.tuples(inner), max_leaves=4)
literals = st.recursive(
    scalars | st.sets(hashable, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable, inner, max_size=3)
    ),
    max_leaves=12,
)
# Few values that meet often: equal across types, equal in another order, equal up to the sign of zero.
colliding = st.recursive(
    st.sampled_from([0, 1, -0.0, 0.0, 1.0, True, False, "1", b"1", 1 + 0j, None]),
    lambda inner: st.lists(inner, max_size=2) | st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)


def strictly_equal(a: object, b: object) -> bool:
    """An independent definition: == of values whose types agree all the way down."""
    if type(a) is not type(b) or a != b:
        return False
    if isinstance(a, list | tuple):
        return all(map(strictly_equal, a, b))  # type: ignore[arg-type]
    if isinstance(a, dict):
        return all(
            any(strictly_equal(key, other) and strictly_equal(a[key], b[other]) for other in b)  # type: ignore[index]
            for key in a
        )
    if isinstance(a, set):
        return all(any(strictly_equal(item, other) for other in b) for item in a)  # type: ignore[attr-defined]
    return True


@given(literals)
def test_a_canonical_text_evaluates_to_an_equal_value_by_python_itself(value: object) -> None:
    assert strictly_equal(ast.literal_eval(canonical(value, BIG)), value)


@given(literals)
def test_the_canonical_text_is_a_fixed_point_of_parsing(value: object) -> None:
    text = canonical(value, BIG)
    assert canonical(parse_literal(text, BIG), BIG) == text
    assert is_canonical(text, BIG)
    assert "\n" not in text


@given(literals)
def test_python_s_own_repr_parses_to_the_same_canonical_text(value: object) -> None:
    assert canonical(parse_literal(repr(value), BIG), BIG) == canonical(value, BIG)


@given(colliding, colliding)
def test_canonical_texts_are_equal_exactly_when_values_are_strictly_equal(a: object, b: object) -> None:
    assert (canonical(a) == canonical(b)) == strictly_equal(a, b)


@given(st.dictionaries(hashable, colliding, max_size=3), st.dictionaries(hashable, colliding, max_size=3))
def test_dicts_are_compared_without_their_order(a: dict, b: dict) -> None:
    backwards = dict(reversed(a.items()))
    assert canonical(backwards, BIG) == canonical(a, BIG)
    assert (canonical(a, BIG) == canonical(b, BIG)) == strictly_equal(a, b)


@given(st.lists(literals, max_size=4))
def test_an_argument_list_survives_as_written(arguments: list[object]) -> None:
    text = canonical_arguments(tuple(arguments), BIG)
    again = parse_arguments(text, BIG)
    assert strictly_equal(again, tuple(arguments))
    assert canonical_arguments(again, BIG) == text


@given(st.text(max_size=30) | st.text("()[]{},:'\"\\\n #0123j.-+ *=xset", max_size=20))
def test_no_text_escapes_the_parser_s_own_errors(text: str) -> None:
    for parse in (parse_literal, parse_arguments):
        try:
            value = parse(text)
        except (NotLiteral, TooLarge):
            continue
        canonical(value)
    assert is_canonical(text) in (True, False)


@given(literals, st.integers(1, 60))
def test_a_text_over_the_limit_is_refused_and_never_cut(value: object, limit: int) -> None:
    whole = canonical(value, BIG)
    if len(whole) <= limit:
        assert canonical(value, limit) == whole
    else:
        with pytest.raises(TooLarge):
            canonical(value, limit)


def test_an_input_keeps_what_equality_ignores() -> None:
    value = {"b": -0.0, "a": {3, 1}}
    assert canonical(value, as_written=True) == "{'b': -0.0, 'a': {1, 3}}"
    assert canonical(value) == "{'a': {1, 3}, 'b': 0.0}"


def test_values_without_a_literal_are_refused() -> None:
    for value in (math.nan, -math.inf, frozenset({1}), range(2), object(), int, ..., bytearray(), complex(0, math.inf)):
        with pytest.raises(NotLiteral):
            canonical([value])


def test_parentheses_around_one_tuple_are_told_from_parentheses_around_arguments() -> None:
    assert parse_arguments("(1, 2)") == ((1, 2),)
    assert parse_arguments("(1), (2)") == (1, 2)
    assert parse_arguments("(1, 2), 3") == ((1, 2), 3)
    assert parse_arguments("") == ()


@pytest.mark.parametrize("bracket", ["[", "(", "{", "[(", "{1:", "((((-", "set(", "'", '"""', "\\", "f'{"])
def test_hostile_text_is_refused_within_the_parser_s_own_limits(bracket: str) -> None:
    text = (bracket * 4096)[:4096]
    with pytest.raises(NotLiteral):
        parse_literal(text)
