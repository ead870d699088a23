"""TorchRL's own replay buffer over the same rows, in a process that has nothing else.

The buffer has a process of its own, because importing torchrl changes the process that does so: the start method of its
children, its logging, torch's defaults. The buffer and the code that samples from it are still in one process, as in a
program that needs no server.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from tdserve.bench.child import Child, Pipe
from tdserve.bench.measure import Task, time_round
from tdserve.bench.workload_data import Pool

MISSING = (
    "torchrl is not installed: its floor is left out, and so are the targets that mean it "
    "(pip install --no-deps torchrl==0.14.1: it asks for an older tensordict, and samples as well with this one)"
)


def has_torchrl() -> bool:
    """Returns whether this Python could import torchrl."""
    return importlib.util.find_spec("torchrl") is not None


class TorchRLBuffer(Child):
    """``TensorDictReplayBuffer(LazyMemmapStorage)``, full of the rows of a pool. ``close`` leaves no process behind.

    The process starts and fills the buffer while the caller continues; ``recv`` waits until it is full, and returns the
    number of its rows. From then on the process takes no time of others.

    Args:
        make_pool: Makes the pool again in the process.
        num_pool_rows: Number of different rows; they are repeated until the buffer is full.
        capacity: Rows of the buffer.
        folder: Holds its files, and must be empty.
    """

    def __init__(self, make_pool: Callable[[int], Pool], num_pool_rows: int, capacity: int, folder: Path) -> None:
        super().__init__(_sample_buffer, make_pool, num_pool_rows, capacity, folder)

    def make_floor(self, num_rows: int) -> Task:
        """Returns a task that takes one sample after the other, with as many threads as torch takes by itself."""
        return Task(lambda pacing: self.ask((num_rows, pacing)))


def _sample_buffer(
    pipe: Pipe, make_pool: Callable[[int], Pool], num_pool_rows: int, capacity: int, folder: Path
) -> None:
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=folder))
    rows = make_pool(num_pool_rows).rows
    for start in range(0, capacity, num_pool_rows):
        buffer.extend(rows[: capacity - start])
    pipe.send(len(buffer))
    while True:
        num_rows, pacing = pipe.recv()
        pipe.send(replace(time_round(partial(buffer.sample, num_rows), pacing), last=None))
