"""Rounds of samples from a replay store: one by one, and asked for ahead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from tensordict import TensorDictBase

from tdserve.bench.measure import Pacing, Round, Task, timed_round
from tdserve.client.tables.replay import ReplayHandle

NUM_BATCHES_UNDER_WAY = 8

Check = Callable[[TensorDictBase], None]
"""Raises CorruptDataError unless a sample is what was written."""


def single_samples(replay: ReplayHandle, num_rows: int, pacing: Pacing, check: Check) -> Task:
    """Each sample is asked for when the one before is there."""
    last: list[TensorDictBase] = []

    def draw() -> None:
        last[:] = [replay.sample(num_rows)]

    return Task(lambda: timed_round(draw, pacing), lambda: check(last[0]))


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
    last: list[TensorDictBase] = []

    def run_round() -> Round:
        with closing(replay.batches(num_rows, prefetch=NUM_BATCHES_UNDER_WAY)) as batches:
            for _ in range(NUM_BATCHES_UNDER_WAY + 1):
                next(batches)

            def draw() -> None:
                last[:] = [next(batches)]
                if after_each is not None:
                    after_each(last[0])

            return timed_round(draw, pacing)

    return Task(run_round, lambda: check(last[0]))
