"""Large rows, as Atari has them: 56 KB each, the cost of bytes."""

from __future__ import annotations

from collections.abc import Iterator

from tdserve.bench.content import pixels
from tdserve.bench.figures import Figure, Scale, Target, gigabytes
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.rows import open_rows

POOL_ROWS = 512
WRITE_ROWS = 64
SAMPLE_ROWS = 256

OF_FLOOR = Target("of floor", 0.7)


def measure_pixels(stage: Stage) -> Iterator[Figure]:
    """Extends of 64 rows (3.6 MB), samples of 256 (14.5 MB)."""
    capacity = stage.sizes.pixel_rows
    with open_rows(stage, "pixels", pixels(POOL_ROWS), source_key="action", capacity=capacity) as rows:
        written = Scale("GB/s", gigabytes(rows.nbytes(WRITE_ROWS)))
        sampled = Scale("GB/s", gigabytes(rows.nbytes(SAMPLE_ROWS)))
        yield rows.write_one_by_one(WRITE_ROWS, written, target=OF_FLOOR)
        yield rows.write_pipelined(WRITE_ROWS, written, target=OF_FLOOR)
        yield rows.sample_one_by_one(SAMPLE_ROWS, sampled, target=OF_FLOOR)
        yield rows.sample_pipelined(SAMPLE_ROWS, sampled, target=OF_FLOOR)
