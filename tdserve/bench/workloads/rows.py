"""What workloads over a replay store share: writing and sampling, one by one and pipelined, each beside its floors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDictBase

from tdserve.bench.content import check_equal, check_rows, row_nbytes
from tdserve.bench.figures import Figure, Scale, Target, make_figure
from tdserve.bench.floors import MappedRows
from tdserve.bench.measure import SUBJECT, Round, Task, alternate, timed_round
from tdserve.bench.stage import Stage
from tdserve.client.replay import ReplayHandle

NUM_EXTENDS_UNDER_WAY = 4
"""As many as the peers' benchmark kept in flight."""

MANY_EXTENDS_UNDER_WAY = 16
"""Extends that wait for others share requests with their neighbours: this many show what that brings."""

NUM_BATCHES_UNDER_WAY = 8

APPENDED_ROWS = 256
"""Different rows that are appended one by one, again and again."""

FILL_ROWS = 256
"""Rows per extend while a store is filled for the first time."""


@dataclass(frozen=True)
class Rows:
    """One replay store under test, its content and its local counterpart.

    Attributes:
        stage: What it stands on.
        workload: Name in the figures.
        pool: The rows that are written; ``source_key`` holds a row's number in it.
        source_key: See there.
        replay: The store.
        mapped: The local memory-mapped tensordict.
    """

    stage: Stage
    workload: str
    pool: TensorDictBase
    source_key: str
    replay: ReplayHandle
    mapped: MappedRows

    def batches(self, num_rows: int) -> Callable[[], TensorDictBase]:
        """Returns the pool's batches of ``num_rows`` rows, one after the other, for ever."""
        starts = range(0, len(self.pool) - num_rows + 1, num_rows)
        return cycle([self.pool[start : start + num_rows] for start in starts]).__next__

    def nbytes(self, num_rows: int) -> int:
        """Payload of so many rows."""
        return row_nbytes(self.pool) * num_rows

    def write_one_by_one(self, num_rows: int, scale: Scale, *, target: Target | None = None) -> Figure:
        """Each extend waits for its acknowledgement."""
        next_batch = self.batches(num_rows)
        last: list[tuple[object, TensorDictBase]] = []

        def put() -> None:
            batch = next_batch()
            last[:] = [(self.replay.extend(batch), batch)]

        floors = {
            "gloo, acknowledged": self.stage.gloo.store(self.nbytes(num_rows)),
            "local memmap": self.mapped.write(self.batches(num_rows), self.stage.pacing),
        }
        subject = Task(lambda: timed_round(put, self.stage.pacing), lambda: self._check_written(*last[0]))
        return self._measure(f"extend {num_rows}, one by one", scale, target, floors=floors, subject=subject)

    def write_pipelined(
        self, num_rows: int, scale: Scale, *, window: int = NUM_EXTENDS_UNDER_WAY, target: Target | None = None
    ) -> Figure:
        """So many extends are under way; the round ends when all are acknowledged."""
        next_batch = self.batches(num_rows)
        under_way: deque[tuple[Future[torch.Tensor], TensorDictBase]] = deque()
        last: list[tuple[object, TensorDictBase]] = []

        def take() -> None:
            future, batch = under_way.popleft()
            last[:] = [(future.result(), batch)]

        def put() -> None:
            if len(under_way) == window:
                take()
            batch = next_batch()
            under_way.append((self.replay.extend(batch, return_early=True), batch))

        def drain() -> None:
            while under_way:
                take()

        floors = {
            "gloo stream": self.stage.gloo.stream_out(self.nbytes(num_rows)),
            "local memmap": self.mapped.write(self.batches(num_rows), self.stage.pacing),
        }
        subject = Task(lambda: timed_round(put, self.stage.pacing, finish=drain), lambda: self._check_written(*last[0]))
        name = f"extend {num_rows}, {window} under way"
        return self._measure(name, scale, target, floors=floors, subject=subject)

    def append(self, batch: int, scale: Scale, *, target: Target | None = None) -> Figure:
        """Single rows through a writer; the round ends when all are acknowledged."""
        next_row = cycle([self.pool[number] for number in range(APPENDED_ROWS)]).__next__

        def run_round() -> Round:
            with self.replay.writer(batch=batch) as writer:
                return timed_round(lambda: writer.append(next_row()), self.stage.pacing, finish=writer.flush)

        series = alternate({SUBJECT: Task(run_round)}, self.stage.num_rounds)
        return make_figure(
            self.workload, f"append through writer({batch})", scale, subject=series[SUBJECT], floors={}, target=target
        )

    def sample_one_by_one(self, num_rows: int, scale: Scale, *, target: Target | None = None) -> Figure:
        """Each sample is asked for when the one before is there."""
        last: list[TensorDictBase] = []

        def draw() -> None:
            last[:] = [self.replay.sample(num_rows)]

        floors = self.floors_of_sample(num_rows)
        subject = Task(lambda: timed_round(draw, self.stage.pacing), lambda: self.check_sampled(last[0]))
        return self._measure(f"sample {num_rows}, one by one", scale, target, floors=floors, subject=subject)

    def sample_pipelined(self, num_rows: int, scale: Scale, *, target: Target | None = None) -> Figure:
        """The sampler keeps eight batches under way; those that were under way when the clock starts do not count."""
        floors = {
            "gloo stream": self.stage.gloo.stream_in(self.nbytes(num_rows)),
            "local memmap": self.mapped.gather(num_rows, self.stage.pacing),
        }
        name = f"sample {num_rows}, {NUM_BATCHES_UNDER_WAY} under way"
        return self._measure(name, scale, target, floors=floors, subject=self.pipelined_samples(num_rows))

    def pipelined_samples(self, num_rows: int, after_each: Callable[[TensorDictBase], object] | None = None) -> Task:
        """Rounds of samples that are asked for ahead.

        Args:
            after_each: Done with every batch, and timed with it.
        """
        last: list[TensorDictBase] = []

        def run_round() -> Round:
            with closing(self.replay.batches(num_rows, prefetch=NUM_BATCHES_UNDER_WAY)) as batches:
                for _ in range(NUM_BATCHES_UNDER_WAY + 1):
                    next(batches)

                def draw() -> None:
                    last[:] = [next(batches)]
                    if after_each is not None:
                        after_each(last[0])

                return timed_round(draw, self.stage.pacing)

        return Task(run_round, lambda: self.check_sampled(last[0]))

    def floors_of_sample(self, num_rows: int) -> dict[str, Task]:
        """What one sample at a time is measured against."""
        return {
            "gloo, asked for": self.stage.gloo.fetch(self.nbytes(num_rows)),
            "local memmap": self.mapped.gather(num_rows, self.stage.pacing),
        }

    def check_sampled(self, batch: TensorDictBase) -> None:
        """Raises CorruptDataError unless the batch is rows of the pool."""
        check_rows(batch, self.pool, source_key=self.source_key, what=f"a sample of {self.workload}")

    def _measure(
        self, name: str, scale: Scale, target: Target | None, *, floors: dict[str, Task], subject: Task
    ) -> Figure:
        series = alternate({**floors, SUBJECT: subject}, self.stage.num_rounds)
        own = series.pop(SUBJECT)
        return make_figure(self.workload, name, scale, subject=own, floors=series, target=target)

    def _check_written(self, index: object, batch: TensorDictBase) -> None:
        check_equal(self.replay[index], batch, what=f"rows of {self.workload} read back")


@contextmanager
def open_rows(
    stage: Stage, workload: str, pool: TensorDictBase, *, source_key: str, capacity: int, sampler: Any = None
) -> Iterator[Rows]:
    """Creates the store and its local counterpart, both full: no page is touched for the first time while measured."""
    with TemporaryDirectory(dir=stage.folder) as folder:
        mapped = MappedRows(pool, capacity, Path(folder))
        replay = stage.client.create_replay(workload, like=pool[0], capacity=capacity, sampler=sampler)
        try:
            rows = Rows(stage, workload, pool, source_key, replay, mapped)
            next_batch = rows.batches(FILL_ROWS)
            for _ in range(capacity // FILL_ROWS):
                replay.extend(next_batch())
            yield rows
        finally:
            stage.client.delete(workload)
