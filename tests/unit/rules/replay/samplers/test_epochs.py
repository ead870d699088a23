from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.replay.samplers.epochs import EncipheredOrder, SortedOrder, compute_share
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.sampler import Uniform, make_epoch_order
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tests import chi_square
from tests.errors import raises

KINDS = [SortedOrder, EncipheredOrder]


def _check_even(counts: Any) -> None:
    counted = np.asarray(counts, np.int64)
    assert chi_square.statistic(counted) < chi_square.limit(counted.size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 16, 17, 255, 1000, 4097])
def test_order_when_asked_for_piece_by_piece_then_each_row_comes_once(
    kind: type[SortedOrder | EncipheredOrder], num_rows: int
) -> None:
    order = kind(num_rows, seed=1, epoch=0)
    pieces = [order.list_rows(at, min(at + 37, num_rows)) for at in range(0, num_rows, 37)]
    found = np.concatenate(pieces)
    assert found.dtype == np.int64
    assert sorted(found.tolist()) == list(range(num_rows))
    assert found.tolist() == order.list_rows(0, num_rows).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_order_when_seed_epoch_or_number_of_rows_differ_then_another(kind: type[SortedOrder | EncipheredOrder]) -> None:
    numbers = [(0, 0), (0, 1), (1, 0), (10, 0), (1 << 100, 0)]
    orders = [tuple(kind(1000, seed=seed, epoch=epoch).list_rows(0, 50)) for seed, epoch in numbers]
    assert len(set(orders)) == len(orders)
    assert orders[0] == tuple(kind(1000, seed=0, epoch=0).list_rows(0, 50))


def test_order_when_computed_anywhere_then_these_rows() -> None:
    """Readers of different machines and versions share an epoch: a change here breaks those that run."""
    assert SortedOrder(1000, seed=7, epoch=3).list_rows(0, 4).tolist() == [232, 344, 848, 963]
    assert EncipheredOrder(10**8, seed=7, epoch=3).list_rows(0, 4).tolist() == [71837709, 58663489, 94442157, 29898721]


def test_order_when_of_three_rows_then_all_six_are_equally_probable() -> None:
    found = Counter(tuple(SortedOrder(3, seed=seed, epoch=0).list_rows(0, 3)) for seed in range(3000))
    orders = list(itertools.permutations(range(3)))
    _check_even([found[order] for order in orders])


def test_order_when_enciphered_then_first_rows_and_neighbours_look_drawn() -> None:
    num_rows, num_bins = 70_000, 20
    order = EncipheredOrder(num_rows, seed=1, epoch=0).list_rows(0, num_rows)
    firsts = np.bincount(order[:10_000] * num_bins // num_rows, minlength=num_bins)
    _check_even(firsts)
    steps = np.bincount((np.diff(order) % num_rows) * num_bins // num_rows, minlength=num_bins)
    _check_even(steps)


def test_order_when_of_a_hundred_million_rows_then_costs_no_memory() -> None:
    tracemalloc.start()
    order = make_epoch_order(WithoutReplacement(seed=1), 10**8, epoch=0)
    rows = order.list_rows(99_999_000, 10**8)
    _, peak_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(rows, np.ndarray)
    assert len(set(rows.tolist())) == 1000
    assert peak_nbytes < 1_000_000


@pytest.mark.parametrize("sampler", [None, Fifo()])
def test_order_when_of_no_sampler_then_as_numbered(sampler: object) -> None:
    assert make_epoch_order(sampler, 10, epoch=4).list_rows(3, 7) == slice(3, 7)


def test_order_when_no_seed_is_given_then_all_readers_have_that_of_seed_0() -> None:
    found, expected = (make_epoch_order(WithoutReplacement(seed), 100, epoch=2).list_rows(0, 100) for seed in (None, 0))
    assert np.array_equal(found, expected)  # type: ignore[arg-type]


def test_order_when_a_sampler_draws_rows_twice_then_refused() -> None:
    with pytest.raises(InvalidRequestError, match="WithoutReplacement"):
        make_epoch_order(Uniform(), 10, epoch=0)
    with raises(InvalidRequestError, argument="epoch"):
        make_epoch_order(None, 10, epoch=-1)


@pytest.mark.parametrize(("num_rows", "world_size"), [(10, 1), (10, 3), (3, 8), (0, 2), (1001, 8)])
def test_shares_when_put_together_then_all_places_once_and_evenly(num_rows: int, world_size: int) -> None:
    shares = [compute_share(num_rows, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [place for share in shares for place in share] == list(range(num_rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0), (True, 2), (0.0, 1)])
def test_shares_when_there_is_no_such_reader_then_refused(rank: int, world_size: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"rank|world_size"):
        compute_share(10, rank=rank, world_size=world_size)
