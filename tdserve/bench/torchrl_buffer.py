"""TorchRL's own replay buffer over the same rows, in a process that has nothing else.

``python -m tdserve.bench.torchrl_buffer CONTENT POOL_ROWS CAPACITY FOLDER``. The buffer has a process of its own,
because importing torchrl changes the process that does so: the start method of its children, its logging, torch's
defaults. The buffer and the code that samples from it are still in one process, as in a program that needs no server.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Literal

from tensordict import TensorDict

from tdserve.bench.child import Child, LinePipe, run_child
from tdserve.bench.content import make_pixels, make_transitions
from tdserve.bench.measure import Pacing, Round, Task, time_round

ContentName = Literal["transitions", "pixels"]

POOLS: dict[str, Callable[[int], TensorDict]] = {"transitions": make_transitions, "pixels": make_pixels}

MISSING = (
    "torchrl is not installed: its floor is left out, and so are the targets that mean it "
    "(pip install --no-deps torchrl==0.14.1: it asks for an older tensordict, and samples as well with this one)"
)


def has_torchrl() -> bool:
    """Returns whether this Python could import torchrl."""
    return importlib.util.find_spec("torchrl") is not None


class TorchRLBuffer(Child):
    """``TensorDictReplayBuffer(LazyMemmapStorage)``, full of the rows of a pool. ``close`` leaves no process behind.

    The process starts and fills the buffer while the caller goes on, until ``wait_until_full``.

    Args:
        content: Which rows.
        num_pool_rows: Number of different rows; they are repeated until the buffer is full.
        capacity: Rows of the buffer.
        folder: Holds its files, and must be empty.
    """

    def __init__(self, content: ContentName, num_pool_rows: int, capacity: int, folder: Path) -> None:
        super().__init__("tdserve.bench.torchrl_buffer", content, str(num_pool_rows), str(capacity), str(folder))

    def wait_until_full(self) -> int:
        """Waits until all rows are there, and returns their number. From then on the process takes no time of others.

        Raises:
            PeerLostError: The process ended. It wrote its error to standard error.
        """
        return int(self.receive()["num_rows"])

    def sample(self, num_rows: int) -> Task:
        """Returns a task that takes one sample after the other, with as many threads as torch takes by itself."""

        def run_round(pacing: Pacing) -> Round:
            answer = self.ask({"num_rows": num_rows, "pacing": astuple(pacing)})
            return Round(tuple(answer["op_s"]), answer["elapsed_s"])

        return Task(run_round)


def _sample_buffer(pipe: LinePipe, content: str, num_pool_rows: int, capacity: int, folder: str) -> None:
    sys.stdout = sys.stderr  # torchrl logs to standard output, which is the pipe here
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=folder))
    pool = POOLS[content](num_pool_rows)
    for start in range(0, capacity, num_pool_rows):
        buffer.extend(pool[: capacity - start])
    pipe.send({"num_rows": len(buffer)})
    while (order := pipe.receive()) is not None:
        done = time_round(partial(buffer.sample, order["num_rows"]), Pacing(*order["pacing"]))
        pipe.send({"op_s": done.op_s, "elapsed_s": done.elapsed_s})


if __name__ == "__main__":
    content, num_pool_rows, capacity, folder = sys.argv[1:]
    sys.exit(run_child(lambda pipe: _sample_buffer(pipe, content, int(num_pool_rows), int(capacity), folder)))
