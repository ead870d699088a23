"""A store under torch's DataLoader: whether four worker processes keep up with samples that one process asks for."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import count
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from tdserve.bench.floors import SAMPLE
from tdserve.bench.measure import Pacing, Round, Task, make_task, time_round
from tdserve.bench.stage import Case, Stage
from tdserve.bench.workload_data import Pool, make_pixels, make_transitions
from tdserve.bench.workloads.replay_rounds import Check, make_samples
from tdserve.bench.workloads.replays import open_filled
from tdserve.client.handles.handle import StoreHandle
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement

NUM_WORKERS = 4
PREFETCH = 4
"""Batches that each worker has ready, or a reader without workers."""

BATCH_ROWS = 256
POOL_ROWS = 512


def measure_dataset(stage: Stage) -> Generator[Case]:
    """Measures shuffled batches of 256 rows, of small rows and of large ones, with a DataLoader and without one."""
    yield from _measure_loader(stage, "transitions", make_transitions(POOL_ROWS), stage.sizes.replay_rows)
    yield from _measure_loader(stage, "pixels", make_pixels(POOL_ROWS), stage.sizes.pixel_rows)


def _measure_loader(stage: Stage, what: str, pool: Pool, num_rows: int) -> Iterator[Case]:
    """Measures the loader and ``store.batches`` beside two floors: samples of a replay with the same rows, and random
    rows of the store that this process reads.
    """
    name, rate = f"dataset-{what}", pool.make_rate(BATCH_ROWS)
    store = stage.client.memmap(torch.cat([pool.rows] * (num_rows // POOL_ROWS)), name)
    with open_filled(stage, f"{name}-replay", pool, num_rows) as replay:
        sample = make_samples(replay, BATCH_ROWS, 1, pool.check)
        with closing(_load(store)) as loading:
            random_rows = make_task(lambda: store[torch.randint(num_rows, (BATCH_ROWS,))], pool.check)
            subject = _make_reads(loading, pool.check, num_waiting=NUM_WORKERS * PREFETCH)
            floors = {SAMPLE: sample, "store[rows]": random_rows}
            yield Case(f"{what}: DataLoader, {NUM_WORKERS} workers", rate, subject, floors)
        subject = _make_reads(_read_epochs(store), pool.check, num_waiting=PREFETCH)
        yield Case(f"{what}: store.batches", rate, subject, {SAMPLE: sample})
    stage.client.delete(name)


def _make_reads(batches: Iterator[TensorDict], check: Check, *, num_waiting: int) -> Task:
    """Returns a task that reads batch after batch. Those that were ready before the clock starts do not count."""

    def run_round(pacing: Pacing) -> Round:
        for _ in range(num_waiting):
            next(batches)
        return time_round(lambda: next(batches), pacing)

    return Task(run_round, check)


def _load(store: StoreHandle) -> Generator[TensorDict]:
    """Yields what a DataLoader with workers loads, for ever. They end when the iterator is closed."""
    with warnings.catch_warnings():
        # torch warns of more workers than cores, and Python warns of threads in a process that forks
        warnings.simplefilter("ignore")
        loader: DataLoader[Any] = DataLoader(
            store,  # type: ignore[arg-type] # it needs __getitems__, and no base class
            batch_sampler=_shuffle(len(store)),
            num_workers=NUM_WORKERS,
            prefetch_factor=PREFETCH,
            collate_fn=lambda batch: batch,
            multiprocessing_context="fork",
        )
        batches = iter(loader)
    yield from batches


def _shuffle(num_rows: int) -> Iterator[list[int]]:
    """Yields lists of row numbers, epoch after epoch: a run of the loader does not end in the middle of a round."""
    while True:
        order = torch.randperm(num_rows).tolist()
        yield from (order[start : start + BATCH_ROWS] for start in range(0, num_rows, BATCH_ROWS))


def _read_epochs(store: StoreHandle) -> Iterator[TensorDict]:
    """Yields ``store.batches``, epoch after epoch."""
    for epoch in count():
        with store.batches(BATCH_ROWS, sampler=WithoutReplacement(1), epoch=epoch, prefetch=PREFETCH) as batches:
            yield from batches
