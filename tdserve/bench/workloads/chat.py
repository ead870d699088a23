"""Chat histories, as jobs after pre-training pass them around: texts, dicts, and tokens of every length."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from tdserve.base.errors import CorruptDataError
from tdserve.bench.figures import Figure, Scale, Target, make_figure
from tdserve.bench.floors import memcpy_ring
from tdserve.bench.histories import RAGGED_KEYS, History, check_histories, make_batch, make_histories
from tdserve.bench.measure import SUBJECT, Pacing, Task, alternate, timed_round
from tdserve.bench.options import Wire
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.row_floors import MEMCPY
from tdserve.bench.workloads.sampling import NUM_BATCHES_UNDER_WAY, pipelined_samples, single_samples
from tdserve.client.tables.replay import ReplayHandle

BATCH_ROWS = 64
POOL_ROWS = 1_024
NUM_EXTENDS_UNDER_WAY = 8
"""As many as batches in a pipeline of samples."""

STORE = "chat"

WRITTEN: dict[Wire, Target] = {"gloo": Target("at least", 38_000), "shm": Target("at least", 100_000)}
READ: dict[Wire, Target] = {"gloo": Target("at least", 41_900), "shm": Target("at least", 100_000)}
"""On one machine what the plan asks; over gloo what the best peer reached on this workload."""


@dataclass(frozen=True)
class Chats:
    """The store under test and its content.

    Attributes:
        batches: What is written, built before anything is timed.
    """

    stage: Stage
    replay: ReplayHandle
    histories: list[History]
    batches: list[TensorDict]

    @property
    def nbytes(self) -> int:
        """Payload of a mean batch."""
        return sum(history.nbytes for history in self.histories) // len(self.batches)

    @property
    def pacing(self) -> Pacing:
        """Enough batches for several to be under way."""
        return Pacing(self.stage.sizes.round_s, min_ops=2 * NUM_EXTENDS_UNDER_WAY)

    def check(self, batch: TensorDictBase) -> None:
        """Raises CorruptDataError unless every row is one of the histories."""
        check_histories(batch, self.histories, what="chat histories")


def measure_chat(stage: Stage) -> Iterator[Figure]:
    """Batches of 64 histories: written with several under way, sampled one by one and ahead."""
    with _open_chats(stage) as chats:
        name = f"extend {BATCH_ROWS} histories, {NUM_EXTENDS_UNDER_WAY} under way"
        yield _figure(chats, name, _writes(chats), _floor(chats, is_read=False), (WRITTEN[stage.wire],))
        checked = (chats.replay, BATCH_ROWS, chats.pacing, chats.check)
        name = f"sample {BATCH_ROWS} histories, one by one"
        yield _figure(chats, name, single_samples(*checked), _floor(chats, is_read=True), ())
        name = f"sample {BATCH_ROWS} histories, {NUM_BATCHES_UNDER_WAY} under way"
        yield _figure(chats, name, pipelined_samples(*checked), _floor(chats, is_read=True), (READ[stage.wire],))


@contextmanager
def _open_chats(stage: Stage) -> Iterator[Chats]:
    """A full store: no row is written for the first time while it is measured."""
    histories = make_histories(POOL_ROWS)
    batches = [make_batch(histories[start : start + BATCH_ROWS]) for start in range(0, POOL_ROWS, BATCH_ROWS)]
    capacity = stage.sizes.num_histories
    replay = stage.client.create_replay(STORE, like=histories[0].row(), capacity=capacity, ragged=list(RAGGED_KEYS))
    try:
        next_batch = cycle(batches).__next__
        for _ in range(capacity // BATCH_ROWS):
            replay.extend(next_batch())
        yield Chats(stage, replay, histories, batches)
    finally:
        stage.client.delete(STORE)


def _writes(chats: Chats) -> Task:
    next_batch = cycle(chats.batches).__next__
    under_way: deque[Future[torch.Tensor]] = deque()
    last: list[tuple[Any, TensorDict]] = []

    def put() -> None:
        if len(under_way) == NUM_EXTENDS_UNDER_WAY:
            under_way.popleft().result()
        batch = next_batch()
        under_way.append(chats.replay.extend(batch, return_early=True))
        last[:] = [(under_way[-1], batch)]

    def drain() -> None:
        while under_way:
            under_way.popleft().result()

    def check() -> None:
        future, batch = last[0]
        found = chats.replay[future.result()]
        chats.check(found)
        prompts, expected = (each.get("prompt").tolist() for each in (found, batch))
        if prompts != expected:
            raise CorruptDataError(path="chat histories read back", expected=expected[0], actual=str(prompts[0]))

    return Task(lambda: timed_round(put, chats.pacing, finish=drain), check)


def _floor(chats: Chats, *, is_read: bool) -> dict[str, Task]:
    """As many bytes, and nothing of what makes them values: over the wire, or in memory."""
    stage, nbytes = chats.stage, chats.nbytes
    if stage.wire == "gloo":
        stream = stage.gloo.stream_in if is_read else stage.gloo.stream_out
        return {"gloo stream": stream(nbytes)}
    whole = nbytes * len(chats.batches)
    return {MEMCPY: memcpy_ring(nbytes, source_nbytes=whole, ring_nbytes=whole, pacing=chats.pacing)}


def _figure(chats: Chats, name: str, subject: Task, floors: Mapping[str, Task], targets: tuple[Target, ...]) -> Figure:
    series = alternate({**floors, SUBJECT: subject}, chats.stage.num_rounds)
    own = series.pop(SUBJECT)
    return make_figure("chat", name, Scale("rows/s", BATCH_ROWS), subject=own, floors=series, targets=targets)
