"""The floors: raw gloo between two processes, memcpy, and a memory-mapped tensordict in this process.

No server can be faster than what its bytes pass through. A floor moves the bytes of one operation of a workload and
does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase

from tdserve.bench.content import tensors
from tdserve.bench.floor_link import REQUEST_NBYTES, WHOLE, FloorLink
from tdserve.bench.measure import Pacing, Round, Task, timed_round

MEMCPY = "memcpy, touched pages"
"""The name of copies into memory whose pages exist, among the floors of a figure."""

FIRST_NUM_OPS = 4
"""The first round of a floor only finds out how long one operation takes."""


class GlooFloor:
    """Rounds of one exchange over the raw link, as many operations each as fill the round by the last one's speed."""

    def __init__(
        self, link: FloorLink, pacing: Pacing, *, nbytes_out: int, nbytes_in: int, message_nbytes: int = WHOLE
    ) -> None:
        self._link = link
        self._pacing = pacing
        self._sizes = (nbytes_out, nbytes_in)
        self._message_nbytes = message_nbytes
        self._num_ops = max(FIRST_NUM_OPS, pacing.min_ops)

    def run_round(self) -> Round:
        """Moves the bytes; both ends must agree on the number of operations before the first."""
        done = self._link.exchange(*self._sizes, num_ops=self._num_ops, message_nbytes=self._message_nbytes)
        wanted = int(self._pacing.round_s * done.ops_per_s)
        self._num_ops = min(max(wanted, self._pacing.min_ops), self._pacing.max_ops)
        return done


@dataclass(frozen=True)
class GlooFloors:
    """The gloo floors that workloads ask for, as tasks."""

    link: FloorLink
    pacing: Pacing

    def stream_out(self, nbytes: int, *, message_nbytes: int = WHOLE) -> Task:
        """One message after the other to the peer: what pipelined writes can reach."""
        return self._task(nbytes, 0, message_nbytes)

    def stream_in(self, nbytes: int, *, message_nbytes: int = WHOLE) -> Task:
        """One message after the other from the peer: what pipelined reads can reach."""
        return self._task(0, nbytes, message_nbytes)

    def fetch(self, nbytes: int, *, message_nbytes: int = WHOLE) -> Task:
        """A small request, then the payload: what one read can reach."""
        return self._task(REQUEST_NBYTES, nbytes, message_nbytes)

    def store(self, nbytes: int, *, message_nbytes: int = WHOLE) -> Task:
        """The payload, then a small acknowledgement: what one write can reach."""
        return self._task(nbytes, REQUEST_NBYTES, message_nbytes)

    def echo(self, nbytes: int) -> Task:
        """The payload there and back: what passing it on through a third process can reach."""
        return self._task(nbytes, nbytes, WHOLE)

    def _task(self, nbytes_out: int, nbytes_in: int, message_nbytes: int) -> Task:
        floor = GlooFloor(
            self.link, self.pacing, nbytes_out=nbytes_out, nbytes_in=nbytes_in, message_nbytes=message_nbytes
        )
        return Task(floor.run_round)


def _local(run_round: Callable[[], Round]) -> Task:
    """A floor that torch works at in this process, with one thread.

    Two are hardly faster on memory (17.4 against 16.6 GB/s, measured), and where another process wants a core, each of
    their copies waits for a time slice: 50 ms for what takes 0.1 ms otherwise (measured).
    """

    def run_with_one_thread() -> Round:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return run_round()
        finally:
            torch.set_num_threads(num_threads)

    return Task(run_with_one_thread)


def memcpy_touched(nbytes: int, pacing: Pacing) -> Task:
    """A copy into memory whose pages exist."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    return _local(lambda: timed_round(lambda: target.copy_(source), pacing))


def memcpy_fresh(nbytes: int, pacing: Pacing) -> Task:
    """A copy into memory that the kernel still has to find and clear, as every call without ``out=`` needs it."""
    source = torch.ones(nbytes, dtype=torch.uint8)

    def put() -> None:
        torch.empty(nbytes, dtype=torch.uint8).copy_(source)

    return _local(lambda: timed_round(put, pacing))


def memcpy_ring(nbytes: int, *, source_nbytes: int, ring_nbytes: int, pacing: Pacing) -> Task:
    """Copies of ``nbytes`` bytes, each from the next place of the source to the next of a ring whose pages exist.

    A copy from and to the same few megabytes again and again would run in the processor's caches, which no batch of a
    replay does.
    """
    source = torch.ones(max(source_nbytes, nbytes), dtype=torch.uint8)
    ring = torch.zeros(max(ring_nbytes, nbytes), dtype=torch.uint8)
    sources = cycle(range(0, len(source) - nbytes + 1, nbytes))
    places = cycle(range(0, len(ring) - nbytes + 1, nbytes))

    def put() -> None:
        start, place = next(sources), next(places)
        ring[place : place + nbytes].copy_(source[start : start + nbytes])

    return _local(lambda: timed_round(put, pacing))


class MappedRows:
    """A local memory-mapped tensordict: the rows of a pool, repeated until ``num_rows``."""

    def __init__(self, pool: TensorDictBase, num_rows: int, folder: Path) -> None:
        self._rows: TensorDict = pool[:1].expand(num_rows).memmap_like(folder, existsok=False)
        for start in range(0, num_rows, len(pool)):
            self._rows[start : start + len(pool)] = pool[: min(len(pool), num_rows - start)]
        self._num_rows = num_rows
        self._generator = torch.Generator().manual_seed(0)

    def gather(self, num_rows: int, pacing: Pacing) -> Task:
        """Reads random rows as users do, ``rows[index]``: torch's advanced indexing copies element by element."""

        def draw() -> None:
            _ = self._rows[self._draw(num_rows)]

        return _local(lambda: timed_round(draw, pacing))

    def select(self, num_rows: int, pacing: Pacing) -> Task:
        """Reads random rows leaf by leaf with ``index_select``, which copies row by row, into new tensors."""
        leaves = [leaf for leaf, _ in self._leaves(0)]

        def draw() -> None:
            index = self._draw(num_rows)
            _ = [torch.index_select(leaf, 0, index) for leaf in leaves]

        return _local(lambda: timed_round(draw, pacing))

    def select_into(self, num_rows: int, pacing: Pacing) -> Task:
        """As ``select``, again and again into the same tensors, whose pages exist."""
        leaves = self._leaves(num_rows)

        def draw() -> None:
            index = self._draw(num_rows)
            for leaf, out in leaves:
                torch.index_select(leaf, 0, index, out=out)

        return _local(lambda: timed_round(draw, pacing))

    def write(self, batches: Callable[[], TensorDictBase], pacing: Pacing) -> Task:
        """Writes batches one behind the other, around the ring."""
        cursor = 0

        def put() -> None:
            nonlocal cursor
            batch = batches()
            if cursor + len(batch) > self._num_rows:
                cursor = 0
            self._rows[cursor : cursor + len(batch)] = batch
            cursor += len(batch)

        return _local(lambda: timed_round(put, pacing))

    def _draw(self, num_rows: int) -> torch.Tensor:
        return torch.randint(self._num_rows, (num_rows,), generator=self._generator)

    def _leaves(self, num_rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The leaves as plain tensors over the mapped memory, each with a touched tensor of so many rows."""
        plain = [leaf.as_subclass(torch.Tensor) for leaf in tensors(self._rows).values()]
        return [(leaf, torch.ones_like(leaf[:num_rows])) for leaf in plain]
