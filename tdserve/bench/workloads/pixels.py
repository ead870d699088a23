"""Large rows, as Atari has them: 56 KB each, the cost of bytes."""

from __future__ import annotations

from collections.abc import Iterator

from tdserve.bench.content import pixels
from tdserve.bench.figures import Figure, Scale, Target, gigabytes
from tdserve.bench.options import Wire
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.row_floors import LOCAL_GATHER, MEMCPY, OVER_GLOO, TORCHRL
from tdserve.bench.workloads.rows import open_rows

POOL_ROWS = 512
WRITE_ROWS = 64
SAMPLE_ROWS = 256

OF_FLOOR = Target("of floor", 0.7)

SAMPLED_LOCALLY = (
    Target("of floor", 0.7, LOCAL_GATHER),
    Target("of floor", 1 / 1.3, TORCHRL),  # at most 1.3 times its time
    Target("of floor", 4.0, OVER_GLOO),
)

TARGETS: dict[Wire, dict[str, tuple[Target, ...]]] = {
    "gloo": {"write": (OF_FLOOR,), "sample": (OF_FLOOR,)},
    "shm": {"write": (Target("of floor", 0.7, MEMCPY),), "sample": SAMPLED_LOCALLY},
}


def measure_pixels(stage: Stage) -> Iterator[Figure]:
    """Extends of 64 rows (3.6 MB), samples of 256 (14.5 MB)."""
    targets, pool, capacity = TARGETS[stage.wire], pixels(POOL_ROWS), stage.sizes.pixel_rows
    with open_rows(stage, "pixels", pool, source_key="action", capacity=capacity, torchrl="pixels") as rows:
        written = Scale("GB/s", gigabytes(rows.nbytes(WRITE_ROWS)))
        sampled = Scale("GB/s", gigabytes(rows.nbytes(SAMPLE_ROWS)))
        yield rows.write_one_by_one(WRITE_ROWS, written, targets=targets["write"])
        yield rows.write_pipelined(WRITE_ROWS, written, targets=targets["write"])
        yield rows.sample_one_by_one(SAMPLE_ROWS, sampled, targets=targets["sample"])
        yield rows.sample_pipelined(SAMPLE_ROWS, sampled, targets=targets["sample"])
