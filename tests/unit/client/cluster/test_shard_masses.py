"""A sample is divided among shards as one draw from all of them would be."""

from __future__ import annotations

import numpy as np
import pytest

from tdserve.client.cluster.shard_masses import divide
from tests import chi_square


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def test_divide_when_draws_are_independent_then_in_proportion(rng: np.random.Generator) -> None:
    counts = np.zeros(3, np.int64)
    for _ in range(500):
        for shard, count in divide(8, {0: 0.5, 1: 1.5, 2: 6.0, 3: 0.0}, rng).items():
            counts[shard] += count
    assert counts.sum() == 4000
    assert chi_square.statistic(counts, np.array([0.5, 1.5, 6.0]) / 8) < chi_square.limit(3)


def test_divide_when_nothing_comes_twice_then_no_shard_gives_more_than_it_has(rng: np.random.Generator) -> None:
    for _ in range(200):
        counts = divide(9, {0: 1.0, 1: 2.0, 2: 7.0}, rng, is_distinct=True)
        assert sum(counts.values()) == 9
        assert counts.get(0, 0) <= 1
        assert counts.get(1, 0) <= 2
    assert divide(10, {0: 1.0, 1: 2.0, 2: 7.0}, rng, is_distinct=True) == {0: 1, 1: 2, 2: 7}


def test_divide_when_an_epoch_ends_then_the_rest_comes_from_the_next(rng: np.random.Generator) -> None:
    for _ in range(200):
        counts = divide(6, {0: 2.0, 1: 0.0}, rng, is_distinct=True, reserves={0: 3.0, 1: 5.0})
        assert sum(counts.values()) == 6
        assert 2 <= counts[0] <= 5
        assert counts.get(1, 0) <= 5
