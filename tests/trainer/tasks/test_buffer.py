import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.errors import StorageError
from populora_trainer.tasks.buffer import ProblemBuffer
from populora_trainer.tasks.held_out import HeldOutPrograms
from populora_trainer.tasks.problem import TASK_TYPES, Problem

IDENTITY = "def f(a):\n    return a"


def problem(task="code_o", program="def f(a):\n    return a + 1", inputs=("1",), message=""):
    return Problem(task, program, inputs, tuple("0" for _ in inputs), message)


PROBLEMS = st.builds(
    lambda task, number, value: problem(task, f"def f(a):\n    return a + {number}", (str(value),)),
    st.sampled_from(TASK_TYPES),
    st.integers(0, 6),
    st.integers(0, 2),
)


def test_every_section_starts_with_the_identity_program():
    buffer = ProblemBuffer()
    assert len(buffer) == 3
    assert [entry.problem.program for task in TASK_TYPES for entry in buffer.entries(task)] == [IDENTITY] * 3
    assert buffer.seen("def f(a): return (a)  # the same")


def test_layout_does_not_make_a_problem_new():
    buffer = ProblemBuffer()
    assert buffer.add(problem(program="def f(s):\n    return s + 'x'"), author="teacher-0", step=0)
    assert not buffer.add(problem(program='def f(s): # again\n\treturn s+"x"'), author="teacher-1", step=3)
    assert [entry.author for entry in buffer.entries("code_o")] == ["seed", "teacher-0"]


def test_another_input_or_type_makes_a_problem_new():
    buffer = ProblemBuffer()
    assert buffer.add(problem(inputs=("1",)), author="t", step=0)
    assert buffer.add(problem(inputs=("2",)), author="t", step=0)
    assert buffer.add(problem("code_i", inputs=("1",)), author="t", step=0)
    assert buffer.add(problem("code_f", inputs=("1", "2")), author="t", step=0)
    assert len(buffer) == 3 + 4


def test_a_full_section_keeps_the_newest():
    buffer = ProblemBuffer(capacity=3)
    for number in range(10):
        buffer.add(problem(program=f"def f(a):\n    return {number}"), author="t", step=number)
    assert [entry.step for entry in buffer.entries("code_o")] == [7, 8, 9]
    assert not buffer.seen("def f(a):\n    return 6")
    assert buffer.seen("def f(a):\n    return 7")
    assert buffer.seen(IDENTITY), "the other sections still hold it"


def test_a_program_that_left_may_come_again():
    buffer = ProblemBuffer(capacity=1)
    assert buffer.add(problem(inputs=("1",)), author="t", step=0)
    assert buffer.add(problem(inputs=("2",)), author="t", step=1)
    assert buffer.seen(problem().program)
    assert buffer.add(problem(inputs=("1",)), author="t", step=2)


def test_records_keep_author_step_and_solve_rate():
    buffer = ProblemBuffer()
    buffer.add(problem(), author="teacher-2", step=5, solve_rate=0.375)
    *_, entry = buffer.entries("code_o")
    assert (entry.author, entry.step, entry.solve_rate) == ("teacher-2", 5, 0.375)


def test_references_follow_the_generator_alone():
    buffer = ProblemBuffer()
    for number in range(20):
        buffer.add(problem(program=f"def f(a):\n    return {number}"), author="t", step=0)
    drawn = buffer.references("code_o", 6, random.Random(7))
    assert drawn == buffer.references("code_o", 6, random.Random(7))
    assert drawn != buffer.references("code_o", 6, random.Random(8))
    assert len({one.program for one in drawn}) == 6
    assert all(one.task == "code_o" for one in drawn)


def test_fewer_problems_than_asked_for_are_all_returned():
    assert [one.program for one in ProblemBuffer().references("code_i", 6, random.Random(0))] == [IDENTITY]


def test_references_are_uniform_over_old_and_new():
    buffer = ProblemBuffer()
    for number in range(4):
        buffer.add(problem(program=f"def f(a):\n    return {number}"), author="t", step=number)
    rng, counts = random.Random(1), {}
    for _ in range(5000):
        (one,) = buffer.references("code_o", 1, rng)
        counts[one.program] = counts.get(one.program, 0) + 1
    assert len(counts) == 5
    assert all(850 < count < 1150 for count in counts.values())


