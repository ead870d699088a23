"""Prioritized sampling beside uniform sampling of the same rows: what the priorities cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from tensordict import TensorDictBase

from tdserve.bench.content import transitions
from tdserve.bench.figures import Figure, Scale, Target, make_figure
from tdserve.bench.measure import SUBJECT, Task, alternate, timed_round
from tdserve.bench.options import Wire
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.rows import Rows, open_rows
from tdserve.bench.workloads.sampling import NUM_BATCHES_UNDER_WAY, pipelined_samples, single_samples
from tdserve.rules.replay.prioritized import Prioritized

POOL_ROWS = 4_096
SAMPLE_ROWS = 256

TARGETS: dict[Wire, tuple[Target, ...]] = {"gloo": (Target("of floor", 0.7),), "shm": ()}
"""Where a uniform sample is a gather and little more, the plan asks nothing."""


def measure_prioritized(stage: Stage) -> Iterator[Figure]:
    """Samples of 256 and updates of their priorities; the floor is the uniform sampler."""
    pool, capacity = transitions(POOL_ROWS), stage.sizes.replay_rows
    with (
        open_rows(stage, "uniform", pool, source_key="reward", capacity=capacity) as uniform,
        open_rows(
            stage, "prioritized", pool, source_key="reward", capacity=capacity, sampler=Prioritized()
        ) as prioritized,
    ):
        priorities = torch.rand(SAMPLE_ROWS)
        for batch in prioritized.replay.batches(SAMPLE_ROWS, prefetch=1):
            prioritized.replay.update_priority(batch, priorities)  # so that they differ
            break

        def update(batch: TensorDictBase) -> None:
            prioritized.replay.update_priority(batch, priorities)

        targets = TARGETS[stage.wire]
        name = f"sample {SAMPLE_ROWS}, one by one"
        yield _beside(stage, name, Scale("us"), _draws(uniform), _draws(prioritized), targets)
        name = f"sample {SAMPLE_ROWS}, {NUM_BATCHES_UNDER_WAY} under way"
        scale = Scale("rows/s", SAMPLE_ROWS)
        tasks = _draws_ahead(uniform), _draws_ahead(prioritized)
        yield _beside(stage, name, scale, *tasks, targets)
        yield _beside(
            stage,
            f"sample {SAMPLE_ROWS}, {NUM_BATCHES_UNDER_WAY} under way, and update",
            scale,
            _draws_ahead(uniform),
            _draws_ahead(prioritized, after_each=update),
        )
        batch = prioritized.replay.sample(SAMPLE_ROWS)
        updates = Task(lambda: timed_round(lambda: update(batch), stage.pacing))
        series = alternate({SUBJECT: updates}, stage.num_rounds)
        name = f"update {SAMPLE_ROWS} priorities"
        yield make_figure("prioritized", name, Scale("us"), subject=series[SUBJECT], floors={})


def _draws(rows: Rows) -> Task:
    return single_samples(rows.replay, SAMPLE_ROWS, rows.stage.pacing, rows.check_sampled)


def _draws_ahead(rows: Rows, after_each: Callable[[TensorDictBase], None] | None = None) -> Task:
    return pipelined_samples(rows.replay, SAMPLE_ROWS, rows.stage.pacing, rows.check_sampled, after_each=after_each)


def _beside(
    stage: Stage, name: str, scale: Scale, uniform: Task, prioritized: Task, targets: Sequence[Target] = ()
) -> Figure:
    series = alternate({"uniform": uniform, SUBJECT: prioritized}, stage.num_rounds)
    own = series.pop(SUBJECT)
    return make_figure("prioritized", name, scale, subject=own, floors=series, targets=targets)
