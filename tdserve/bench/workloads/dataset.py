"""A store under torch's DataLoader: whether four worker processes keep up with samples that one process asks for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import count, cycle, islice
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from tdserve.bench.content import check_rows, compute_row_nbytes, make_pixels, make_transitions
from tdserve.bench.figures import Figure, Scale, to_gigabytes
from tdserve.bench.floors import SAMPLE
from tdserve.bench.measure import Pacing, Round, Task, time_round
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.replay_rounds import Check, make_single_samples
from tdserve.client.handles.handle import StoreHandle
from tdserve.rules.replay.without_replacement import WithoutReplacement

NUM_WORKERS = 4
PREFETCH = 4
"""Batches that each worker has ready, or a reader without workers."""

BATCH_ROWS = 256
POOL_ROWS = 512


def measure_dataset(stage: Stage) -> Iterator[Figure]:
    """Measures shuffled batches of 256 rows, of small rows and of large ones, with a DataLoader and without one."""
    small = make_transitions(POOL_ROWS)
    yield from _measure(stage, "transitions", small, "reward", stage.sizes.replay_rows, Scale("rows/s", BATCH_ROWS))
    large = make_pixels(POOL_ROWS)
    of_bytes = Scale("GB/s", to_gigabytes(compute_row_nbytes(large) * BATCH_ROWS))
    yield from _measure(stage, "pixels", large, "action", stage.sizes.pixel_rows, of_bytes)


def _measure(
    stage: Stage, what: str, pool: TensorDict, source_key: str, num_rows: int, scale: Scale
) -> Iterator[Figure]:
    """Measures the loader and ``store.batches`` beside two floors: samples of a replay with the same rows, and random
    rows of the store that this process reads.
    """
    name = f"dataset-{what}"
    store = stage.client.memmap(torch.cat([pool] * (num_rows // len(pool))), name)
    filling = islice(cycle(pool.split(BATCH_ROWS)), len(store) // BATCH_ROWS)
    check = partial(check_rows, pool=pool, source_key=source_key, what=f"a batch of {what}")
    with stage.open_replay(f"{name}-replay", pool[0], len(store), filling) as replay:
        sample = make_single_samples(replay, BATCH_ROWS, check)
        with closing(_Loading(store)) as loading:
            random_rows = _make_reads(lambda: store[torch.randint(len(store), (BATCH_ROWS,))], check)
            subject = _make_reads(lambda: next(loading.batches), check, num_waiting=NUM_WORKERS * PREFETCH)
            floors = {SAMPLE: sample, "store[rows]": random_rows}
            yield stage.measure("dataset", f"{what}: DataLoader, {NUM_WORKERS} workers", scale, subject, floors)
        epochs = _read_epochs(store)
        subject = _make_reads(lambda: next(epochs), check, num_waiting=PREFETCH)
        yield stage.measure("dataset", f"{what}: store.batches", scale, subject, {SAMPLE: sample})
    stage.client.delete(name)


def _make_reads(next_batch: Callable[[], TensorDict], check: Check, *, num_waiting: int = 0) -> Task:
    """Returns a task that reads batch after batch. Those that were ready before the clock starts do not count."""

    def run_round(pacing: Pacing) -> Round:
        for _ in range(num_waiting):
            next_batch()
        return time_round(next_batch, pacing)

    return Task(run_round, check)


class _Shuffled:
    """Epoch after epoch, as lists of row numbers: a run of the loader does not end in the middle of a round."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            order = torch.randperm(self._num_rows).tolist()
            yield from (order[start : start + BATCH_ROWS] for start in range(0, self._num_rows, BATCH_ROWS))


class _Loading:
    """A DataLoader with workers that is iterated for ever."""

    def __init__(self, store: StoreHandle) -> None:
        with warnings.catch_warnings():
            # torch warns of more workers than cores, and Python warns of threads in a process that forks
            warnings.simplefilter("ignore")
            loader: DataLoader[Any] = DataLoader(
                store,  # type: ignore[arg-type] # it needs __getitems__, and no base class
                batch_sampler=_Shuffled(len(store)),
                num_workers=NUM_WORKERS,
                prefetch_factor=PREFETCH,
                collate_fn=_return_batch,
                multiprocessing_context="fork",
            )
            self.batches = iter(loader)

    def close(self) -> None:
        """Ends the workers: they end when their iterator is gone."""
        del self.batches


def _read_epochs(store: StoreHandle) -> Iterator[TensorDict]:
    """Yields ``store.batches``, epoch after epoch."""
    for epoch in count():
        with store.batches(BATCH_ROWS, sampler=WithoutReplacement(1), epoch=epoch, prefetch=PREFETCH) as batches:
            yield from batches


def _return_batch(batch: Any) -> Any:
    return batch
