"""Buffers that are used again once nobody looks at them any more.

The first touch of a fresh page costs more than copying into it (2.6 against 17 GB/s, measured), so a batch's memory
goes back here when the last tensor over it is dropped, and the next batch is received into the same, already touched
pages.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from itertools import count
from typing import ClassVar

import numpy as np
import torch

MAX_POOLED_BYTES = 512 * 1024 * 1024
"""What may lie idle; beyond it, buffers are freed of the size that nobody has asked for the longest."""


class _Loan(np.ndarray):
    """A view that torch keeps alive for as long as any tensor uses the memory; its end is what returns the buffer."""


class BufferPool:
    """Hands out uint8 tensors and takes their memory back by itself.

    Threads: safe without a lock. A buffer comes back in whichever thread drops the last tensor, possibly in the middle
    of a garbage collection inside ``take``, where a lock would deadlock; the operations of ``deque`` and ``dict`` used
    here are atomic.
    """

    is_shared: ClassVar[bool] = False
    """Whether everything is to lie in its memory, so that other processes can map it."""

    def __init__(self, max_pooled_bytes: int = MAX_POOLED_BYTES) -> None:
        self._max_pooled_bytes = max_pooled_bytes
        self._idle: dict[int, deque[np.ndarray]] = {}
        self._idle_nbytes = 0
        self._clock = count()
        self._last_taken: dict[int, int] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns a uint8 tensor ``[nbytes]`` with undefined content.

        It and all its views may be used freely; the memory returns to the pool when the last of them is gone.
        """
        size = size_class(nbytes)
        self._last_taken[size] = next(self._clock)
        shelf = self._idle.setdefault(size, deque())
        try:
            memory = shelf.pop()
            self._idle_nbytes -= size
        except IndexError:
            memory = _allocate_aligned(size)
        loan = memory[:nbytes].view(_Loan)
        weakref.finalize(loan, self._give_back, memory).atexit = False
        return torch.from_numpy(loan)

    def _give_back(self, memory: np.ndarray) -> None:
        size = len(memory)
        if size <= self._max_pooled_bytes and self._has_room(size):
            self._idle_nbytes += size
            self._idle[size].append(memory)

    def _has_room(self, nbytes: int) -> bool:
        """Frees buffers of other sizes until so many bytes fit, those first that were asked for least recently: what a
        few long transfers have left behind must not keep out what every message needs."""
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


def size_class(nbytes: int) -> int:
    """Rounds up to one eighth of the next power of two, so that similar sizes share buffers and little is wasted."""
    if nbytes <= 4096:
        return 4096
    step = 1 << max((nbytes - 1).bit_length() - 3, 12)
    return -(-nbytes // step) * step


def _allocate_aligned(nbytes: int) -> np.ndarray:
    memory = np.empty(nbytes + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]
