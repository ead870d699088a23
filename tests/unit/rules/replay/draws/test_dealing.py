from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tdserve.rules.replay.draws.dealing import deal


def test_deal_when_without_sizes_then_in_turn() -> None:
    assert deal(6, 3).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.slow
@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_deal_when_by_sizes_then_all_once_and_equally_many(num_each: int, world_size: int, data: st.DataObject) -> None:
    num_units = num_each * world_size
    sizes = np.array(data.draw(st.lists(st.integers(0, 9), min_size=num_units, max_size=num_units)))
    shares = deal(num_units, world_size, sizes)
    assert shares.shape == (world_size, num_each)
    assert sorted(shares.ravel().tolist()) == list(range(num_units))
    assert (np.diff(shares, axis=1) > 0).all(), "in the order of the draw"


@pytest.mark.parametrize(
    ("sizes", "totals"),
    [
        ([8, 7, 6, 5, 4, 3], {16, 17}),
        ([5, 5, 4, 4, 2, 2], {11}),  # the largest first alone would leave 12 and 10
        ([100, 1, 1, 1], {101, 2}),  # each rank gets the same number of groups, whatever their sizes
        ([0, 0, 0, 0], {0}),
    ],
)
def test_deal_when_two_ranks_then_totals_as_near_as_can_be(sizes: list[int], totals: set[int]) -> None:
    array = np.array(sizes)
    assert set(array[deal(len(sizes), 2, array)].sum(axis=1).tolist()) == totals


def test_deal_when_lengths_are_spread_then_totals_differ_by_less_than_a_row() -> None:
    sizes = np.random.default_rng(0).lognormal(6.0, 1.0, 512).astype(np.int64)
    totals = sizes[deal(512, 8, sizes)].sum(axis=1)
    in_turn = sizes[deal(512, 8)].sum(axis=1)
    assert np.ptp(totals) < np.median(sizes) / 10 < np.ptp(in_turn)
