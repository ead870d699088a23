"""The floors: raw gloo between two processes, memcpy, and a memory-mapped tensordict in this process.

No server can be faster than what its bytes pass through. A floor moves the bytes of one operation of a workload and
does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase

from tdserve.bench.measure import Pacing, Round, Task, time_round
from tdserve.bench.workload_data import Pool, list_tensors

MEMCPY = "memcpy, touched pages"
"""Copies into memory whose pages exist. This name and those below are names of floors in the figures."""

LOCAL_MEMMAP = "local memmap"
LOCAL_GATHER = "local gather, fresh"
"""``index_select`` leaf by leaf into new tensors, with one thread: the least that a sample has to do."""
LOCAL_GATHER_TOUCHED = "local gather, reused"
LOCAL_INDEXING = "local rows[index]"
TORCHRL = "TorchRL in process"
GLOO_AND_GATHER = "asked for, then gathered"
OVER_GLOO = "tdserve over gloo"
SAMPLE = "sample"


def _make_local(operation: Callable[[], object]) -> Task:
    """Returns a floor that torch works at in this process, with one thread. What an operation returns is dropped.

    Two threads are hardly faster on memory (17.4 against 16.6 GB/s, measured). Where another process needs a core, each
    of their copies waits for a time slice: 50 ms for what otherwise takes 0.1 ms (measured).
    """

    def operate() -> None:
        operation()  # the memory of what it returns is free again within its time

    def run_round(pacing: Pacing) -> Round:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return time_round(operate, pacing)
        finally:
            torch.set_num_threads(num_threads)

    return Task(run_round)


def make_memcpy(nbytes: int, *, source_nbytes: int = 0, ring_nbytes: int = 0) -> Task:
    """Returns copies of ``nbytes`` bytes, each from the next place of a source to the next place of a ring.

    All pages exist. Copies between the same few megabytes would run in the processor's caches, which no batch of a
    replay does. Where no sizes are given, source and ring have one place.
    """
    source, ring = (
        torch.ones(max(size // nbytes, 1), nbytes, dtype=torch.uint8) for size in (source_nbytes, ring_nbytes)
    )
    sources, places = cycle(range(len(source))), cycle(range(len(ring)))

    def put() -> None:
        ring[next(places)].copy_(source[next(sources)])

    return _make_local(put)


def make_fresh_memcpy(nbytes: int) -> Task:
    """Returns copies into memory that the kernel still has to find and clear, as for every call without ``out=``."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    return _make_local(lambda: torch.empty_like(source).copy_(source))


class MappedRows:
    """A local memory-mapped tensordict of ``num_rows`` rows: those of a pool, repeated."""

    def __init__(self, pool: Pool, num_rows: int, folder: Path) -> None:
        rows = pool.rows
        self._rows: TensorDict = rows[:1].expand(num_rows).memmap_like(folder, existsok=False)
        for start in range(0, num_rows, len(rows)):
            self._rows[start : start + len(rows)] = rows[: num_rows - start]
        self._num_rows = num_rows
        self._generator = torch.Generator().manual_seed(0)

    def gather(self, num_rows: int) -> Task:
        """Returns reads of random rows as users do them, ``rows[index]``: torch copies element by element."""
        return _make_local(lambda: self._rows[self._draw(num_rows)])

    def select(self, num_rows: int, *, is_fresh: bool) -> Task:
        """Returns reads of random rows by ``index_select`` for each leaf: it copies row by row.

        They go into new tensors, or into the same tensors each time, whose pages exist.
        """
        leaves = [leaf.as_subclass(torch.Tensor) for leaf in list_tensors(self._rows).values()]
        outs = [None if is_fresh else torch.ones_like(leaf[:num_rows]) for leaf in leaves]

        def draw() -> list[torch.Tensor]:
            index = self._draw(num_rows)
            return [torch.index_select(leaf, 0, index, out=out) for leaf, out in zip(leaves, outs, strict=True)]

        return _make_local(draw)

    def write(self, batches: Iterator[TensorDictBase]) -> Task:
        """Returns writes of batches, one behind the other, around the ring."""
        cursor = 0

        def put() -> None:
            nonlocal cursor
            batch = next(batches)
            if cursor + len(batch) > self._num_rows:
                cursor = 0
            self._rows[cursor : cursor + len(batch)] = batch
            cursor += len(batch)

        return _make_local(put)

    def _draw(self, num_rows: int) -> torch.Tensor:
        return torch.randint(self._num_rows, (num_rows,), generator=self._generator)
