import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.diagnostics.report_charts import (
    MAX_POINTS,
    Life,
    Series,
    line_chart,
    lineage_chart,
    matrix_chart,
    percent,
    plain,
    smooth,
    stacked_chart,
    thin,
    ticks,
)

VALUES = st.floats(-1e6, 1e6, allow_nan=False)
POINTS = st.lists(VALUES, min_size=1, max_size=60).map(lambda ys: tuple(enumerate(map(float, ys))))


def drawn(svg):
    """The elements of a chart by class, after an XML parser has accepted it."""
    root = ElementTree.fromstring(str(svg))
    found = {}
    for node in root.iter():
        found.setdefault(node.get("class", "").split(" ")[0], []).append(node)
    return found


def hover(svg):
    return json.loads(ElementTree.fromstring(str(svg)).get("data-series"))


@given(st.lists(POINTS, min_size=1, max_size=3), st.booleans())
def test_any_numbers_become_a_chart_inside_of_its_frame(lines, marks):
    svg = line_chart([Series(f"line {index}", points, index, marks=marks) for index, points in enumerate(lines)])
    nodes = drawn(svg)
    assert len(hover(svg)) == len(lines)
    for node in nodes.get("line", []):
        numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", node.get("d"))]
        assert all(math.isfinite(number) and -0.1 <= number <= 480.1 for number in numbers)
        assert all(-0.1 <= y <= 240.1 for y in numbers[1::2])


def test_higher_values_stand_higher_and_later_steps_further_right():
    ((low, high),) = (one["p"] for one in hover(line_chart([Series("a", ((1, 0.0), (2, 1.0)))])))
    assert high[1] > low[1]
    assert high[2] < low[2]
    assert [low[0], low[3], high[0], high[3]] == [1, "0", 2, "1"]


def test_nothing_measured_is_no_chart():
    assert line_chart([]) == line_chart([Series("a", ())]) == stacked_chart([]) == ""
    assert matrix_chart([], [], {}, "student", "teacher") == lineage_chart([], []) == ""


def test_one_point_is_a_mark():
    nodes = drawn(line_chart([Series("a", ((5, 0.3),))]))
    assert len(nodes["mark"]) == 1
    assert "line" not in nodes


def test_long_lines_are_smoothed_over_their_raw_values():
    points = tuple((step, float(step % 2)) for step in range(100))
    svg = line_chart([Series("a", points)])
    assert {"raw", "line"} <= drawn(svg).keys()
    middle = [float(point[3]) for point in hover(svg)[0]["p"]][10:-10]
    assert max(middle) - min(middle) < 0.3


def test_ten_thousand_steps_are_thinned():
    svg = line_chart([Series("a", tuple((step, float(step)) for step in range(10_000)))])
    assert len(hover(svg)[0]["p"]) <= MAX_POINTS
    assert len(svg) < 40_000


@given(st.lists(VALUES, min_size=1, max_size=900))
def test_thinning_keeps_order_and_range(values):
    points = tuple(enumerate(values))
    thinned = thin(points)
    assert len(thinned) <= MAX_POINTS
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)
    assert all(min(values) - 1e-6 <= y <= max(values) + 1e-6 for _, y in thinned)
    assert len(values) > MAX_POINTS or thinned == points


def test_smoothing_is_the_mean_of_the_neighbours():
    assert smooth(((0, 0.0), (1, 3.0), (2, 6.0), (3, 0.0)), 3) == ((0, 1.5), (1, 3.0), (2, 3.0), (3, 3.0))


@given(VALUES, VALUES)
def test_ticks_are_few_and_cover_the_range(one, other):
    low, high = sorted((one, other))
    slack = 1e-6 * max(1, high - low)
    found = ticks(low, high)
    assert 1 <= len(found) <= 8
    assert found[0] <= low + slack
    assert found[-1] >= high - slack


def test_noise_is_not_magnified_beyond_the_least_span():
    flat = hover(line_chart([Series("a", ((0, 0.5), (1, 0.501)))], least_span=0.1))[0]["p"]
    assert abs(flat[0][2] - flat[1][2]) < 5


def test_bands_stand_around_their_lines():
    band = ((0, 0.0, 1.0), (1, 0.5, 1.5))
    assert len(drawn(line_chart([Series("a", ((0, 0.5), (1, 1.0)), band=band)]))["band"]) == 1
    single = drawn(line_chart([Series("a", ((0, 0.5),), band=band[:1], marks=True)]))
    assert len(single["line"]) == len(single["mark"]) == 1


def test_stacked_layers_add_up():
    layers = [Series("a", ((0, 1.0), (1, 1.0))), Series("b", ((0, 2.0), (1, 3.0)))]
    below, above = (one["p"] for one in hover(stacked_chart(layers)))
    assert [point[3] for point in above] == ["2", "3"]
    assert all(high[2] < low[2] for low, high in zip(below, above, strict=True))
    assert len(drawn(stacked_chart([Series("a", ((0, 1.0),))]))["area"]) == 1


def test_a_matrix_shows_every_pair_and_the_missing_ones():
    svg = matrix_chart(
        ["s0", "s1"], ["t0", "t1"], {("s0", "t0"): (0.25, 8), ("s1", "t1"): (0.5, 2)}, "student", "teacher"
    )
    nodes = drawn(svg)
    assert [node.text for node in nodes["value"]] == ["25", "50"]
    assert len(nodes["cell"]) == 4
    assert "s0 on problems of t0: 25 % of 8 problems" in svg
    assert "s0 never met t1" in svg


def test_a_family_tree_joins_children_to_their_parents():
    lives = [
        Life("t0", "t0", 0, 10),
        Life("t1", "t1", 0, 20),
        Life("t0-g1", "t0", 10, 20, ("t0", "t1"), "X2", detail="t0-g1, bred by X2"),
    ]
    nodes = drawn(lineage_chart(lives, ["t0", "t1"]))
    assert len(nodes["life"]) == 3
    assert len(nodes["birth"]) == 1
    assert len(nodes["kin"]) == 2
    assert [node.text for node in nodes["operator"]] == ["X2"]


@pytest.mark.parametrize("draw", [
    lambda text: line_chart([Series(text, ((0, 1.0), (1, 2.0)))]),
    lambda text: matrix_chart([text], [text], {(text, text): (0.5, 1)}, text, text),
    lambda text: lineage_chart([Life(text, text, 0, 1, (text,), text, detail=text)], [text]),
])  # fmt: skip
def test_names_from_outside_are_escaped(draw):
    svg = draw("<script>alert(\"'1'\")</script>&")
    assert "<script" not in svg
    ElementTree.fromstring(str(svg))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.12341, "0.1234"), (1234.5, "1234"), (0.00012, "1.2e-04"), (25000.0, "25k"), (-3.5, "-3.5")],
)
def test_numbers_have_few_digits(value, text):
    assert plain(value) == text


def test_shares_are_percentages():
    assert [percent(0.5), percent(0.1234), percent(0.0), percent(1.0)] == ["50 %", "12.3 %", "0 %", "100 %"]
