"""Replay stores: small rows, where messages cost most, large rows, where bytes do, and what priorities add.

Every way to write or sample stands beside its floors: over a wire raw gloo, on one machine memory itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDictBase

from tdserve.bench.content import (
    check_equal,
    check_rows,
    compute_row_nbytes,
    compute_total_nbytes,
    make_pixels,
    make_transitions,
)
from tdserve.bench.figures import Figure, Scale, to_gigabytes
from tdserve.bench.floor_link import REQUEST_NBYTES
from tdserve.bench.floors import (
    LOCAL_GATHER,
    LOCAL_GATHER_TOUCHED,
    LOCAL_INDEXING,
    LOCAL_WRITE,
    MEMCPY,
    OVER_GLOO,
    TORCHRL,
    MappedRows,
    make_ring_memcpy,
)
from tdserve.bench.measure import Pacing, Round, Task, make_task, time_round
from tdserve.bench.stage import Stage
from tdserve.bench.torchrl_buffer import ContentName, TorchRLBuffer, has_torchrl
from tdserve.bench.workloads.replay_rounds import (
    NUM_BATCHES_UNDER_WAY,
    Batches,
    Check,
    make_pipelined_extends,
    make_pipelined_samples,
    make_single_extends,
    make_single_samples,
)
from tdserve.client.tables.replay import ReplayHandle
from tdserve.rules.replay.prioritized import Prioritized

SAMPLE_ROWS = 256

SMALL_ROWS = 4_096
"""Rows of the pool of transitions."""

LARGE_ROWS = 512
"""Rows of the pool of pixels, 56 KB each."""

BATCH_SIZES = (1, 64, 1_024)
WRITER_BATCH = 64
PIXEL_WRITE_ROWS = 64

NUM_EXTENDS_UNDER_WAY = 4
"""As many as the peers' benchmark kept in flight."""

MANY_EXTENDS_UNDER_WAY = 16
"""Extends that wait for others share requests with their neighbours: this many show what that brings."""

APPENDED_ROWS = 256
"""The number of different rows that are appended one by one, again and again."""

FILL_ROWS = 256
"""Rows per extend while a store is filled for the first time."""


def measure_transitions(stage: Stage) -> Iterator[Figure]:
    """Measures extends of 1, 64 and 1024 rows, single rows through a writer, and samples of 256 rows."""
    pool, capacity = make_transitions(SMALL_ROWS), stage.sizes.replay_rows
    with open_rows(stage, "transitions", pool, source_key="reward", capacity=capacity, torchrl="transitions") as rows:
        for num_rows in BATCH_SIZES:
            yield rows.write_one_by_one(num_rows, Scale("us"))
            yield rows.write_pipelined(num_rows, Scale("rows/s", num_rows))
        most = max(BATCH_SIZES)
        yield rows.write_pipelined(most, Scale("rows/s", most), window=MANY_EXTENDS_UNDER_WAY)
        yield rows.append(WRITER_BATCH)
        yield rows.sample_one_by_one(SAMPLE_ROWS, Scale("us"))
        yield rows.sample_pipelined(SAMPLE_ROWS, Scale("rows/s", SAMPLE_ROWS))


def measure_pixels(stage: Stage) -> Iterator[Figure]:
    """Measures extends of 64 rows (3.6 MB) and samples of 256 rows (14.5 MB)."""
    pool, capacity = make_pixels(LARGE_ROWS), stage.sizes.pixel_rows
    with open_rows(stage, "pixels", pool, source_key="action", capacity=capacity, torchrl="pixels") as rows:
        written, sampled = (
            Scale("GB/s", to_gigabytes(rows.compute_nbytes(each))) for each in (PIXEL_WRITE_ROWS, SAMPLE_ROWS)
        )
        yield rows.write_one_by_one(PIXEL_WRITE_ROWS, written)
        yield rows.write_pipelined(PIXEL_WRITE_ROWS, written)
        yield rows.sample_one_by_one(SAMPLE_ROWS, sampled)
        yield rows.sample_pipelined(SAMPLE_ROWS, sampled)