def test_a_held_out_program_never_enters_and_an_older_buffer_loses_it():
    held_out = HeldOutPrograms.of(["def f(n):\n    return n + 3"])
    kept, free = problem(program="def f(a):\n    return a + 3"), problem(program="def f(a):\n    return a + 4")
    buffer = ProblemBuffer(held_out=held_out)
    assert not buffer.add(kept, author="t", step=1)
    assert buffer.add(free, author="t", step=1)
    older = ProblemBuffer()
    assert older.add(kept, author="t", step=1)
    assert older.add(free, author="t", step=1)
    assert ProblemBuffer.from_bytes(older.to_bytes(), held_out).to_bytes() == buffer.to_bytes()
    assert ProblemBuffer.from_bytes(older.to_bytes()).to_bytes() == older.to_bytes()
    assert not ProblemBuffer.from_bytes(buffer.to_bytes(), held_out).add(kept, author="t", step=2)


def test_code_f_draws_its_program_from_the_other_two_sections():
    buffer = ProblemBuffer()
    buffer.add(problem("code_i", program="def f(i): return i"), author="t", step=0)
    buffer.add(problem("code_o", program="def f(o): return o"), author="t", step=0)
    buffer.add(problem("code_f", program="def f(h): return h", inputs=("1", "2")), author="t", step=0)
    rng = random.Random(3)
    drawn = {buffer.references("code_f", 1, rng)[0].program for _ in range(200)}
    assert drawn == {IDENTITY, "def f(i): return i", "def f(o): return o"}


@given(st.lists(PROBLEMS, max_size=40), st.integers(1, 5))
def test_no_section_exceeds_its_capacity_or_holds_a_problem_twice(problems, capacity):
    buffer = ProblemBuffer(capacity)
    for step, one in enumerate(problems):
        before = {(entry.problem.task, entry.problem) for task in TASK_TYPES for entry in buffer.entries(task)}
        assert buffer.add(one, author="t", step=step) == ((one.task, one) not in before)
        held = [entry.problem for entry in buffer.entries(one.task)]
        assert len(held) == len(set(held)) <= capacity
        assert one in held
        assert buffer.seen(one.program)


@given(st.lists(PROBLEMS, max_size=30), st.integers(1, 5))
def test_bytes_hold_the_whole_buffer(problems, capacity):
    buffer = ProblemBuffer(capacity)
    for step, one in enumerate(problems):
        buffer.add(one, author=f"teacher-{step % 3}", step=step, solve_rate=(step % 8) / 7)
    copy = ProblemBuffer.from_bytes(buffer.to_bytes())
    assert copy.to_bytes() == buffer.to_bytes()
    for task in TASK_TYPES:
        assert list(copy.entries(task)) == list(buffer.entries(task))
        assert copy.references(task, 3, random.Random(1)) == buffer.references(task, 3, random.Random(1))
    for one in problems:
        assert copy.seen(one.program) == buffer.seen(one.program)
        assert copy.add(one, author="x", step=99) == buffer.add(one, author="x", step=99)


def test_odd_text_survives_the_bytes():
    buffer = ProblemBuffer()
    odd = problem(program="def f(a):\n    return 'é\u2028\ud800'", inputs=("'\x1f'",), message="日本\r\n")
    buffer.add(odd, author="t", step=0)
    assert [entry.problem for entry in ProblemBuffer.from_bytes(buffer.to_bytes()).entries("code_o")][-1] == odd


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b"null\n", b'{"format":2,"capacity":4}\n'])
def test_damaged_bytes_are_a_storage_error(damage):
    with pytest.raises(StorageError, match="buffer is damaged"):
        ProblemBuffer.from_bytes(damage)


def test_a_cut_or_doubled_line_is_a_storage_error():
    data = ProblemBuffer().to_bytes()
    with pytest.raises(StorageError):
        ProblemBuffer.from_bytes(data[:-20])
    with pytest.raises(StorageError, match="twice"):
        ProblemBuffer.from_bytes(data + data.splitlines(keepends=True)[1])
    row = json.loads(data.splitlines()[1])
    row[-1] = "0.5"
    with pytest.raises(StorageError, match="solve rate"):
        ProblemBuffer.from_bytes(data.splitlines(keepends=True)[0] + json.dumps(row).encode())


def test_what_was_never_verified_does_not_get_in():
    with pytest.raises(ValueError, match="not a verified problem"):
        ProblemBuffer().add(Problem("code_o", IDENTITY, ("1",)), author="t", step=0)
    with pytest.raises(ValueError, match="solve rate"):
        ProblemBuffer().add(problem(), author="t", step=0, solve_rate=1.5)
    with pytest.raises(ValueError, match="capacity"):
        ProblemBuffer(0)
