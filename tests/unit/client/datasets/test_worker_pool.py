from __future__ import annotations

import gc
import multiprocessing
from typing import Any

import pytest
import torch

from tdserve.client.datasets.worker_pool import WorkerPool, get_worker_pool
from tdserve.transport.pool import BufferPool

NUM_BATCHES = 6


@pytest.mark.slow
def test_take_when_a_buffer_was_dropped_then_its_memory_comes_again_and_else_never() -> None:
    pool = WorkerPool()
    first, second = pool.take(100_000), pool.take(100_000)
    assert len(first) == 100_000
    assert first.data_ptr() != second.data_ptr()
    address = first.data_ptr()
    view = first[5:].view(torch.int8)
    del first
    gc.collect()
    assert pool.take(100_000).data_ptr() != address
    del view
    gc.collect()
    assert address in {buffer.data_ptr() for buffer in [pool.take(99_999), pool.take(99_999)]}
    assert WorkerPool.is_shared
    assert not BufferPool.is_shared


def test_send_when_of_other_memory_then_none() -> None:
    pool = WorkerPool()
    assert pool.send(torch.zeros(4).untyped_storage()) is None
    assert pool.send(pool.take(4).untyped_storage()) is not None


def _work(batches: Any, go_on: Any) -> None:
    """Sends batches of two tensors each over the pool's memory, and reports how many pieces of memory that took."""
    pool = get_worker_pool()
    assert get_worker_pool() is pool
    addresses = set()
    for number in range(NUM_BATCHES):
        buffer = pool.take(4096)
        addresses.add(buffer.data_ptr())
        buffer.fill_(number)
        batches.put((buffer[:64].view(torch.int32), buffer[64:]))
        del buffer
        go_on.acquire()
    batches.put(len(addresses))
    go_on.acquire()


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_pool_when_a_process_sends_its_memory_then_it_is_filled_anew_once_the_receiver_is_done() -> None:
    context = torch.multiprocessing.get_context("fork")
    batches, go_on = context.Queue(), context.Semaphore(0)
    process = context.Process(target=_work, args=(batches, go_on))
    before = set(multiprocessing.active_children())
    process.start()
    kept = []
    for number in range(NUM_BATCHES):
        pair = batches.get(timeout=60.0)
        assert pair[0].untyped_storage().data_ptr() == pair[1].untyped_storage().data_ptr()
        assert (pair[1] == number).all()
        if number < 2:
            kept.append(pair)
        del pair
        gc.collect()
        go_on.release()
    assert batches.get(timeout=60.0) <= 4  # the two that are kept, one on its way, one in the worker's hands
    assert [int(pair[1][0]) for pair in kept] == [0, 1]
    go_on.release()
    process.join(60.0)
    assert process.exitcode == 0
    assert [int(pair[1][-1]) for pair in kept] == [0, 1]
    assert not set(multiprocessing.active_children()) - before