def measure_prioritized(stage: Stage) -> Iterator[Figure]:
    """Measures samples of 256 rows and updates of their priorities. The floor samples the same rows uniformly."""
    pool, capacity, name = make_transitions(SMALL_ROWS), stage.sizes.replay_rows, "prioritized"
    with (
        open_rows(stage, "uniform", pool, source_key="reward", capacity=capacity) as uniform,
        open_rows(stage, name, pool, source_key="reward", capacity=capacity, sampler=Prioritized()) as prioritized,
    ):
        priorities = torch.rand(SAMPLE_ROWS)

        def update(batch: TensorDictBase) -> None:
            prioritized.replay.update_priority(batch, priorities)

        for batch in prioritized.replay.batches(SAMPLE_ROWS, prefetch=1):
            update(batch)  # so that the priorities differ
            break
        drawn, plain = ((rows.replay, SAMPLE_ROWS, rows.check_sampled) for rows in (prioritized, uniform))
        floors = {"uniform": make_single_samples(*plain)}
        yield stage.measure(name, f"sample {SAMPLE_ROWS}, one by one", Scale("us"), make_single_samples(*drawn), floors)
        what, scale = f"sample {SAMPLE_ROWS}, {NUM_BATCHES_UNDER_WAY} under way", Scale("rows/s", SAMPLE_ROWS)
        floors = {"uniform": make_pipelined_samples(*plain)}
        yield stage.measure(name, what, scale, make_pipelined_samples(*drawn), floors)
        yield stage.measure(
            name, f"{what}, and update", scale, make_pipelined_samples(*drawn, after_each=update), floors
        )
        batch = prioritized.replay.sample(SAMPLE_ROWS)
        subject = make_task(lambda: update(batch))
        yield stage.measure(name, f"update {SAMPLE_ROWS} priorities", Scale("us"), subject)


