"""Small rows, as control tasks have them: the cost of messages, not of bytes."""

from __future__ import annotations

from collections.abc import Iterator

from tdserve.bench.content import transitions
from tdserve.bench.figures import Figure, Scale, Target
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.rows import open_rows

POOL_ROWS = 4_096
BATCH_SIZES = (1, 64, 1_024)
SAMPLE_ROWS = 256

SAMPLE_BELOW_US = 600.0
SAMPLED_ROWS_PER_S = 1e6
WRITTEN_ROWS_PER_S = 2e6


def measure_transitions(stage: Stage) -> Iterator[Figure]:
    """Extends of 1, 64 and 1024 rows, samples of 256."""
    capacity = stage.sizes.replay_rows
    with open_rows(stage, "transitions", transitions(POOL_ROWS), source_key="reward", capacity=capacity) as rows:
        for num_rows in BATCH_SIZES:
            yield rows.write_one_by_one(num_rows, Scale("us"))
            target = Target("at least", WRITTEN_ROWS_PER_S) if num_rows == max(BATCH_SIZES) else None
            yield rows.write_pipelined(num_rows, Scale("rows/s", num_rows), target=target)
        yield rows.sample_one_by_one(SAMPLE_ROWS, Scale("us"), target=Target("below", SAMPLE_BELOW_US))
        target = Target("at least", SAMPLED_ROWS_PER_S)
        yield rows.sample_pipelined(SAMPLE_ROWS, Scale("rows/s", SAMPLE_ROWS), target=target)
