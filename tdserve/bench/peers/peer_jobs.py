"""What is measured of each system, in the process that is its client."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict

from tdserve.bench.child import Pipe
from tdserve.bench.figures import to_gigabytes
from tdserve.bench.peers.contender import Contender
from tdserve.bench.workload_data import (
    Pool,
    check_equal,
    make_pixels,
    make_transitions,
    make_weights,
    stamp,
)

MIN_STEPS = 3
"""A step that takes longer than the time of a round is made this often all the same."""

WARM_VERSIONS = 5
"""Versions of weights before the first that is measured: a server that keeps some makes files, or memory, for these."""

SAMPLE_ROWS = 256
ITEM = TensorDict({"a": torch.arange(8.0), "b": torch.tensor(3)}, [])
"""A small tensordict that is read by its name."""


class Steps(NamedTuple):
    """A job that has been prepared.

    Attributes:
        step: Does it once.
        finish: Waits until all steps are done.
        check: Compares what the last step has returned with what was written. It is not measured.
    """

    step: Callable[[], Any]
    finish: Callable[[], None]
    check: Callable[[Any], None]


@dataclass(frozen=True)
class PeerJob:
    """A row of the table.

    Attributes:
        label: Its name.
        unit: What its figures are: amounts in a second, or the time of a step.
        amount: Rows, or gigabytes, of a step.
        prepare: Prepares it for a system.
    """

    label: str
    unit: Literal["rows/s", "GB/s", "ms"]
    amount: float
    prepare: Callable[[Contender], Steps]

    def convert(self, steps_per_s: float) -> float:
        """Returns the figure for a number of steps in a second."""
        return 1000.0 / steps_per_s if self.unit == "ms" else steps_per_s * self.amount


def make_jobs(*, is_quick: bool) -> list[PeerJob]:
    """Returns all jobs; a quick run has small sizes."""
    transitions = make_transitions(1024)
    pixels = make_pixels(64)
    capacities = (4096, 256) if is_quick else (100_000, 2048)
    rows, frames = _Table("transitions", transitions, capacities[0]), _Table("pixels", pixels, capacities[1])
    mebibytes = 1 if is_quick else 256
    weights = make_weights(100, mebibytes << 20)
    batch = to_gigabytes(pixels.row_nbytes * 64)
    return [
        PeerJob("write 1024 transitions at a time", "rows/s", 1024, partial(_send, rows, 1024)),
        PeerJob("write 64 transitions at a time", "rows/s", 64, partial(_send, rows, 64)),
        PeerJob("write single rows", "rows/s", 1, partial(_send_single, rows)),
        PeerJob("acknowledged write of 64 transitions", "ms", 1, partial(_extend, rows)),
        PeerJob(f"sample {SAMPLE_ROWS} transitions", "ms", 1, partial(_sample, rows)),
        PeerJob("write 64 pixels at a time", "GB/s", batch, partial(_send, frames, 64)),
        PeerJob(f"sample {SAMPLE_ROWS} pixels", "GB/s", batch * SAMPLE_ROWS / 64, partial(_sample, frames)),
        PeerJob(f"weights of {mebibytes} MiB, published and read", "ms", 1, partial(_publish, weights)),
        PeerJob("one small tensordict by name", "ms", 1, _get),
    ]


def run_jobs(pipe: Pipe, kind: type[Contender], folder: Path, is_quick: bool) -> None:
    """Is the client of a system: opens it, and answers each label of a job and a time with the steps in a second."""
    jobs = {job.label: job for job in make_jobs(is_quick=is_quick)}
    prepared: dict[str, Steps] = {}
    with kind() as contender:
        contender.open(folder)
        pipe.send(kind.label)
        while True:
            label, seconds = pipe.recv()
            if label not in prepared:
                prepared[label] = jobs[label].prepare(contender)
            pipe.send(_time(prepared[label], seconds))


def _time(steps: Steps, seconds: float) -> float:
    """Makes steps for a while; returns how many are done in a second."""
    steps.step()
    steps.finish()
    begun_s, num_steps, found = time.perf_counter(), 0, None
    while num_steps < MIN_STEPS or time.perf_counter() - begun_s < seconds:
        found = steps.step()
        num_steps += 1
    steps.finish()
    elapsed_s = time.perf_counter() - begun_s
    steps.check(found)
    return num_steps / elapsed_s


@dataclass(frozen=True)
class _Table:
    name: str
    pool: Pool
    capacity: int

    def open(self, contender: Contender, *, use: str) -> str:
        """Creates a table for one use, filled with the pool's rows once; returns its name."""
        name = f"{self.name}-{use}"
        contender.create(name, self.pool.rows[0], self.capacity)
        contender.extend(name, self.pool.rows)
        return name

    def check_sample(self, contender: Contender, name: str, _: Any) -> None:
        """Draws rows, and compares them with what was written."""
        self.pool.check(contender.sample(name, SAMPLE_ROWS))


def _send(table: _Table, num_rows: int, contender: Contender) -> Steps:
    name, batches = table.open(contender, use=f"sent-{num_rows}"), table.pool.iter_batches(num_rows)
    check = partial(table.check_sample, contender, name)
    return Steps(lambda: contender.send(name, next(batches)), contender.flush, check)


def _send_single(table: _Table, contender: Contender) -> Steps:
    name, rows = table.open(contender, use="single"), cycle(list(table.pool.rows))
    check = partial(table.check_sample, contender, name)
    return Steps(lambda: contender.send_one(name, next(rows)), contender.flush, check)


def _extend(table: _Table, contender: Contender) -> Steps:
    name, batches = table.open(contender, use="extended"), table.pool.iter_batches(64)
    check = partial(table.check_sample, contender, name)
    return Steps(lambda: contender.extend(name, next(batches)), contender.flush, check)


def _sample(table: _Table, contender: Contender) -> Steps:
    name = table.open(contender, use="sampled")
    return Steps(lambda: contender.sample(name, SAMPLE_ROWS), contender.flush, table.pool.check)


def _publish(weights: TensorDict, contender: Contender) -> Steps:
    into, version = weights.clone(), 0

    def publish_and_pull() -> Any:
        nonlocal version
        version += 1
        stamp(weights, version)
        contender.publish("weights", weights)
        return contender.pull("weights", into)

    for _ in range(WARM_VERSIONS):
        publish_and_pull()
    return Steps(publish_and_pull, contender.flush, lambda found: check_equal(found, weights, what="weights"))


def _get(contender: Contender) -> Steps:
    contender.put("item", ITEM)
    return Steps(lambda: contender.get("item"), contender.flush, lambda found: check_equal(found, ITEM, what="item"))
