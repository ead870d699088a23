"""Replay stores: small rows, where messages cost most, large rows, where bytes do, and what priorities add.

Every way to write or sample stands beside its floors: over a wire raw gloo, on one machine memory itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDictBase

from tdserve.bench.figures import Scale
from tdserve.bench.floor_link import REQUEST_NBYTES
from tdserve.bench.floors import (
    GLOO_AND_GATHER,
    LOCAL_GATHER,
    LOCAL_GATHER_TOUCHED,
    LOCAL_INDEXING,
    LOCAL_MEMMAP,
    MEMCPY,
    OVER_GLOO,
    TORCHRL,
    MappedRows,
    make_memcpy,
)
from tdserve.bench.measure import Pacing, Round, Task, add_tasks, make_task, time_round
from tdserve.bench.stage import Case, Stage
from tdserve.bench.torchrl_buffer import TorchRLBuffer, has_torchrl
from tdserve.bench.workload_data import Pool, check_equal, make_pixels, make_transitions
from tdserve.bench.workloads.replay_rounds import NUM_BATCHES_UNDER_WAY, describe_window, make_extends, make_samples
from tdserve.client.connecting import connect
from tdserve.client.tables.replay import ReplayHandle
from tdserve.rules.replay.samplers.prioritized import Prioritized

SAMPLE_ROWS = 256
LEARNER_ROWS = 128
"""The rows of a step of a DQN learner, which waits for no answer to its new priorities."""

SAMPLE_WINDOWS = (1, NUM_BATCHES_UNDER_WAY)

TRANSITIONS_POOL_ROWS = 4_096
PIXELS_POOL_ROWS = 512
"""They have 56 KB each."""

BATCH_SIZES = (1, 64, 1_024)
WRITER_BATCH = 64
PIXEL_WRITE_ROWS = 64

EXTEND_WINDOWS = (1, 4)
"""One by one, and as many as the peers' benchmark kept in flight."""

MANY_EXTENDS_UNDER_WAY = 16
"""Extends that wait for others share requests with their neighbours: this many show what that brings."""

APPENDED_ROWS = 256
"""The number of different rows that are appended one by one, again and again."""

FILL_ROWS = 256
"""Rows per extend while a store is filled for the first time."""


def measure_transitions(stage: Stage) -> Generator[Case]:
    """Measures extends of 1, 64 and 1024 rows, single rows through a writer, and samples of 256 rows."""
    with open_rows(stage, "transitions", make_transitions, TRANSITIONS_POOL_ROWS, stage.sizes.replay_rows) as rows:
        for num_rows in BATCH_SIZES:
            for window in EXTEND_WINDOWS:
                yield rows.extend(num_rows, window)
        yield rows.extend(max(BATCH_SIZES), MANY_EXTENDS_UNDER_WAY)
        yield rows.append(WRITER_BATCH)
        for window in SAMPLE_WINDOWS:
            yield rows.sample(SAMPLE_ROWS, window)


def measure_pixels(stage: Stage) -> Generator[Case]:
    """Measures extends of 64 rows (3.6 MB) and samples of 256 rows (14.5 MB)."""
    with open_rows(stage, "pixels", make_pixels, PIXELS_POOL_ROWS, stage.sizes.pixel_rows) as rows:
        for window in EXTEND_WINDOWS:
            yield rows.extend(PIXEL_WRITE_ROWS, window)
        for window in SAMPLE_WINDOWS:
            yield rows.sample(SAMPLE_ROWS, window)


def measure_prioritized(stage: Stage) -> Generator[Case]:
    """Measures samples of 256 rows and updates of their priorities. The floor samples the same rows uniformly."""
    pool, capacity = make_transitions(TRANSITIONS_POOL_ROWS), stage.sizes.replay_rows
    priorities = torch.rand(SAMPLE_ROWS)
    with (
        open_filled(stage, "uniform", pool, capacity) as uniform,
        open_filled(stage, "prioritized", pool, capacity, sampler=Prioritized()) as replay,
    ):

        def update(batch: TensorDictBase) -> None:
            replay.update_priority(batch, priorities)

        update(replay.sample(SAMPLE_ROWS))  # so that the priorities differ
        rate = Scale("rows/s", SAMPLE_ROWS)
        for window, scale in zip(SAMPLE_WINDOWS, (Scale("us"), rate), strict=True):
            subject, floor = (make_samples(each, SAMPLE_ROWS, window, pool.check) for each in (replay, uniform))
            name = f"sample {SAMPLE_ROWS}, {describe_window(window)}"
            yield Case(name, scale, subject, {"uniform": floor})
        subject = make_samples(replay, SAMPLE_ROWS, window, pool.check, after_each=update)
        yield Case(f"{name}, and update", rate, subject, {"uniform": floor})
        batch = replay.sample(SAMPLE_ROWS)
        yield Case(f"update {SAMPLE_ROWS} priorities", Scale("us"), make_task(lambda: update(batch)))
        priorities = torch.rand(LEARNER_ROWS)

        def learn() -> None:
            replay.update_priority(replay.sample(LEARNER_ROWS), priorities, return_early=True)

        yield Case(f"sample {LEARNER_ROWS} and update", Scale("us"), make_task(learn))


