"""Memory for the batches of a DataLoader's worker: the main process uses them in place, and returns the memory.

torch itself makes a new piece of shared memory for each tensor, and passes its descriptor over a connection of its own,
which takes longer than a batch of small rows. Here all tensors over one buffer are one segment (see
``store.exchange.segments``), which the message only names.
"""

from __future__ import annotations

import copyreg
import os
import weakref
from functools import cache
from multiprocessing.reduction import ForkingPickler
from threading import Lock
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch.multiprocessing.reductions import reduce_storage

from tdserve.store.exchange.segments import Segment, SegmentReference, receive
from tdserve.structure.tensordicts.compact import Tree, put_together, take_apart
from tdserve.transport.pool import BufferPool, find_size_class

MAX_IDLE_NBYTES = 512 * 1024 * 1024
"""Largest size of unused segments; others are freed."""


class WorkerPool(BufferPool):
    """A pool of segments. A segment is reused once its receiver has finished with it. Threads: safe."""

    is_shared: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._segments: list[Segment] = []
        self._in_use: dict[int, Segment] = {}  # by the address of its memory

    def take(self, nbytes: int) -> torch.Tensor:
        """Takes memory, as :class:`BufferPool` does."""
        size = find_size_class(nbytes)
        with self._lock:
            lent = {id(segment) for segment in list(self._in_use.values())}
            idle = [each for each in self._segments if id(each) not in lent and not each.is_with_others]
            segment = next((each for each in idle if each.nbytes == size), None)
            if segment is None:
                if sum(each.nbytes for each in idle) > MAX_IDLE_NBYTES:
                    self._segments = [each for each in self._segments if each not in idle]
                segment = Segment(size)
                self._segments.append(segment)
            loan = segment.lend(nbytes)
            address = loan.ctypes.data
            self._in_use[address] = segment
        weakref.finalize(loan, self._in_use.pop, address, None).atexit = False
        return torch.from_numpy(loan)

    def send(self, storage: torch.UntypedStorage) -> SegmentReference | None:
        """Returns where a receiver finds memory of this pool; None for any other memory."""
        segment = self._in_use.get(storage.data_ptr())
        if segment is None:
            return None
        with self._lock:
            return segment.send(storage.nbytes())


def get_worker_pool() -> WorkerPool:
    """Returns the pool of this process, a DataLoader's worker; from now on it sends its tensors as segments."""
    return _get_pool(os.getpid())


@cache
def _get_pool(pid: int) -> WorkerPool:
    pool = WorkerPool()

    def reduce(storage: torch.UntypedStorage) -> Any:
        sent = pool.send(storage) if os.getpid() == pid else None
        return (_receive_storage, (sent,)) if sent is not None else reduce_storage(storage)  # type: ignore[no-untyped-call]

    def reduce_td(td: TensorDict) -> Any:
        parts = take_apart(td) if os.getpid() == pid else None
        if parts is not None:
            storage, tree = parts
            sent = pool.send(storage)
            if sent is not None:
                return _put_together, (sent, tree)
        return copyreg.dispatch_table[TensorDict](td)

    ForkingPickler.register(torch.UntypedStorage, reduce)
    ForkingPickler.register(TensorDict, reduce_td)
    return pool


def _put_together(sent: SegmentReference, tree: Tree) -> TensorDict:
    return put_together(_receive_storage(sent), tree)


def _receive_storage(sent: SegmentReference) -> torch.UntypedStorage:
    return torch.from_numpy(receive(sent)).untyped_storage()
