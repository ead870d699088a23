"""Buffers that are reused once no tensor uses them any more.

The first touch of a fresh page costs more than copying into it (2.6 against 17 GB/s, measured). So a batch's memory
returns here when its last tensor is dropped, and the next batch is received into the same pages.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import count
from typing import ClassVar

import numpy as np
import torch

MAX_POOLED_BYTES = 512 * 1024 * 1024
"""Idle memory that is kept; beyond it, buffers of the sizes that were requested least recently are freed."""


class _PooledView(np.ndarray):
    """A view that torch keeps alive as long as a tensor uses the memory; its end returns the buffer.

    ``weakref.finalize`` would do the same and takes twice as long as all the rest of ``take``.
    """

    loan: tuple[BufferPool, np.ndarray] | None = None
    """The pool and the whole buffer; None of a view of this view."""

    def __del__(self) -> None:
        if self.loan is not None:
            pool, memory = self.loan
            pool.take_back(memory)


class BufferPool:
    """Lends uint8 tensors and takes their memory back automatically.

    Threads: safe without a lock. A buffer returns in whichever thread drops the last tensor, possibly during a garbage
    collection inside ``take``, where a lock would deadlock. The operations of ``deque`` and ``dict`` used here are
    atomic.
    """

    is_shared: ClassVar[bool] = False
    """Whether all content is to lie in its memory, so that other processes can map it."""

    def __init__(self, max_pooled_bytes: int = MAX_POOLED_BYTES) -> None:
        self._max_pooled_bytes = max_pooled_bytes
        self._idle: dict[int, deque[np.ndarray]] = {}
        self._idle_nbytes = 0
        self._clock = count()
        self._last_taken: dict[int, int] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns a uint8 tensor ``[nbytes]`` with undefined content.

        The tensor and all its views may be used freely; the memory returns to the pool with the last of them.
        """
        size = find_size_class(nbytes)
        self._last_taken[size] = next(self._clock)
        shelf = self._idle.setdefault(size, deque())
        try:
            memory = shelf.pop()
            self._idle_nbytes -= size
        except IndexError:
            memory = _allocate_aligned(size)
        view = memory[:nbytes].view(_PooledView)
        view.loan = self, memory
        return torch.from_numpy(view)

    def take_back(self, memory: np.ndarray) -> None:
        """Keeps a buffer that nothing uses any more; called by the end of its view."""
        size = len(memory)
        if size <= self._max_pooled_bytes and self._has_room(size):
            self._idle_nbytes += size
            self._idle[size].append(memory)

    def _has_room(self, nbytes: int) -> bool:
        """Frees buffers of other sizes until this many bytes fit, least recently requested sizes first: leftovers of a
        few long transfers must not displace what every message needs."""
        while self._idle_nbytes + nbytes > self._max_pooled_bytes:
            others = [size for size, shelf in list(self._idle.items()) if shelf and size != nbytes]
            if not others:
                return False
            oldest = min(others, key=self._last_taken.__getitem__)
            if self._last_taken[oldest] > self._last_taken[nbytes]:
                return False
            with suppress(IndexError):  # another thread took the last one
                self._idle[oldest].popleft()
                self._idle_nbytes -= oldest
        return True


def find_size_class(nbytes: int) -> int:
    """Rounds up to a multiple of an eighth of the next power of two, so that similar sizes share buffers and little is
    wasted."""
    if nbytes <= 4096:
        return 4096
    step = 1 << max((nbytes - 1).bit_length() - 3, 12)
    return -(-nbytes // step) * step


def _allocate_aligned(nbytes: int) -> np.ndarray:
    memory = np.empty(nbytes + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]
