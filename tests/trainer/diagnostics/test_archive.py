import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.diagnostics.archive import CELLS, DESCRIPTOR, Archive, centroids, descriptor
from populora_trainer.errors import StorageError

IDENTITY = "def f(a):\n    return a"
LOOP = "def f(a):\n    total = 0\n    for x in a:\n        if x > 2:\n            total += x\n    return total"
SMALL = 64


def test_there_are_4096_cells_spread_over_the_unit_cube():
    cells = centroids()
    assert cells.shape == (CELLS, len(DESCRIPTOR)) == (4096, 6)
    assert cells.min() >= 0
    assert cells.max() <= 1
    assert np.abs(cells.mean(axis=0) - 0.5).max() < 0.02
    assert len(np.unique(cells, axis=0)) == CELLS


def test_the_cells_follow_from_nothing_but_their_number():
    first = centroids(SMALL).copy()
    centroids.cache_clear()
    assert np.array_equal(centroids(SMALL), first)


def test_cells_share_the_space_more_evenly_than_random_points():
    generator = np.random.default_rng(1)
    probes = generator.random((20_000, len(DESCRIPTOR)))

    def spread(points):
        owner = ((probes[:, None, :] - points[None]) ** 2).sum(-1).argmin(1)
        return np.bincount(owner, minlength=len(points)).std()

    assert spread(centroids(SMALL)) < 0.7 * spread(generator.random((SMALL, len(DESCRIPTOR))))


def test_the_identity_program_is_the_origin_of_the_complexity_axes():
    assert descriptor(IDENTITY).tolist() == [0, 0, 0, 0, 0, 0.5]
    assert np.all(descriptor(LOOP)[:5] > 0)
    assert descriptor("def f(a) return") is None
    assert descriptor("") is not None


@given(st.integers(0, 60), st.integers(0, 15))
def test_descriptors_stay_in_the_unit_cube(lines, nesting):
    loops = "".join(f"{'    ' * (level + 1)}for x{level} in a:\n" for level in range(nesting))
    body = "".join(f"{'    ' * (nesting + 1)}y{line} = g(a) + {line}\n" for line in range(lines + 1))
    point = descriptor(f"def f(a):\n{loops}{body}    return a")
    assert point is not None
    assert np.all((point >= 0) & (point <= 1))


def test_a_cell_keeps_its_hardest_problem_that_somebody_solved():
    archive = Archive(SMALL)

    def offer(constant, solve_rate):
        return archive.insert(f"def f(a):\n    return a + {constant}", solve_rate=solve_rate, author="t", step=constant)

    assert offer(0, 0.0), "an unsolved problem holds an empty cell"
    assert offer(1, 1.0), "any solved problem beats it"
    assert offer(2, 0.25)
    assert not offer(3, 0.25), "the older one stays"
    assert not offer(4, 0.5)
    assert not offer(5, 0.0)
    (elite,) = archive.elites().values()
    assert (elite.step, elite.solve_rate) == (2, 0.25)
    assert archive.coverage == 1 / SMALL


def test_different_programs_cover_different_cells():
    archive = Archive()
    archive.insert(IDENTITY, solve_rate=1.0, author="t", step=0)
    archive.insert(LOOP, solve_rate=1.0, author="t", step=0)
    assert archive.coverage == 2 / CELLS


def test_what_is_not_python_covers_nothing():
    archive = Archive(SMALL)
    assert not archive.insert("def f(a) return", solve_rate=0.5, author="t", step=0)
    assert archive.coverage == 0
    with pytest.raises(ValueError, match="solve rate"):
        archive.insert(IDENTITY, solve_rate=float("nan"), author="t", step=0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), max_size=15))
def test_bytes_hold_the_whole_archive_whatever_the_order_of_cells(offers):
    archive = Archive(SMALL)
    for step, (lines, solved) in enumerate(offers):
        program = "def f(a):\n" + "    a = a + 1\n" * lines + "    return a"
        archive.insert(program, solve_rate=solved / 8, author=f"t{step}", step=step)
    copy = Archive.from_bytes(archive.to_bytes())
    assert copy.elites() == archive.elites()
    assert copy.to_bytes() == archive.to_bytes()
    assert copy.coverage == archive.coverage


def test_an_archive_whose_cells_followed_another_measure_of_depth_is_put_in_order():
    archive = Archive()
    for program in (IDENTITY, LOOP):
        archive.insert(program, solve_rate=0.5, author="t", step=3)
    header, *rows = [json.loads(line) for line in archive.to_bytes().splitlines()]
    old = [header | {"format": 1}, *([row[0] ^ 1, *row[1:]] for row in rows)]
    read = Archive.from_bytes("\n".join(map(json.dumps, old)).encode())
    assert read.elites() == archive.elites()


def test_damaged_bytes_are_a_storage_error():
    archive = Archive(SMALL)
    archive.insert(IDENTITY, solve_rate=0.5, author="t", step=0)
    data = archive.to_bytes()
    doubled = data + data.splitlines(keepends=True)[1]
    row = json.loads(data.splitlines()[1])
    outside = data.splitlines(keepends=True)[0] + json.dumps([SMALL, *row[1:]]).encode()
    for damage in (b"", data[:-9], b"\xff", doubled, outside, data.replace(b'"format":2', b'"format":9')):
        with pytest.raises(StorageError, match="archive is damaged"):
            Archive.from_bytes(damage)
