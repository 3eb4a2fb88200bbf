"""A process finds its place in torchrun's variables, or says which one is wrong."""

import pytest

from populora_trainer.errors import RanksError
from populora_trainer.ranks.world import SINGLE, World, world_from

GOOD = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}


def test_a_process_without_variables_or_peers_is_alone():
    assert world_from({}) == SINGLE
    assert world_from({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == SINGLE
    assert SINGLE.leads
    assert SINGLE.speaks


def test_a_place_among_nodes():
    world = world_from(GOOD)
    assert world == World(rank=9, size=16, local_rank=1, local_size=8)
    assert (world.leads, world.speaks, world.nodes) == (False, False, 2)
    assert world_from(GOOD | {"RANK": "8", "LOCAL_RANK": "0"}).speaks
    assert world_from(GOOD | {"RANK": "0", "LOCAL_RANK": "0"}).leads


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"RANK": "16"}, "RANK is 16 while WORLD_SIZE is set; allowed are 0 to 15"),
        ({"RANK": ""}, "RANK is missing"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is two"),
        ({"LOCAL_WORLD_SIZE": "17"}, "LOCAL_WORLD_SIZE is 17 while WORLD_SIZE is set; allowed are 1 to 16"),
        ({"LOCAL_WORLD_SIZE": "5"}, "WORLD_SIZE 16 is not allowed: it must be a multiple of LOCAL_WORLD_SIZE 5"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is -1"),
    ],
)
def test_a_variable_that_cannot_be_is_named(change, sentence):
    with pytest.raises(RanksError, match=sentence):
        world_from(GOOD | change)