@dataclass(frozen=True)
class Rows:
    """One replay store under test, and what its floors need.

    Attributes:
        stage: What it stands on.
        pool: The rows that are written.
        capacity: The number of rows of the store.
        replay: The store.
        mapped: The same rows, memory-mapped in this process.
        over_gloo: The same store over gloo; ``None`` where that is the transport under test.
        torchrl: The same rows in TorchRL's buffer; ``None`` where it is not installed, or not compared with.
    """

    stage: Stage
    pool: Pool
    capacity: int
    replay: ReplayHandle
    mapped: MappedRows
    over_gloo: ReplayHandle | None
    torchrl: TorchRLBuffer | None

    def extend(self, num_rows: int, window: int) -> Case:
        """Measures extends, ``window`` of them under way."""
        nbytes = self.pool.row_nbytes * num_rows
        if self.over_gloo is not None:
            ring_nbytes = self.pool.row_nbytes * self.capacity
            floors = {MEMCPY: make_memcpy(nbytes, source_nbytes=self.pool.nbytes, ring_nbytes=ring_nbytes)}
        elif window == 1:
            floors = {"gloo, acknowledged": self.stage.link.make_floor(out=nbytes, back=REQUEST_NBYTES)}
        else:
            floors = self.stage.make_stream_floors(out=nbytes)
        floors[LOCAL_MEMMAP] = self.mapped.write(self.pool.iter_batches(num_rows))  # memory acknowledges nothing
        subject = make_extends(self.replay, self.pool.iter_batches(num_rows), window, self._check_written)
        return self._make_case("extend", num_rows, window, subject, floors)

    def append(self, batch: int) -> Case:
        """Measures single rows through a writer. The round ends when all are acknowledged."""
        rows = cycle([self.pool.rows[number] for number in range(APPENDED_ROWS)])

        def run_round(pacing: Pacing) -> Round:
            with self.replay.writer(batch=batch) as writer:
                return time_round(lambda: writer.append(next(rows)), pacing, finish=writer.flush)

        return Case(f"append through writer({batch})", Scale("rows/s"), Task(run_round))

    def sample(self, num_rows: int, window: int) -> Case:
        """Measures samples, ``window`` of them under way."""
        mapped, nbytes, link = self.mapped, self.pool.row_nbytes * num_rows, self.stage.link
        if self.over_gloo is not None:
            floors = {
                LOCAL_GATHER: mapped.select(num_rows, is_fresh=True),
                LOCAL_GATHER_TOUCHED: mapped.select(num_rows, is_fresh=False),
                LOCAL_INDEXING: mapped.gather(num_rows),
                **({} if self.torchrl is None else {TORCHRL: self.torchrl.make_floor(num_rows)}),
                OVER_GLOO: make_samples(self.over_gloo, num_rows, window, self.pool.check),
            }
        elif window == 1:
            asked = link.make_floor(out=REQUEST_NBYTES, back=nbytes)
            gather = mapped.select(num_rows, is_fresh=True)
            floors = {
                "gloo, asked for": asked,
                GLOO_AND_GATHER: add_tasks(asked, gather),
                LOCAL_MEMMAP: mapped.gather(num_rows),
            }
        else:
            floors = {**self.stage.make_stream_floors(back=nbytes), LOCAL_MEMMAP: mapped.gather(num_rows)}
        subject = make_samples(self.replay, num_rows, window, self.pool.check)
        return self._make_case("sample", num_rows, window, subject, floors)

    def _make_case(self, what: str, num_rows: int, window: int, subject: Task, floors: dict[str, Task]) -> Case:
        rate = self.pool.make_rate(num_rows)
        scale = Scale("us") if window == 1 and rate.unit == "rows/s" else rate
        return Case(f"{what} {num_rows}, {describe_window(window)}", scale, subject, floors)

    def _check_written(self, index: object, batch: TensorDictBase) -> None:
        check_equal(self.replay[index], batch, what="rows read back")


def open_filled(
    stage: Stage, name: str, pool: Pool, capacity: int, **options: Any
) -> AbstractContextManager[ReplayHandle]:
    """Creates a store and fills it: no page is touched for the first time while measured."""
    filling = islice(pool.iter_batches(FILL_ROWS), capacity // FILL_ROWS)
    return stage.open_replay(name, pool.rows[0], capacity, filling, **options)


@contextmanager
def open_rows(
    stage: Stage, name: str, make_pool: Callable[[int], Pool], num_pool_rows: int, capacity: int
) -> Iterator[Rows]:
    """Creates a full store and its full counterparts.

    Args:
        stage: What it stands on.
        name: The name of the store.
        make_pool: Makes the rows to write.
        num_pool_rows: The number of different rows.
        capacity: The number of rows of the store.
    """
    pool, over_gloo, torchrl = make_pool(num_pool_rows), None, None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(dir=stage.folder)))
        if stage.transport == "shm" and has_torchrl():
            torchrl = TorchRLBuffer(make_pool, num_pool_rows, capacity, folder / "torchrl")
            stack.enter_context(closing(torchrl))
        mapped = MappedRows(pool, capacity, folder / "mapped")
        replay = stack.enter_context(open_filled(stage, name, pool, capacity))
        if stage.transport == "shm":
            over_gloo = stack.enter_context(connect(stage.address, transport="gloo")).replay(name)
        if torchrl is not None:
            torchrl.recv()  # until it is full
        yield Rows(stage, pool, capacity, replay, mapped, over_gloo, torchrl)
