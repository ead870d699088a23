from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tdserve.base.errors import CapacityError
from tdserve.transport.staging_pool import StagingPool, StagingSlot

TIMEOUT_S = 20.0


class Maker:
    """Makes slots, and counts them."""

    def __init__(self) -> None:
        self.num_made = 0
        self.is_full = False

    def __call__(self) -> StagingSlot:
        if self.is_full:
            raise RuntimeError("out of memory")
        self.num_made += 1
        return StagingSlot(torch.zeros(1), torch.zeros(1))


def pool_of(maker: Maker, *, num_ready: int, max_sets: int) -> StagingPool:
    return StagingPool(maker, what="memory", set_size=3, num_ready=num_ready, max_sets=max_sets)


def test_take_when_sets_are_ready_then_no_memory_is_made_while_wires_come_and_go() -> None:
    maker = Maker()
    pool = pool_of(maker, num_ready=2, max_sets=2)
    assert maker.num_made == 6
    for _ in range(5):
        first, second = pool.take(0.0), pool.take(0.0)
        assert len({id(slot) for slot in (*first, *second)}) == 6
        pool.give_back(first)
        pool.give_back(second)
    assert maker.num_made == 6


def test_take_when_none_is_free_then_made_up_to_the_limit_and_refused_beyond_it() -> None:
    maker = Maker()
    pool = pool_of(maker, num_ready=1, max_sets=2)
    taken = [pool.take(0.0), pool.take(0.0)]
    with pytest.raises(CapacityError, match="sets of memory, of which 2 are in use"):
        pool.take(0.0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.take, TIMEOUT_S)
        pool.give_back(taken[0])
        assert waiting.result() is taken[0]
    assert maker.num_made == 6


def test_take_when_there_is_no_memory_then_runtime_error_and_tries_again_next_time() -> None:
    maker = Maker()
    pool = pool_of(maker, num_ready=0, max_sets=1)
    maker.is_full = True
    with pytest.raises(RuntimeError):
        pool.prepare(1)
    with pytest.raises(RuntimeError):
        pool.take(0.0)
    maker.is_full = False
    assert len(pool.take(0.0)) == 3
    assert pool.num_free == 0
