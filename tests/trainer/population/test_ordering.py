import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.population.operators.ordering import rank_in_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(
    rows=st.integers(1, 5).flatmap(
        lambda columns: st.lists(
            st.lists(st.sampled_from([0.0, 1e-40, 1e-3, 0.5, 2.0, 3e38]), min_size=columns, max_size=columns),
            min_size=1,
            max_size=4,
        )
    )
)
def test_an_entrys_rank_is_the_number_of_smaller_ones_and_of_equal_ones_before_it(dtype, rows):
    values = torch.tensor(rows, dtype=dtype)
    wanted = [
        [sum(other < one or (other == one and j < i) for j, other in enumerate(row)) for i, one in enumerate(row)]
        for row in values.tolist()
    ]
    assert rank_in_rows(values).tolist() == wanted


def test_wide_and_strided_rows_are_ranked_as_narrow_ones():
    values = torch.rand(512, 6, generator=torch.Generator().manual_seed(0)).T
    assert torch.equal(rank_in_rows(values), values.argsort(dim=1).argsort(dim=1))
