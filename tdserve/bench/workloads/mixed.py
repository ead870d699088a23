"""Four actors and a learner at once: rows are written by four processes while this one samples."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

from tensordict import TensorDictBase

from tdserve.bench.child import Child
from tdserve.bench.content import check_rows, make_transitions
from tdserve.bench.figures import Figure, Scale
from tdserve.bench.measure import Round, Series
from tdserve.bench.mixed_writer import BATCH_ROWS, POOL_ROWS
from tdserve.bench.stage import Stage
from tdserve.client.tables.replay import ReplayHandle

NUM_WRITERS = 4
SAMPLE_ROWS = 256
PREFETCH = 8

STORE = "mixed"


def measure_mixed(stage: Stage) -> Iterator[Figure]:
    """Measures rows sampled and rows written per second, in the same seconds: ten in all."""
    pool = make_transitions(POOL_ROWS)
    with ExitStack() as stack:
        replay = stack.enter_context(stage.open_replay(STORE, pool[0], stage.sizes.replay_rows))
        arguments = ("tdserve.bench.mixed_writer", stage.address, stage.wire, STORE)
        writers = [stack.enter_context(closing(Child(*arguments))) for _ in range(NUM_WRITERS)]
        for writer in writers:
            writer.receive()
        turns = [_turn(stage, replay, writers, pool) for _ in range(stage.num_rounds + 1)][1:]  # the first warms up
    sampled, written = (Series(rounds) for rounds in zip(*turns, strict=True))
    name = f"sample {SAMPLE_ROWS} while {NUM_WRITERS} processes write"
    yield stage.judge(STORE, name, Scale("rows/s", SAMPLE_ROWS), sampled)
    name = f"{NUM_WRITERS} processes extend {BATCH_ROWS} meanwhile"
    yield stage.judge(STORE, name, Scale("rows/s", BATCH_ROWS), written)


def _turn(stage: Stage, replay: ReplayHandle, writers: list[Child], pool: TensorDictBase) -> tuple[Round, Round]:
    """Runs one round; returns what was sampled, and what was written meanwhile."""
    seconds = stage.sizes.mixed_s / stage.num_rounds
    with closing(replay.batches(SAMPLE_ROWS, prefetch=PREFETCH)) as batches:
        for _ in range(PREFETCH + 1):
            batch = next(batches)
        for writer in writers:
            writer.send({"seconds": seconds})
        op_s: list[float] = []
        began = last = time.perf_counter()
        while last - began < seconds:
            batch = next(batches)
            now = time.perf_counter()
            op_s.append(now - last)
            last = now
        check_rows(batch, pool, source_key="reward", what="a sample of mixed")
    answers = [writer.receive() for writer in writers]
    num_batches = sum(answer["num_batches"] for answer in answers)
    elapsed_s = max(answer["elapsed_s"] for answer in answers)
    return Round(tuple(op_s), last - began), Round((elapsed_s / num_batches,) * num_batches, elapsed_s)
