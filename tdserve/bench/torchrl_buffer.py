"""TorchRL's own replay buffer over the same rows, in a process that has nothing else.

``python -m tdserve.bench.torchrl_buffer CONTENT POOL_ROWS CAPACITY FOLDER``. In a process of its own because importing
torchrl changes the one that does: the start method of its processes, its logging, torch's defaults. The buffer and
whoever samples it are in one process all the same, as in a program that needs no server.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tensordict import TensorDict

from tdserve.bench.child import Child, LinePipe
from tdserve.bench.content import pixels, transitions
from tdserve.bench.measure import Pacing, Round, Task, timed_round

ContentName = Literal["transitions", "pixels"]

POOLS: dict[str, Callable[[int], TensorDict]] = {"transitions": transitions, "pixels": pixels}

MISSING = (
    "torchrl is not installed: its floor is left out, and so are the targets that mean it "
    "(pip install --no-deps torchrl==0.14.1: it asks for an older tensordict, and samples as well with this one)"
)


def has_torchrl() -> bool:
    """Whether this Python could import it."""
    return importlib.util.find_spec("torchrl") is not None


class TorchRLBuffer:
    """``TensorDictReplayBuffer(LazyMemmapStorage)``, full of a pool's rows. ``close`` leaves no process behind.

    The process starts and fills it while the caller goes on, until ``wait_until_full``.

    Args:
        content: Which rows.
        num_pool_rows: Different rows; repeated until the buffer is full.
        capacity: Rows of the buffer.
        folder: Holds its files, and must be empty.
    """

    def __init__(self, content: ContentName, num_pool_rows: int, capacity: int, folder: Path) -> None:
        arguments = (content, str(num_pool_rows), str(capacity), str(folder))
        self._child = Child("tdserve.bench.torchrl_buffer", *arguments)

    def wait_until_full(self) -> int:
        """Returns its number of rows when they are there; from then on the process takes no time of others.

        Raises:
            PeerLostError: It ended; its error is on standard error.
        """
        return int(self._child.hear()["num_rows"])

    def sample(self, num_rows: int, pacing: Pacing) -> Task:
        """One sample after the other, with as many threads as torch takes by itself."""
        order = {"num_rows": num_rows, "pacing": [pacing.round_s, pacing.min_ops, pacing.max_ops]}

        def run_round() -> Round:
            self._child.tell(order)
            answer = self._child.hear()
            return Round(tuple(answer["op_s"]), answer["elapsed_s"])

        return Task(run_round)

    def close(self) -> None:
        """Ends the process."""
        self._child.close()


def _fill_buffer(content: str, num_pool_rows: int, capacity: int, folder: str) -> Any:
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=folder))
    pool = POOLS[content](num_pool_rows)
    for start in range(0, capacity, num_pool_rows):
        buffer.extend(pool[: capacity - start])
    return buffer


def main(content: str, num_pool_rows: str, capacity: str, folder: str) -> int:
    """Follows orders until the input ends; returns the exit status."""
    pipe = LinePipe(sys.stdin, sys.stdout)
    sys.stdout = sys.stderr  # torchrl logs to standard output, which is the pipe here
    buffer = _fill_buffer(content, int(num_pool_rows), int(capacity), folder)
    pipe.send({"num_rows": len(buffer)})
    while (order := pipe.receive()) is not None:
        done = timed_round(partial(buffer.sample, order["num_rows"]), Pacing(*order["pacing"]))
        pipe.send({"op_s": list(done.op_s), "elapsed_s": done.elapsed_s})
    pipe.join()  # its thread must not hold standard input while the interpreter ends
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
