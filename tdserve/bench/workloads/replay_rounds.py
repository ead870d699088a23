"""Rounds of extends and samples of a replay store: one by one, and with several under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from tdserve.bench.measure import Pacing, Round, Task, make_pipeline, make_task, time_round
from tdserve.client.tables.replay import ReplayHandle

NUM_BATCHES_UNDER_WAY = 8

Check = Callable[[TensorDictBase], None]
"""Raises CorruptDataError unless a sample is what was written."""

CheckWritten = Callable[[torch.Tensor, TensorDictBase], None]
"""Raises CorruptDataError unless the rows with these numbers are those of the batch."""


def describe_window(window: int) -> str:
    """Returns the words for this many operations under way, as the names of figures have them."""
    return "one by one" if window == 1 else f"{window} under way"


def make_extends(replay: ReplayHandle, batches: Iterator[TensorDictBase], window: int, check: CheckWritten) -> Task:
    """Returns extends of which ``window`` are under way; with 1, each waits for its acknowledgement.

    The round ends when all are acknowledged.
    """
    batch: TensorDictBase

    def put(*, return_early: bool) -> Any:
        nonlocal batch
        batch = next(batches)
        return replay.extend(batch, return_early=return_early)

    if window == 1:
        return make_task(partial(put, return_early=False), lambda index: check(index, batch))
    return make_pipeline(partial(put, return_early=True), window, lambda index: check(index, batch))


def make_samples(
    replay: ReplayHandle,
    num_rows: int,
    window: int,
    check: Check,
    *,
    after_each: Callable[[TensorDictBase], object] = lambda batch: None,
) -> Task:
    """Returns samples of which ``window`` are under way; with 1, each is asked for when the one before is there.

    Those under way when the clock starts do not count.

    Args:
        replay: The store.
        num_rows: Rows of a sample.
        window: The number under way.
        check: Gets the last sample of a round.
        after_each: Called with every sample that was asked for ahead, and timed with it.
    """

    def run_round(pacing: Pacing) -> Round:
        with closing(replay.batches(num_rows, prefetch=window)) as batches:
            for _ in range(window + 1):
                next(batches)

            def draw() -> Any:
                batch = next(batches)
                after_each(batch)
                return batch

            return time_round(draw, pacing)

    return make_task(lambda: replay.sample(num_rows), check) if window == 1 else Task(run_round, check)
