from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tdserve.transport.pool import BufferPool
from tests.memory import count_bytes


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 100_000, 5_000_001])
def test_take_when_given_a_size_then_exactly_that_and_aligned(nbytes: int) -> None:
    buffer = BufferPool().take(nbytes)
    assert (buffer.shape, buffer.dtype) == ((nbytes,), torch.uint8)
    assert buffer.data_ptr() % 64 == 0


def test_take_when_a_buffer_was_dropped_then_its_memory_again() -> None:
    pool = BufferPool()
    buffer = pool.take(100_000)
    address = buffer.data_ptr()
    del buffer
    assert pool.take(99_000).data_ptr() == address


def test_take_when_a_view_is_alive_then_other_memory() -> None:
    pool = BufferPool()
    view = pool.take(100_000)[5_000:6_000].view(torch.float32)
    view.fill_(7.0)
    others = [pool.take(100_000).fill_(1) for _ in range(3)]
    assert bool((view == 7.0).all())
    del view, others
    gc.collect()
    assert len({pool.take(100_000).data_ptr()}) == 1


def test_pool_when_full_then_drops_what_comes_back() -> None:
    pool = BufferPool(max_pooled_bytes=100_000)
    first, second = pool.take(90_000), pool.take(90_000)
    addresses = {first.data_ptr(), second.data_ptr()}
    del first, second
    assert pool.take(90_000).data_ptr() in addresses
    gc.collect()
    assert 90_000 <= count_bytes(pool) <= 110_000


def test_pool_when_full_then_what_was_asked_for_last_takes_the_place_of_what_was_not() -> None:
    pool = BufferPool(max_pooled_bytes=100_000)
    large = pool.take(90_000)
    del large
    small = pool.take(20_000)
    address = small.data_ptr()
    del small  # the pool is full of objects that nobody has asked for since
    small = pool.take(20_000)
    assert small.data_ptr() == address
    assert count_bytes(pool) < 10_000


def test_pool_when_full_then_what_comes_back_late_replaces_nothing() -> None:
    pool = BufferPool(max_pooled_bytes=100_000)
    large = pool.take(90_000)
    small = pool.take(20_000)
    address = small.data_ptr()
    del small, large
    assert pool.take(20_000).data_ptr() == address


def test_take_when_many_threads_do_then_no_two_share_memory() -> None:
    pool = BufferPool()

    def use(seed: int) -> bool:
        for step in range(200):
            buffer = pool.take(4096 + 64 * (seed % 3))
            mark = (seed * 31 + step) % 256
            buffer.fill_(mark)
            if not bool((buffer == mark).all()):
                return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(8)))
