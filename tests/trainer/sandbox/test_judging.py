"""The decision logic alone: outcomes of runs are made up here, nothing is executed."""

import marshal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from populora_trainer.sandbox import Case, Judgement, Limits, Verdict
from populora_trainer.sandbox.judging import (
    Outcome,
    Program,
    Run,
    join,
    judge,
    needs_run,
    read_compiled,
    read_record,
)
from populora_trainer.sandbox.literals import canonical_arguments, unpack
from populora_trainer.sandbox.program import CODE, FRAME, REFUSED, UNDECIDED

LIMITS = Limits(max_output_chars=50, max_program_chars=100)
NONCE = b"12345678"
RUN = Run("p", ("1", "2"))


def arguments_of(run: Run) -> list[tuple[object, ...]]:
    """Return the inputs as a child gets them."""
    marked, packed = marshal.loads(run.packed_inputs)
    return unpack(packed) if marked else packed


def decide(case: Case, *outcomes: Outcome) -> tuple[list[Run], Judgement]:
    steps = judge(case, LIMITS)
    runs = []
    try:
        runs.append(next(steps))
        for outcome in outcomes:
            runs.append(steps.send(outcome))
    except StopIteration as stop:
        return runs, stop.value
    raise AssertionError(f"asks for {runs[-1]}")


def test_a_problem_is_run_once_on_its_canonical_inputs() -> None:
    case = Case("1", "code_f", "p", (" 1 ,[ 2 ]", "''"))
    runs, judgement = decide(case, Outcome(Verdict.VALID, ("3", "4")))
    assert runs == [Run("p", ("1, [2]", "''"))]
    assert judgement == Judgement("1", Verdict.VALID, "valid", ("1, [2]", "''"), ("3", "4"))


def test_given_outputs_save_the_problem_s_run_and_an_output_answer_needs_none_at_all() -> None:
    case = Case("1", "code_o", "p", ("1",), answer=" 3 ", outputs=("3",))
    runs, judgement = decide(case)
    assert runs == []
    assert judgement.kind == "correct"


def test_only_inputs_and_never_outputs_are_part_of_what_is_run() -> None:
    case = Case("1", "code_f", "p", ("1",), answer="q", outputs=("'expected'",))
    runs, _ = decide(case, Outcome(Verdict.VALID, ("2",)))
    assert runs == [Run("q", ("1",))]
    assert "expected" not in repr(runs)


def test_an_answer_equal_to_the_known_input_is_right_without_a_run() -> None:
    runs, judgement = decide(Case("1", "code_i", "p", ("[1]",), answer="[ 1 ]", outputs=("3",)))
    assert runs == []
    assert judgement.kind == "correct"


def test_a_malformed_answer_is_refused_before_the_problem_runs() -> None:
    runs, judgement = decide(Case("1", "code_i", "p", ("1",), answer="f(1)"))
    assert runs == []
    assert (judgement.verdict, judgement.kind) == (Verdict.BAD_LITERAL, "malformed")


def test_outputs_that_do_not_match_the_inputs_are_the_caller_s_error() -> None:
    with pytest.raises(ValueError, match="2 outputs for 1 inputs"):
        decide(Case("1", "code_o", "p", ("1",), outputs=("1", "2")))


@pytest.mark.parametrize("number", [1, 2, 8])
def test_a_further_run_takes_the_inputs_backwards_and_calls_the_last_of_them_again(number: int) -> None:
    assert arguments_of(RUN) == [(1,), (2,)]
    assert read_record(NONCE + b"valid\n20\n10\n10", NONCE, RUN, number, LIMITS).outputs == ("10", "20")
    again = read_record(NONCE + b"valid\n20\n10\n11", NONCE, RUN, number, LIMITS)
    assert (again.verdict, again.outputs, again.detail) == (Verdict.NONDETERMINISTIC, (), "two calls give 10 and 11")


@given(st.integers(1, 6), st.integers(2, 6))
def test_every_counter_is_found_at_any_number_of_inputs(inputs: int, modulus: int) -> None:
    """Its output tells how often it was called, modulo the modulus."""
    run = Run("p", tuple(map(str, range(inputs))))
    calls = (inputs, inputs + 1)
    records = [NONCE + b"valid\n" + b"\n".join(b"%d" % (call % modulus) for call in range(n)) for n in calls]
    first = read_record(records[0], NONCE, run, 0, LIMITS)
    assert join(first, read_record(records[1], NONCE, run, 1, LIMITS)).verdict is Verdict.NONDETERMINISTIC


def test_a_program_that_sees_what_varies_is_run_nine_times_and_any_other_twice() -> None:
    def runs(varies: bool) -> int:
        number, known = 1, read_record(NONCE + b"valid\n1\n2", NONCE, RUN, 0, LIMITS)
        while needs_run(number, known):
            record = NONCE + (b"valid+" if varies else b"valid") + b"\n2\n1\n1"
            known = join(known, read_record(record, NONCE, RUN, number, LIMITS))
            number += 1
        assert known.verdict is Verdict.VALID
        return number

    assert (runs(varies=True), runs(varies=False)) == (9, 2)
    assert not needs_run(1, Outcome(Verdict.RUNTIME_ERROR))


def test_the_first_run_does_not_say_that_it_saw_what_varies() -> None:
    assert read_record(NONCE + b"valid+\n1\n2", NONCE, RUN, 0, LIMITS).verdict is Verdict.CRASHED