@dataclass(frozen=True)
class Rows:
    """One replay store under test, and what its floors need.

    Attributes:
        stage: What it stands on.
        workload: The workload's name in the figures.
        pool: The rows that are written.
        capacity: The number of rows of the store.
        replay: The store.
        check_sampled: Raises CorruptDataError unless a batch is rows of the pool.
        mapped: The same rows, memory-mapped in this process.
        torchrl: The same rows in TorchRL's buffer; ``None`` where it is not installed, or not compared with.
    """

    stage: Stage
    workload: str
    pool: TensorDictBase
    capacity: int
    replay: ReplayHandle
    check_sampled: Check
    mapped: MappedRows
    torchrl: TorchRLBuffer | None

    def make_batches(self, num_rows: int) -> Batches:
        """Returns a function that returns the pool's batches of ``num_rows`` rows, one after the other, for ever."""
        starts = range(0, len(self.pool) - num_rows + 1, num_rows)
        return cycle([self.pool[start : start + num_rows] for start in starts]).__next__

    def compute_nbytes(self, num_rows: int) -> int:
        """Returns the payload of so many rows."""
        return compute_row_nbytes(self.pool) * num_rows

    def write_one_by_one(self, num_rows: int, scale: Scale) -> Figure:
        """Measures extends each of which waits for its acknowledgement."""
        subject = make_single_extends(self.replay, self.make_batches(num_rows), self._check_written)
        floors = self.write_floors(num_rows, is_acknowledged=True)
        return self._measure(f"extend {num_rows}, one by one", scale, subject, floors)

    def write_pipelined(self, num_rows: int, scale: Scale, *, window: int = NUM_EXTENDS_UNDER_WAY) -> Figure:
        """Measures extends of which ``window`` are under way."""
        subject = make_pipelined_extends(self.replay, self.make_batches(num_rows), window, self._check_written)
        floors = self.write_floors(num_rows, is_acknowledged=False)
        return self._measure(f"extend {num_rows}, {window} under way", scale, subject, floors)

    def append(self, batch: int) -> Figure:
        """Measures single rows through a writer. The round ends when all are acknowledged."""
        next_row = cycle([self.pool[number] for number in range(APPENDED_ROWS)]).__next__

        def run_round(pacing: Pacing) -> Round:
            with self.replay.writer(batch=batch) as writer:
                return time_round(lambda: writer.append(next_row()), pacing, finish=writer.flush)

        return self._measure(f"append through writer({batch})", Scale("rows/s"), Task(run_round), {})

    def sample_one_by_one(self, num_rows: int, scale: Scale) -> Figure:
        """Measures samples each of which is asked for when the one before is there."""
        return self._sample(num_rows, "one by one", scale, make_single_samples)

    def sample_pipelined(self, num_rows: int, scale: Scale) -> Figure:
        """Measures samples of which eight are under way."""
        return self._sample(num_rows, f"{NUM_BATCHES_UNDER_WAY} under way", scale, make_pipelined_samples)

    def write_floors(self, num_rows: int, *, is_acknowledged: bool) -> dict[str, Task]:
        """Returns the floors of extends. Memory acknowledges nothing."""
        stage, nbytes = self.stage, self.compute_nbytes(num_rows)
        if stage.wire == "shm":
            whole, ring = compute_total_nbytes(self.pool), self.compute_nbytes(self.capacity)
            first = {MEMCPY: make_ring_memcpy(nbytes, source_nbytes=whole, ring_nbytes=ring)}
        elif is_acknowledged:
            first = {"gloo, acknowledged": stage.make_gloo_floor(out=nbytes, back=REQUEST_NBYTES)}
        else:
            first = {"gloo stream": stage.make_gloo_floor(out=nbytes)}
        return {**first, LOCAL_WRITE: self.mapped.write(self.make_batches(num_rows))}

    def read_floors(self, num_rows: int, samples: Callable[..., Task]) -> dict[str, Task]:
        """Returns the floors of one of the two ways to sample."""
        stage, mapped = self.stage, self.mapped
        if stage.wire == "shm":
            gloo_replay = stage.gloo_client.replay(self.workload)
            return {
                LOCAL_GATHER: mapped.select(num_rows),
                LOCAL_GATHER_TOUCHED: mapped.select_into(num_rows),
                LOCAL_INDEXING: mapped.gather(num_rows),
                **({} if self.torchrl is None else {TORCHRL: self.torchrl.sample(num_rows)}),
                OVER_GLOO: samples(gloo_replay, num_rows, self.check_sampled),
            }
        is_single = samples is make_single_samples
        name, request = ("gloo, asked for", REQUEST_NBYTES) if is_single else ("gloo stream", 0)
        return {
            name: stage.make_gloo_floor(out=request, back=self.compute_nbytes(num_rows)),
            "local memmap": mapped.gather(num_rows),
        }

    def _sample(self, num_rows: int, way: str, scale: Scale, samples: Callable[..., Task]) -> Figure:
        subject = samples(self.replay, num_rows, self.check_sampled)
        return self._measure(f"sample {num_rows}, {way}", scale, subject, self.read_floors(num_rows, samples))

    def _measure(self, name: str, scale: Scale, subject: Task, floors: dict[str, Task]) -> Figure:
        return self.stage.measure(self.workload, name, scale, subject, floors)

    def _check_written(self, index: object, batch: TensorDictBase) -> None:
        check_equal(self.replay[index], batch, what=f"rows of {self.workload} read back")


@contextmanager
def open_rows(
    stage: Stage,
    workload: str,
    pool: TensorDictBase,
    *,
    source_key: str,
    capacity: int,
    sampler: Any = None,
    torchrl: ContentName | None = None,
) -> Iterator[Rows]:
    """Creates the store and its local counterparts, all full: no page is touched for the first time while measured.

    Args:
        stage: What it stands on.
        workload: The workload's name in the figures.
        pool: The rows to write.
        source_key: The leaf of the pool that holds a row's number in it.
        capacity: The number of rows of the store.
        sampler: The store's sampler.
        torchrl: The content that TorchRL's buffer gets, to be compared with on one machine; ``None`` for none.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(dir=stage.folder)))
        buffer = None
        if stage.wire == "shm" and torchrl is not None and has_torchrl():
            buffer = stack.enter_context(closing(TorchRLBuffer(torchrl, len(pool), capacity, folder / "torchrl")))
        mapped = MappedRows(pool, capacity, folder / "mapped")
        filling = islice(cycle(pool.split(FILL_ROWS)), capacity // FILL_ROWS)
        replay = stack.enter_context(stage.open_replay(workload, pool[0], capacity, filling, sampler=sampler))
        check = partial(check_rows, pool=pool, source_key=source_key, what=f"a sample of {workload}")
        if buffer is not None:
            buffer.wait_until_full()
        yield Rows(stage, workload, pool, capacity, replay, check, mapped, buffer)
