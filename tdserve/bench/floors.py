"""The floors: raw gloo between two processes, memcpy, and a memory-mapped tensordict in this process.

No server can be faster than what its bytes pass through. A floor moves the bytes of one operation of a workload and
does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase

from tdserve.bench.content import list_tensors
from tdserve.bench.floor_link import WHOLE, FloorLink
from tdserve.bench.measure import Pacing, Round, Task, time_round

MEMCPY = "memcpy, touched pages"
"""Copies into memory whose pages exist. This name and those below are names of floors in the figures."""

LOCAL_WRITE = "local memmap"
LOCAL_GATHER = "local gather, fresh"
"""``index_select`` leaf by leaf into new tensors, with one thread: the least that a sample has to do."""
LOCAL_GATHER_TOUCHED = "local gather, reused"
LOCAL_INDEXING = "local rows[index]"
TORCHRL = "TorchRL in process"
OVER_GLOO = "tdserve over gloo"
SAMPLE = "sample"

FIRST_NUM_OPS = 4
"""The first round of a floor only finds out how long one operation takes."""


def make_gloo_floor(link: FloorLink, *, out: int = 0, back: int = 0, message_nbytes: int = WHOLE) -> Task:
    """Returns exchanges over the raw link.

    Both ends agree on their number before a round, so each round is as long as the speed of the last one tells.

    Args:
        link: To the other process.
        out: Bytes to the other process in each operation.
        back: Bytes back from it. Where ``out`` or ``back`` is 0, the operations are a stream.
        message_nbytes: Size of the largest message.
    """
    ops_per_s: float | None = None

    def run_round(pacing: Pacing) -> Round:
        nonlocal ops_per_s
        num_ops = max(FIRST_NUM_OPS, pacing.min_ops)
        if ops_per_s is not None:
            num_ops = min(max(int(pacing.round_s * ops_per_s), pacing.min_ops), pacing.max_ops)
        done = link.exchange(out, back, num_ops=num_ops, message_nbytes=message_nbytes)
        ops_per_s = done.ops_per_s
        return done

    return Task(run_round)


def _make_local(operation: Callable[[], object]) -> Task:
    """Returns a floor that torch works at in this process, with one thread.

    Two threads are hardly faster on memory (17.4 against 16.6 GB/s, measured). Where another process wants a core, each
    of their copies waits for a time slice: 50 ms for what otherwise takes 0.1 ms (measured).
    """

    def run_round(pacing: Pacing) -> Round:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return time_round(operation, pacing)
        finally:
            torch.set_num_threads(num_threads)

    return Task(run_round)


def make_touched_memcpy(nbytes: int) -> Task:
    """Returns copies into memory whose pages exist."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    return _make_local(lambda: target.copy_(source))


def make_fresh_memcpy(nbytes: int) -> Task:
    """Returns copies into memory that the kernel still has to find and clear, as for every call without ``out=``."""
    source = torch.ones(nbytes, dtype=torch.uint8)

    def put() -> None:
        torch.empty(nbytes, dtype=torch.uint8).copy_(source)

    return _make_local(put)


def make_ring_memcpy(nbytes: int, *, source_nbytes: int, ring_nbytes: int) -> Task:
    """Returns copies of ``nbytes`` bytes, each from the next place of a source to the next place of a ring.

    The pages of the ring exist. Copies between the same few megabytes would run in the processor's caches, which no
    batch of a replay does.
    """
    source = torch.ones(max(source_nbytes, nbytes), dtype=torch.uint8)
    ring = torch.zeros(max(ring_nbytes, nbytes), dtype=torch.uint8)
    sources = cycle(range(0, len(source) - nbytes + 1, nbytes))
    places = cycle(range(0, len(ring) - nbytes + 1, nbytes))

    def put() -> None:
        start, place = next(sources), next(places)
        ring[place : place + nbytes].copy_(source[start : start + nbytes])

    return _make_local(put)


class MappedRows:
    """A local memory-mapped tensordict of ``num_rows`` rows: those of a pool, repeated."""

    def __init__(self, pool: TensorDictBase, num_rows: int, folder: Path) -> None:
        self._rows: TensorDict = pool[:1].expand(num_rows).memmap_like(folder, existsok=False)
        for start in range(0, num_rows, len(pool)):
            self._rows[start : start + len(pool)] = pool[: min(len(pool), num_rows - start)]
        self._num_rows = num_rows
        self._generator = torch.Generator().manual_seed(0)

    def gather(self, num_rows: int) -> Task:
        """Returns reads of random rows as users do them, ``rows[index]``: torch copies element by element."""

        def draw() -> None:
            _ = self._rows[self._draw(num_rows)]

        return _make_local(draw)

    def select(self, num_rows: int) -> Task:
        """Returns reads of random rows into new tensors, by ``index_select`` for each leaf: it copies row by row."""
        leaves = [leaf for leaf, _ in self._leaves(0)]

        def draw() -> None:
            index = self._draw(num_rows)
            _ = [torch.index_select(leaf, 0, index) for leaf in leaves]

        return _make_local(draw)

    def select_into(self, num_rows: int) -> Task:
        """Returns the same reads, but into the same tensors each time, whose pages exist."""
        leaves = self._leaves(num_rows)

        def draw() -> None:
            index = self._draw(num_rows)
            for leaf, out in leaves:
                torch.index_select(leaf, 0, index, out=out)

        return _make_local(draw)

    def write(self, batches: Callable[[], TensorDictBase]) -> Task:
        """Returns writes of batches, one behind the other, around the ring."""
        cursor = 0

        def put() -> None:
            nonlocal cursor
            batch = batches()
            if cursor + len(batch) > self._num_rows:
                cursor = 0
            self._rows[cursor : cursor + len(batch)] = batch
            cursor += len(batch)

        return _make_local(put)

    def _draw(self, num_rows: int) -> torch.Tensor:
        return torch.randint(self._num_rows, (num_rows,), generator=self._generator)

    def _leaves(self, num_rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the leaves as plain tensors over the mapped memory, each with a touched tensor of so many rows."""
        plain = [leaf.as_subclass(torch.Tensor) for leaf in list_tensors(self._rows).values()]
        return [(leaf, torch.ones_like(leaf[:num_rows])) for leaf in plain]
