"""What ``checksum=True`` costs readers: samples of rows that are compared, beside samples of a store without it."""

from __future__ import annotations

from collections.abc import Callable, Generator

from tdserve.bench.figures import Scale
from tdserve.bench.stage import Case, Stage
from tdserve.bench.workload_data import Pool, make_pixels, make_transitions
from tdserve.bench.workloads.replay_rounds import make_samples
from tdserve.bench.workloads.replays import PIXELS_POOL_ROWS, SAMPLE_ROWS, TRANSITIONS_POOL_ROWS, open_filled
from tdserve.store.disk.files import is_in_memory

UNCOMPARED = "without"
"""The floor: the same samples of a store that was created without checksums."""

MAX_ROWS = 4_096
"""Rows of a store. Each extend that fills it waits for the disk, since only rows that are synced are compared."""

_KINDS: tuple[tuple[str, Callable[[int], Pool], int], ...] = (
    ("transitions", make_transitions, TRANSITIONS_POOL_ROWS),
    ("pixels", make_pixels, PIXELS_POOL_ROWS),
)


def measure_checksums(stage: Stage) -> Generator[Case]:
    """Measures samples of 256 small rows, and of 256 rows of 56 KB. A root in memory is never synced, so there nothing
    is compared, and nothing measured."""
    if is_in_memory(stage.folder):
        return
    capacity = min(stage.sizes.pixel_rows, MAX_ROWS)
    for kind, make_pool, num_pool_rows in _KINDS:
        pool = make_pool(num_pool_rows)
        with (
            open_filled(stage, "plain", pool, capacity, durability="disk") as plain,
            open_filled(stage, "compared", pool, capacity, durability="disk", checksum=True) as compared,
        ):
            subject, floor = (make_samples(each, SAMPLE_ROWS, 1, pool.check) for each in (compared, plain))
            yield Case(f"{kind}: sample {SAMPLE_ROWS}, one by one", Scale("us"), subject, {UNCOMPARED: floor})
