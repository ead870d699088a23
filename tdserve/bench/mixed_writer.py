"""One writer of the mixed workload: ``python -m tdserve.bench.mixed_writer ADDRESS WIRE STORE``, until input ends."""

from __future__ import annotations

import sys
import time
from collections import deque
from concurrent.futures import Future
from itertools import cycle

import torch

from tdserve.base.config import check_transport
from tdserve.base.errors import TDServeError
from tdserve.bench.child import LinePipe
from tdserve.bench.content import transitions
from tdserve.client.client import connect

POOL_ROWS = 4_096
BATCH_ROWS = 64
NUM_UNDER_WAY = 64
"""As many as a client may have; those that wait for others share requests with their neighbours."""


def main() -> int:
    """Writes for as many seconds as each order says, and answers how many rows were acknowledged."""
    address, wire, store = sys.argv[1:4]
    pipe = LinePipe(sys.stdin, sys.stdout)
    pool = transitions(POOL_ROWS)
    next_batch = cycle([pool[start : start + BATCH_ROWS] for start in range(0, POOL_ROWS, BATCH_ROWS)]).__next__
    try:
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
    except TDServeError:
        return 1  # the benchmark ended in the middle of a round
    finally:
        pipe.join()  # its thread must not hold standard input while the interpreter ends
    return 0


if __name__ == "__main__":
    sys.exit(main())
