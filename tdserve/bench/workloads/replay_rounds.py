"""Rounds of extends and samples of a replay store: one by one, and with several under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import torch
from tensordict import TensorDictBase

from tdserve.bench.measure import Pacing, Round, Task, make_task, time_round
from tdserve.client.tables.replay import ReplayHandle

NUM_BATCHES_UNDER_WAY = 8

Batches = Callable[[], TensorDictBase]
"""Returns the next batch to write, for ever."""

Check = Callable[[TensorDictBase], None]
"""Raises CorruptDataError unless a sample is what was written."""

CheckWritten = Callable[[torch.Tensor, TensorDictBase], None]
"""Raises CorruptDataError unless the rows with these numbers are those of the batch."""


def make_single_extends(replay: ReplayHandle, next_batch: Batches, check: CheckWritten) -> Task:
    """Returns extends each of which waits for its acknowledgement."""

    def put() -> tuple[torch.Tensor, TensorDictBase]:
        batch = next_batch()
        return replay.extend(batch), batch

    return make_task(put, lambda last: check(*last))


def make_pipelined_extends(replay: ReplayHandle, next_batch: Batches, window: int, check: CheckWritten) -> Task:
    """Returns extends of which ``window`` are under way. The round ends when all are acknowledged."""
    under_way: deque[tuple[Future[torch.Tensor], TensorDictBase]] = deque()
    last: list[tuple[torch.Tensor, TensorDictBase]] = []

    def take() -> None:
        future, batch = under_way.popleft()
        last[:] = [(future.result(), batch)]

    def put() -> None:
        if len(under_way) == window:
            take()
        batch = next_batch()
        under_way.append((replay.extend(batch, return_early=True), batch))

    def drain() -> None:
        while under_way:
            take()

    return make_task(put, lambda _: check(*last[0]), finish=drain)


def make_single_samples(replay: ReplayHandle, num_rows: int, check: Check) -> Task:
    """Returns samples each of which is asked for when the one before is there."""
    return make_task(lambda: replay.sample(num_rows), check)


def make_pipelined_samples(
    replay: ReplayHandle,
    num_rows: int,
    check: Check,
    *,
    after_each: Callable[[TensorDictBase], object] | None = None,
) -> Task:
    """Returns samples of which eight are under way. Those under way when the clock starts do not count.

    Args:
        replay: The store.
        num_rows: Rows of a sample.
        check: Gets the last sample of a round.
        after_each: Called with every sample, and timed with it.
    """

    def run_round(pacing: Pacing) -> Round:
        with closing(replay.batches(num_rows, prefetch=NUM_BATCHES_UNDER_WAY)) as batches:
            for _ in range(NUM_BATCHES_UNDER_WAY + 1):
                next(batches)

            def draw() -> Any:
                batch = next(batches)
                if after_each is not None:
                    after_each(batch)
                return batch

            return time_round(draw, pacing)

    return Task(run_round, check)
