"""Small rows, as control tasks have them: the cost of messages, not of bytes."""

from __future__ import annotations

from collections.abc import Iterator

from tdserve.bench.content import transitions
from tdserve.bench.figures import Figure, Scale, Target
from tdserve.bench.options import Wire
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.row_floors import TORCHRL
from tdserve.bench.workloads.rows import MANY_EXTENDS_UNDER_WAY, open_rows

POOL_ROWS = 4_096
BATCH_SIZES = (1, 64, 1_024)
SAMPLE_ROWS = 256

APPENDED_ROWS_PER_S = 5e4
WRITER_BATCH = 64

WRITTEN = Target("at least", 2e6)
OF_TORCHRL = Target("of floor", 1 / 2, TORCHRL)
"""At most twice TorchRL's time in a process of its own."""

TARGETS: dict[Wire, dict[str, tuple[Target, ...]]] = {
    "gloo": {"write": (WRITTEN,), "sample": (Target("below", 600.0),), "stream in": (Target("at least", 1.5e6),)},
    "shm": {"write": (WRITTEN,), "sample": (OF_TORCHRL,), "stream in": (OF_TORCHRL,)},
}


def measure_transitions(stage: Stage) -> Iterator[Figure]:
    """Extends of 1, 64 and 1024 rows, single rows through a writer, samples of 256."""
    targets, pool, capacity = TARGETS[stage.wire], transitions(POOL_ROWS), stage.sizes.replay_rows
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
