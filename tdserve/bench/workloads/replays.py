"""Replay stores: small rows, where messages cost most, large rows, where bytes do, and what priorities add."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase

from tdserve.bench.content import pixels, transitions
from tdserve.bench.figures import Figure, Scale, Target, gigabytes
from tdserve.bench.floors import MEMCPY
from tdserve.bench.measure import Task, timed_round
from tdserve.bench.options import Wire
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.replay_rounds import NUM_BATCHES_UNDER_WAY, pipelined_samples, single_samples
from tdserve.bench.workloads.row_floors import LOCAL_GATHER, OVER_GLOO, TORCHRL
from tdserve.bench.workloads.rows import MANY_EXTENDS_UNDER_WAY, open_rows
from tdserve.rules.replay.prioritized import Prioritized

Targets = dict[Wire, dict[str, tuple[Target, ...]]]

SAMPLE_ROWS = 256

SMALL_ROWS = 4_096
"""Rows of the pool of transitions."""

LARGE_ROWS = 512
"""Rows of the pool of pixels, 56 KB each."""

BATCH_SIZES = (1, 64, 1_024)
WRITER_BATCH = 64
APPENDED_ROWS_PER_S = 5e4

WRITTEN = Target("at least", 2e6)
OF_TORCHRL = Target("of floor", 1 / 2, TORCHRL)
"""At most twice TorchRL's time in a process of its own."""

OF_TRANSITIONS: Targets = {
    "gloo": {"write": (WRITTEN,), "sample": (Target("below", 600.0),), "stream in": (Target("at least", 1.5e6),)},
    "shm": {"write": (WRITTEN,), "sample": (OF_TORCHRL,), "stream in": (OF_TORCHRL,)},
}

PIXEL_WRITE_ROWS = 64

OF_FLOOR = Target("of floor", 0.7)

SAMPLED_LOCALLY = (
    Target("of floor", 0.7, LOCAL_GATHER),
    Target("of floor", 1 / 1.3, TORCHRL),  # at most 1.3 times its time
    Target("of floor", 4.0, OVER_GLOO),
)

OF_PIXELS: Targets = {
    "gloo": {"write": (OF_FLOOR,), "sample": (OF_FLOOR,)},
    "shm": {"write": (Target("of floor", 0.7, MEMCPY),), "sample": SAMPLED_LOCALLY},
}

OF_UNIFORM: dict[Wire, tuple[Target, ...]] = {"gloo": (OF_FLOOR,), "shm": ()}
"""Where a uniform sample is a gather and little more, the plan asks nothing."""


def measure_transitions(stage: Stage) -> Iterator[Figure]:
    """Extends of 1, 64 and 1024 rows, single rows through a writer, samples of 256."""
    targets, pool, capacity = OF_TRANSITIONS[stage.wire], transitions(SMALL_ROWS), stage.sizes.replay_rows
    with open_rows(stage, "transitions", pool, source_key="reward", capacity=capacity, torchrl="transitions") as rows:
        for num_rows in BATCH_SIZES:
            yield rows.write_one_by_one(num_rows, Scale("us"))
            yield rows.write_pipelined(num_rows, Scale("rows/s", num_rows))
        most = max(BATCH_SIZES)
        scale = Scale("rows/s", most)
        yield rows.write_pipelined(most, scale, window=MANY_EXTENDS_UNDER_WAY, targets=targets["write"])
        yield rows.append(WRITER_BATCH, Scale("rows/s"), targets=(Target("at least", APPENDED_ROWS_PER_S),))
        yield rows.sample_one_by_one(SAMPLE_ROWS, Scale("us"), targets=targets["sample"])
        yield rows.sample_pipelined(SAMPLE_ROWS, Scale("rows/s", SAMPLE_ROWS), targets=targets["stream in"])


def measure_pixels(stage: Stage) -> Iterator[Figure]:
    """Extends of 64 rows (3.6 MB), samples of 256 (14.5 MB)."""
    targets, pool, capacity = OF_PIXELS[stage.wire], pixels(LARGE_ROWS), stage.sizes.pixel_rows
    with open_rows(stage, "pixels", pool, source_key="action", capacity=capacity, torchrl="pixels") as rows:
        written = Scale("GB/s", gigabytes(rows.nbytes(PIXEL_WRITE_ROWS)))
        sampled = Scale("GB/s", gigabytes(rows.nbytes(SAMPLE_ROWS)))
        yield rows.write_one_by_one(PIXEL_WRITE_ROWS, written, targets=targets["write"])
        yield rows.write_pipelined(PIXEL_WRITE_ROWS, written, targets=targets["write"])
        yield rows.sample_one_by_one(SAMPLE_ROWS, sampled, targets=targets["sample"])
        yield rows.sample_pipelined(SAMPLE_ROWS, sampled, targets=targets["sample"])


def measure_prioritized(stage: Stage) -> Iterator[Figure]:
    """Samples of 256 and updates of their priorities; the floor is the uniform sampler over the same rows."""
    pool, capacity = transitions(SMALL_ROWS), stage.sizes.replay_rows
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

        drawn, plain = ((rows.replay, SAMPLE_ROWS, stage.pacing, rows.check_sampled) for rows in (prioritized, uniform))
        targets, scale = OF_UNIFORM[stage.wire], Scale("rows/s", SAMPLE_ROWS)
        floors = {"uniform": single_samples(*plain)}
        name = f"sample {SAMPLE_ROWS}, one by one"
        yield stage.measure("prioritized", name, Scale("us"), single_samples(*drawn), floors, targets=targets)
        floors = {"uniform": pipelined_samples(*plain)}
        name = f"sample {SAMPLE_ROWS}, {NUM_BATCHES_UNDER_WAY} under way"
        yield stage.measure("prioritized", name, scale, pipelined_samples(*drawn), floors, targets=targets)
        updated = pipelined_samples(*drawn, after_each=update)
        yield stage.measure("prioritized", f"{name}, and update", scale, updated, floors)
        batch = prioritized.replay.sample(SAMPLE_ROWS)
        updates = Task(lambda: timed_round(lambda: update(batch), stage.pacing))
        yield stage.measure("prioritized", f"update {SAMPLE_ROWS} priorities", Scale("us"), updates)
