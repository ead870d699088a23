"""What workloads over a replay store share: writing and sampling, one by one and pipelined, each beside its floors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDictBase

from tdserve.bench.content import check_equal, check_rows, row_nbytes
from tdserve.bench.figures import Figure, Scale, Target
from tdserve.bench.floors import MappedRows
from tdserve.bench.measure import Round, Task, timed_round
from tdserve.bench.stage import Stage
from tdserve.bench.torchrl_buffer import ContentName, TorchRLBuffer, has_torchrl
from tdserve.bench.workloads.replay_rounds import (
    NUM_BATCHES_UNDER_WAY,
    Batches,
    Check,
    pipelined_extends,
    pipelined_samples,
    single_samples,
)
from tdserve.bench.workloads.row_floors import TORCHRL, GlooRowFloors, RowFloors, ShmRowFloors
from tdserve.client.tables.replay import ReplayHandle

NUM_EXTENDS_UNDER_WAY = 4
"""As many as the peers' benchmark kept in flight."""

MANY_EXTENDS_UNDER_WAY = 16
"""Extends that wait for others share requests with their neighbours: this many show what that brings."""

APPENDED_ROWS = 256
"""Different rows that are appended one by one, again and again."""

FILL_ROWS = 256
"""Rows per extend while a store is filled for the first time."""


@dataclass(frozen=True)
class Rows:
    """One replay store under test, its content and its floors.

    Attributes:
        stage: What it stands on.
        workload: Name in the figures.
        pool: The rows that are written.
        replay: The store.
        floors: What its figures are measured against, over the transport under test.
        check_sampled: Raises CorruptDataError unless a batch is rows of the pool.
    """

    stage: Stage
    workload: str
    pool: TensorDictBase
    replay: ReplayHandle
    floors: RowFloors
    check_sampled: Check

    def batches(self, num_rows: int) -> Batches:
        """Returns the pool's batches of ``num_rows`` rows, one after the other, for ever."""
        starts = range(0, len(self.pool) - num_rows + 1, num_rows)
        return cycle([self.pool[start : start + num_rows] for start in starts]).__next__

    def nbytes(self, num_rows: int) -> int:
        """Payload of so many rows."""
        return row_nbytes(self.pool) * num_rows

    def write_one_by_one(self, num_rows: int, scale: Scale, *, targets: Sequence[Target] = ()) -> Figure:
        """Each extend waits for its acknowledgement."""
        next_batch = self.batches(num_rows)

        def put() -> tuple[torch.Tensor, TensorDictBase]:
            batch = next_batch()
            return self.replay.extend(batch), batch

        floors = self.floors.store(num_rows, self.batches(num_rows))
        subject = Task(lambda: timed_round(put, self.stage.pacing), lambda last: self._check_written(*last))
        return self._measure(f"extend {num_rows}, one by one", scale, subject, floors, targets)

    def write_pipelined(
        self, num_rows: int, scale: Scale, *, window: int = NUM_EXTENDS_UNDER_WAY, targets: Sequence[Target] = ()
    ) -> Figure:
        """So many extends are under way; the round ends when all are acknowledged."""
        next_batch = self.batches(num_rows)
        subject = pipelined_extends(self.replay, next_batch, window, self.stage.pacing, self._check_written)
        floors = self.floors.stream_out(num_rows, self.batches(num_rows))
        return self._measure(f"extend {num_rows}, {window} under way", scale, subject, floors, targets)

    def append(self, batch: int, scale: Scale, *, targets: Sequence[Target] = ()) -> Figure:
        """Single rows through a writer; the round ends when all are acknowledged."""
        next_row = cycle([self.pool[number] for number in range(APPENDED_ROWS)]).__next__

        def run_round() -> Round:
            with self.replay.writer(batch=batch) as writer:
                return timed_round(lambda: writer.append(next_row()), self.stage.pacing, finish=writer.flush)

        return self._measure(f"append through writer({batch})", scale, Task(run_round), {}, targets)

    def sample_one_by_one(self, num_rows: int, scale: Scale, *, targets: Sequence[Target] = ()) -> Figure:
        """Each sample is asked for when the one before is there."""
        subject = single_samples(self.replay, num_rows, self.stage.pacing, self.check_sampled)
        floors = self.floors.fetch(num_rows)
        return self._measure(f"sample {num_rows}, one by one", scale, subject, floors, targets)

    def sample_pipelined(self, num_rows: int, scale: Scale, *, targets: Sequence[Target] = ()) -> Figure:
        """The sampler keeps eight batches under way."""
        subject = pipelined_samples(self.replay, num_rows, self.stage.pacing, self.check_sampled)
        floors = self.floors.stream_in(num_rows)
        return self._measure(f"sample {num_rows}, {NUM_BATCHES_UNDER_WAY} under way", scale, subject, floors, targets)

    def _measure(
        self, name: str, scale: Scale, subject: Task, floors: dict[str, Task], targets: Sequence[Target]
    ) -> Figure:
        """Without torchrl, the targets that mean it are left out."""
        kept = [target for target in targets if target.floor != TORCHRL or TORCHRL in floors]
        return self.stage.measure(self.workload, name, scale, subject, floors, targets=kept)

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
    """Creates the store and its local counterpart, both full: no page is touched for the first time while measured.

    Args:
        source_key: The leaf of the pool that holds a row's number in it.
        torchrl: The content that TorchRL's buffer gets, to be compared with on one machine; ``None`` for none.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(dir=stage.folder)))
        buffer = None
        if stage.wire == "shm" and torchrl is not None and has_torchrl():
            buffer = stack.enter_context(closing(TorchRLBuffer(torchrl, len(pool), capacity, folder / "torchrl")))
        mapped = MappedRows(pool, capacity, folder / "mapped")
        replay = stage.client.create_replay(workload, like=pool[0], capacity=capacity, sampler=sampler)
        stack.callback(stage.client.delete, workload)

        check = partial(check_rows, pool=pool, source_key=source_key, what=f"a sample of {workload}")
        floors: RowFloors = GlooRowFloors(stage, pool, mapped)
        if stage.wire == "shm":
            gloo_replay = stage.gloo_client.replay(workload)
            floors = ShmRowFloors(stage, pool, mapped, buffer, gloo_replay, capacity, check)
        rows = Rows(stage, workload, pool, replay, floors, check)
        next_batch = rows.batches(FILL_ROWS)
        for _ in range(capacity // FILL_ROWS):
            replay.extend(next_batch())
        if buffer is not None:
            buffer.wait_until_full()
        yield rows
