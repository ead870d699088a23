"""Small rows, as control tasks have them: the cost of messages, not of bytes."""

from __future__ import annotations

from collections.abc import Iterator

from tdserve.bench.content import transitions
from tdserve.bench.figures import Figure, Scale, Target
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.rows import MANY_EXTENDS_UNDER_WAY, open_rows

POOL_ROWS = 4_096
BATCH_SIZES = (1, 64, 1_024)
SAMPLE_ROWS = 256

SAMPLE_BELOW_US = 600.0
SAMPLED_ROWS_PER_S = 1.5e6
WRITTEN_ROWS_PER_S = 2e6
APPENDED_ROWS_PER_S = 5e4
WRITER_BATCH = 64


def measure_transitions(stage: Stage) -> Iterator[Figure]:
    """Extends of 1, 64 and 1024 rows, single rows through a writer, samples of 256."""
    capacity = stage.sizes.replay_rows
    with open_rows(stage, "transitions", transitions(POOL_ROWS), source_key="reward", capacity=capacity) as rows:
        for num_rows in BATCH_SIZES:
            yield rows.write_one_by_one(num_rows, Scale("us"))
            yield rows.write_pipelined(num_rows, Scale("rows/s", num_rows))
        target = Target("at least", WRITTEN_ROWS_PER_S)
        most = max(BATCH_SIZES)
        yield rows.write_pipelined(most, Scale("rows/s", most), window=MANY_EXTENDS_UNDER_WAY, target=target)
        yield rows.append(WRITER_BATCH, Scale("rows/s"), target=Target("at least", APPENDED_ROWS_PER_S))
        yield rows.sample_one_by_one(SAMPLE_ROWS, Scale("us"), target=Target("below", SAMPLE_BELOW_US))
        target = Target("at least", SAMPLED_ROWS_PER_S)
        yield rows.sample_pipelined(SAMPLE_ROWS, Scale("rows/s", SAMPLE_ROWS), target=target)
