"""Four actors and a learner at once: rows are written by four processes while this one samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import ExitStack, closing

from tdserve.base.config import TransportName
from tdserve.bench.child import Pipe, open_children
from tdserve.bench.figures import Scale
from tdserve.bench.measure import Pacing, Round, Task, time_round
from tdserve.bench.stage import Case, Stage
from tdserve.bench.workload_data import make_transitions
from tdserve.bench.workloads.replay_rounds import make_extends
from tdserve.client.connecting import connect

NUM_WRITERS = 4
POOL_ROWS = 4_096
BATCH_ROWS = 64
NUM_EXTENDS_UNDER_WAY = 64
"""The most that a client may have. Extends that wait for others share requests with their neighbours."""

SAMPLE_ROWS = 256
PREFETCH = 8

STORE = "mixed"


def measure_mixed(stage: Stage) -> Generator[Case]:
    """Measures rows sampled and rows written per second, in the same seconds: ten in all."""
    pool = make_transitions(POOL_ROWS)
    written: deque[Round] = deque()
    with ExitStack() as stack:
        replay = stack.enter_context(stage.open_replay(STORE, pool.rows[0], stage.sizes.replay_rows))
        writers = stack.enter_context(open_children(NUM_WRITERS, write_rows, stage.address, stage.transport, STORE))
        for writer in writers:
            writer.recv()  # it has written

        def run_round(pacing: Pacing) -> Round:
            with closing(replay.batches(SAMPLE_ROWS, prefetch=PREFETCH)) as batches:
                for _ in range(PREFETCH + 1):
                    next(batches)
                for writer in writers:
                    writer.send(pacing.round_s)
                sampled = time_round(lambda: next(batches), pacing)
            num_batches, elapsed_s = zip(*(writer.recv() for writer in writers), strict=True)
            seconds = max(elapsed_s) / sum(num_batches)
            written.append(Round((seconds,) * sum(num_batches), max(elapsed_s)))
            return sampled

        pacing = Pacing(stage.sizes.mixed_s / stage.options.num_rounds)
        name = f"sample {SAMPLE_ROWS} while {NUM_WRITERS} processes write"
        yield Case(name, Scale("rows/s", SAMPLE_ROWS), Task(run_round, pool.check), pacing=pacing)
    name = f"{NUM_WRITERS} processes extend {BATCH_ROWS} meanwhile"
    yield Case(name, Scale("rows/s", BATCH_ROWS), Task(lambda _: written.popleft()))


def write_rows(pipe: Pipe, address: str, transport: TransportName, store: str) -> None:
    """Runs one writer process: writes for as many seconds as each order has, and answers how many batches that were.

    All are acknowledged by then; the seconds until then are part of the answer.
    """
    batches = make_transitions(POOL_ROWS).iter_batches(BATCH_ROWS)
    with connect(address, transport=transport) as client:
        replay = client.replay(store)
        replay.extend(next(batches))
        pipe.send(None)
        extends = make_extends(replay, batches, NUM_EXTENDS_UNDER_WAY, lambda index, batch: None)
        while True:
            done = extends.run_round(Pacing(pipe.recv()))
            pipe.send((len(done.op_s), done.elapsed_s))
