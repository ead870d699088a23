from __future__ import annotations

import pickle
from io import BytesIO
from multiprocessing.reduction import ForkingPickler

import torch

from tdserve.transport.pool import BufferPool
from tdserve.transport.shared_pool import SharedPool


def test_take_when_asked_then_shared_memory_of_that_size_and_never_the_same_twice() -> None:
    pool = SharedPool()
    buffers = [pool.take(nbytes) for nbytes in (0, 1, 100_000, 100_000)]
    assert [len(buffer) for buffer in buffers] == [0, 1, 100_000, 100_000]
    assert all(buffer.is_shared() for buffer in buffers[1:])  # type: ignore[no-untyped-call]
    buffers[2].fill_(7)
    buffers[3].fill_(1)
    assert int(buffers[2].sum()) == 700_000
    assert SharedPool.is_shared
    assert not BufferPool.is_shared


def test_buffer_when_many_tensors_over_it_are_sent_then_as_one() -> None:
    buffer = SharedPool().take(4096)
    tensors = [buffer[at : at + 64].view(torch.float32) for at in range(0, 4096, 64)]
    written = BytesIO()
    ForkingPickler(written, pickle.HIGHEST_PROTOCOL).dump(tensors)
    assert written.getvalue().count(b"rebuild_storage_fd") == 1
