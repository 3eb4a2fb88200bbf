"""Work is spread so that nobody waits long for the others."""

from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.ranks.shares import shares

COSTS = st.lists(st.integers(1, 5000), max_size=60)
COUNTS = st.integers(1, 9)


@given(COSTS, COUNTS)
def test_everything_is_given_out_once_in_its_order(costs: list[int], count: int) -> None:
    lots = shares(costs, count)
    assert len(lots) == count
    assert sorted(index for lot in lots for index in lot) == list(range(len(costs)))
    assert all(lot == sorted(lot) for lot in lots)
    assert lots == shares(costs, count)


@given(COSTS, COUNTS)
def test_the_largest_share_is_near_the_least_possible(costs: list[int], count: int) -> None:
    loads = [sum(costs[index] for index in lot) for lot in shares(costs, count)]
    # What no way of spreading can beat: the mean, the dearest, and two of the count + 1 dearest together.
    dear = sorted(costs, reverse=True)
    pair = dear[count - 1] + dear[count] if len(dear) > count else 0
    bound = max(sum(costs) / count, dear[0] if dear else 0, pair)
    assert max(loads) <= 4 / 3 * bound + max(loads) * 1e-9
    if len(costs) >= count:
        assert min(len(lot) for lot in shares(costs, count)) >= 1


def test_one_long_row_outweighs_many_short_ones() -> None:
    assert shares([100, 10, 10, 10, 10], 2) == [[0], [1, 2, 3, 4]]
    assert shares([5, 5], 3) == [[0], [1], []]
