"""Rounds of extends and samples of a replay store: one by one, and with several under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing

import torch
from tensordict import TensorDictBase

from tdserve.bench.measure import Pacing, Round, Task, timed_round
from tdserve.client.tables.replay import ReplayHandle

NUM_BATCHES_UNDER_WAY = 8

Batches = Callable[[], TensorDictBase]
"""Returns the next batch to write, for ever."""

Check = Callable[[TensorDictBase], None]
"""Raises CorruptDataError unless a sample is what was written."""


def pipelined_extends(
    replay: ReplayHandle,
    next_batch: Batches,
    window: int,
    pacing: Pacing,
    check: Callable[[torch.Tensor, TensorDictBase], None],
) -> Task:
    """So many extends are under way; the round ends when all are acknowledged.

    Args:
        check: Gets the row numbers of the last batch, and the batch.
    """
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

    return Task(lambda: timed_round(put, pacing, finish=drain), lambda _: check(*last[0]))


def single_samples(replay: ReplayHandle, num_rows: int, pacing: Pacing, check: Check) -> Task:
    """Each sample is asked for when the one before is there."""
    return Task(lambda: timed_round(lambda: replay.sample(num_rows), pacing), check)


def pipelined_samples(
    replay: ReplayHandle,
    num_rows: int,
    pacing: Pacing,
    check: Check,
    *,
    after_each: Callable[[TensorDictBase], object] | None = None,
) -> Task:
    """The sampler keeps eight batches under way; those that were under way when the clock starts do not count.

    Args:
        after_each: Done with every batch, and timed with it.
    """

    def run_round() -> Round:
        with closing(replay.batches(num_rows, prefetch=NUM_BATCHES_UNDER_WAY)) as batches:
            for _ in range(NUM_BATCHES_UNDER_WAY + 1):
                next(batches)

            def draw() -> TensorDictBase:
                batch: TensorDictBase = next(batches)
                if after_each is not None:
                    after_each(batch)
                return batch

            return timed_round(draw, pacing)

    return Task(run_round, check)