def test_a_key_follows_from_the_program_the_inputs_and_the_seed() -> None:
    keys = [Run("p", ("1",)).key(0), Run("q", ("1",)).key(0), Run("p", ("2",)).key(0), Run("p", ("1",)).key(1)]
    assert len(set(keys)) == 4
    assert all(0 <= key < 1 << 64 for key in keys)
    assert Run("p", ("1",)).key(0) == keys[0] == 75948750032023802


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"valid\n1\n2",
        b"87654321valid\n1\n2",
        NONCE,
        NONCE + b"valid",
        NONCE + b"valid\n1",
        NONCE + b"valid\n1\n2\n3",
        NONCE + b"valid\n1\n 2",
        NONCE + b"valid\n1\n2\r",
        NONCE + b"valid\n1\nprint(2)",
        NONCE + b"valid\n1\n'" + b"a" * 60 + b"'",
        NONCE + b"valid\n1\n\xff",
        NONCE + b"correct\n1\n2",
        NONCE + b"timeout\n",
        NONCE + b"nondeterministic\n",
        NONCE + b"Valid\n1\n2",
        NONCE + b"valid\n1\n[1,2]",
        NONCE + b"valid\n1\n{2, 1}",
        NONCE + b"valid\n1\nnan",
        NONCE + NONCE + b"valid\n1\n2",
    ],
)
def test_a_record_that_is_not_exactly_well_formed_is_a_crash(record: bytes) -> None:
    outcome = read_record(record, NONCE, RUN, 0, LIMITS)
    assert outcome.verdict is Verdict.CRASHED
    assert outcome.outputs == ()


def test_a_further_run_decides() -> None:
    good = Outcome(Verdict.VALID, ("1",))
    assert join(good, Outcome(Verdict.VALID, ("1",))) == good
    assert join(good, Outcome(Verdict.VALID, ("2",))).verdict is Verdict.NONDETERMINISTIC
    assert join(good, Outcome(Verdict.RUNTIME_ERROR)).verdict is Verdict.NONDETERMINISTIC
    assert join(good, Outcome(Verdict.UNSERIALISABLE)).verdict is Verdict.NONDETERMINISTIC
    for verdict in (Verdict.TIMEOUT, Verdict.MEMORY, Verdict.CRASHED, Verdict.NONDETERMINISTIC):
        assert join(good, Outcome(verdict)).verdict is verdict


@pytest.mark.parametrize("verdict", [v for v in Verdict if v not in (Verdict.VALID, Verdict.CORRECT)])
def test_an_answer_program_is_malformed_exactly_when_it_was_refused_before_running(verdict: Verdict) -> None:
    case = Case("1", "code_f", "p", ("1",), answer="q", outputs=("1",))
    _, judgement = decide(case, Outcome(verdict))
    refused = {"bad_literal", "input_limit", "syntax_error", "missing_entry", "forbidden_import", "forbidden_name"}
    assert judgement.kind == ("malformed" if verdict in refused else "wrong")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.complex_numbers(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.binary(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.sets(st.integers(0, 99), max_size=9),
        st.sets(st.tuples(st.integers(-9, 9), st.booleans()), max_size=9),
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.lists(st.lists(VALUES, max_size=3).map(tuple), min_size=1, max_size=3))
def test_a_child_gets_the_very_values_that_the_literals_say(arguments: list[tuple[object, ...]]) -> None:
    texts = tuple(canonical_arguments(one, 100_000) for one in arguments)
    said = eval("[" + ", ".join(f"({text},)" if text else "()" for text in texts) + "]", {"set": set})
    assert repr(arguments_of(Run("p", texts))) == repr(said)


@pytest.mark.parametrize("text", ["[1000, 1000]", "[1000, 1000], {1}", "[1000, 1000], 'set()'", "{'a': (1000, 1000)}"])
def test_equal_literals_are_no_more_the_same_object_beside_one_argument_than_beside_another(text: str) -> None:
    ((first, *_),) = arguments_of(Run("p", (text,)))
    one, other = first if isinstance(first, list) else first["a"]
    assert one == other
    assert one is not other


def test_inputs_as_deep_as_allowed_are_handed_over() -> None:
    text = "[" * 50 + "]" * 50
    assert arguments_of(Run("p", (text,))) == [(eval(text),)]


def frame(kind: int, payload: bytes = b"") -> bytes:
    return FRAME.pack(kind, len(payload)) + payload


COMPILED = NONCE + frame(CODE, b"code") + frame(UNDECIDED) + frame(REFUSED, b"syntax_error\nline\t1: \xff")


def test_compiled_programs_get_their_code_or_their_refusal() -> None:
    one, two, three = programs = [Program(text) for text in "123"]
    read_compiled(COMPILED, NONCE, programs)
    assert (one.code, one.refusal) == (b"code", None)
    assert (two.code, two.refusal) == (None, None)
    assert (three.code, three.refusal) == (None, Outcome(Verdict.SYNTAX_ERROR, detail="line 1: \ufffd"))


@given(st.integers(0, len(COMPILED)), st.binary(max_size=20))
def test_a_compilation_that_was_cut_short_leaves_the_rest_to_the_runs(end: int, more: bytes) -> None:
    whole, cut = ([Program(text) for text in "123"] for _ in range(2))
    read_compiled(COMPILED, NONCE, whole)
    read_compiled(COMPILED[:end], NONCE, cut)
    assert all(program == other or program == Program(other.source) for program, other in zip(cut, whole, strict=True))
    read_compiled(more, NONCE, cut)


@pytest.mark.parametrize("verdict", ["valid", "correct", "timeout", "crashed", "nonsense", ""])
def test_a_compilation_can_refuse_and_nothing_else(verdict: str) -> None:
    program = Program("p")
    read_compiled(NONCE + frame(REFUSED, f"{verdict}\n1".encode()), NONCE, [program])
    assert program == Program("p")
