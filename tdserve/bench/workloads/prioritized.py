"""Prioritized sampling beside uniform sampling of the same rows: what the priorities cost."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase

from tdserve.bench.content import transitions
from tdserve.bench.figures import Figure, Scale, Target, make_figure
from tdserve.bench.measure import SUBJECT, Task, alternate, timed_round
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.rows import NUM_BATCHES_UNDER_WAY, Rows, open_rows
from tdserve.replay.prioritized import Prioritized

POOL_ROWS = 4_096
SAMPLE_ROWS = 256
OF_UNIFORM = 0.7


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

        target = Target("of floor", OF_UNIFORM)
        name = f"sample {SAMPLE_ROWS}, one by one"
        yield _beside(stage, name, Scale("us"), _draws(uniform), _draws(prioritized), target)
        name = f"sample {SAMPLE_ROWS}, {NUM_BATCHES_UNDER_WAY} under way"
        scale = Scale("rows/s", SAMPLE_ROWS)
        tasks = uniform.pipelined_samples(SAMPLE_ROWS), prioritized.pipelined_samples(SAMPLE_ROWS)
        yield _beside(stage, name, scale, *tasks, target)
        yield _beside(
            stage,
            f"sample {SAMPLE_ROWS}, {NUM_BATCHES_UNDER_WAY} under way, and update",
            scale,
            uniform.pipelined_samples(SAMPLE_ROWS),
            prioritized.pipelined_samples(SAMPLE_ROWS, after_each=update),
        )
        batch = prioritized.replay.sample(SAMPLE_ROWS)
        updates = Task(lambda: timed_round(lambda: update(batch), stage.pacing))
        series = alternate({SUBJECT: updates}, stage.num_rounds)
        name = f"update {SAMPLE_ROWS} priorities"
        yield make_figure("prioritized", name, Scale("us"), subject=series[SUBJECT], floors={})


def _draws(rows: Rows) -> Task:
    last: list[TensorDictBase] = []

    def draw() -> None:
        last[:] = [rows.replay.sample(SAMPLE_ROWS)]

    return Task(lambda: timed_round(draw, rows.stage.pacing), lambda: rows.check_sampled(last[0]))


def _beside(
    stage: Stage, name: str, scale: Scale, uniform: Task, prioritized: Task, target: Target | None = None
) -> Figure:
    series = alternate({"uniform": uniform, SUBJECT: prioritized}, stage.num_rounds)
    own = series.pop(SUBJECT)
    return make_figure("prioritized", name, scale, subject=own, floors=series, target=target)
