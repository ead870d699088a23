"""One writer of the mixed workload: ``python -m tdserve.bench.mixed_writer ADDRESS WIRE STORE``.

It ends when its input ends.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from itertools import cycle

import torch

from tdserve.base.config import check_transport
from tdserve.base.errors import TDServeError
from tdserve.bench.child import LinePipe, run_child
from tdserve.bench.content import make_transitions
from tdserve.client.client import connect

POOL_ROWS = 4_096
BATCH_ROWS = 64
NUM_UNDER_WAY = 64
"""The most that a client may have. Extends that wait for others share requests with their neighbours."""


def _write(pipe: LinePipe, address: str, wire: str, store: str) -> None:
    """Writes for as many seconds as each order says, and answers how many batches were acknowledged."""
    pool = make_transitions(POOL_ROWS)
    next_batch = cycle([pool[start : start + BATCH_ROWS] for start in range(0, POOL_ROWS, BATCH_ROWS)]).__next__
    with connect(address, transport=check_transport(wire)) as client:
        replay = client.replay(store)
        replay.extend(next_batch())
        pipe.send({"ready": True})
        while (order := pipe.receive()) is not None:
            under_way: deque[Future[torch.Tensor]] = deque()
            num_batches = 0
            started = time.perf_counter()
            while time.perf_counter() - started < order["seconds"]:
                if len(under_way) == NUM_UNDER_WAY:
                    under_way.popleft().result()
                under_way.append(replay.extend(next_batch(), return_early=True))
                num_batches += 1
            for future in under_way:
                future.result()
            pipe.send({"num_batches": num_batches, "elapsed_s": time.perf_counter() - started})


if __name__ == "__main__":
    address, wire, store = sys.argv[1:4]
    sys.exit(run_child(partial(_write, address=address, wire=wire, store=store), ends=(TDServeError,)))
