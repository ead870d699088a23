"""The workloads: each writes and reads its own stores and yields its figures one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tdserve.bench.figures import Figure
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.chat import measure_chat
from tdserve.bench.workloads.dataset import measure_dataset
from tdserve.bench.workloads.mixed import measure_mixed
from tdserve.bench.workloads.replays import measure_pixels, measure_prioritized, measure_transitions
from tdserve.bench.workloads.small import measure_small
from tdserve.bench.workloads.weights import measure_weights

WORKLOADS: dict[str, Callable[[Stage], Iterator[Figure]]] = {
    "transitions": measure_transitions,
    "pixels": measure_pixels,
    "weights": measure_weights,
    "small": measure_small,
    "prioritized": measure_prioritized,
    "mixed": measure_mixed,
    "chat": measure_chat,
    "dataset": measure_dataset,
}
"""By the names of ``tdserve.bench.options.WORKLOAD_NAMES``."""

__all__ = ["WORKLOADS"]
