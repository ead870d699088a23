"""The learner: samples rows, improves the policy, publishes it, and tells how it goes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from tensordict import TensorDictBase

import tdserve
from tdserve.base.errors import TDServeError
from tdserve.examples.collectors.task import PATIENCE_S, Names, loss, make_policy, report, row

CAPACITY = 50_000
MIN_ROWS = 1_000
BATCH_SIZE = 512
UPDATES_PER_VERSION = 16
LEARNING_RATE = 3e-3

SERVER_TIMEOUT_S = 20.0
"""For calls that wait for nobody else: the server answers at once, or is gone."""


class VersionProgress(NamedTuple):
    """One version."""

    version: int
    num_rows: int  # that were collected until now
    rows_per_s: float
    mean_reward: float  # of the last batch

    def __str__(self) -> str:
        rate = f"{self.num_rows:,} rows ({self.rows_per_s:,.0f}/s)"
        return f"version {self.version:3}: {rate}, mean reward {self.mean_reward:.2f}"


def learn(
    client: tdserve.Client, names: Names, *, num_collectors: int, num_versions: int, max_seconds: float
) -> Iterator[VersionProgress]:
    """Makes the stores, waits for the collectors and publishes versions; the last one says that it is the last.

    Yields:
        Each version, after it was published.
    """
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    reports = client.create_queue(names.reports, like=report(), max_size=2 * num_collectors)
    rows = client.create_replay(names.rows, like=row(), capacity=CAPACITY, min_size=MIN_ROWS)
    client.publish(names.policy, policy, metadata={"is_last": False})
    with reports.take(num_collectors, timeout_s=PATIENCE_S):
        pass  # all are there
    end_s = time.monotonic() + max_seconds
    num_rows, seen_s = 0, time.monotonic()
    with rows.batches(BATCH_SIZE, prefetch=4, timeout_s=PATIENCE_S) as batches:
        for number in range(1, num_versions + 1):
            for batch in itertools.islice(batches, UPDATES_PER_VERSION):
                optimizer.zero_grad()
                loss(policy, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            is_last = number == num_versions or time.monotonic() > end_s
            version = client.publish(names.policy, policy, metadata={"is_last": is_last})
            before, before_s = num_rows, seen_s
            num_rows, seen_s = rows.info()["inserts"], time.monotonic()
            yield VersionProgress(
                version, num_rows, (num_rows - before) / (seen_s - before_s), batch["reward"].mean().item()
            )
            if is_last:
                return


def lead(
    address: str,
    run: str,
    *,
    num_collectors: int,
    num_versions: int,
    max_seconds: float,
    start: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Is the learner, from its beginning to its end; prints its progress and what every collector did.

    Args:
        address: Of the server.
        run: Name of the run, new on this server. Its stores are removed at the end.
        num_collectors: That say what they did at the end.
        num_versions, max_seconds: The run ends with the first of them that is reached.
        start: Called when the server has answered.
        check: Called with every version; ends the run by what it raises.
    """
    torch.set_num_threads(1)
    names = Names.of(run)
    with tdserve.connect(address, timeout_s=SERVER_TIMEOUT_S) as client:
        start()
        try:
            for progress in learn(
                client, names, num_collectors=num_collectors, num_versions=num_versions, max_seconds=max_seconds
            ):
                print(progress, flush=True)
                check()
            with client.queue(names.reports).take(num_collectors, timeout_s=PATIENCE_S) as reports:
                for report in sorted(reports, key=lambda report: int(report["collector"])):
                    print(_sentence(report), flush=True)
        finally:
            with suppress(TDServeError):
                for name in names:
                    if name in client:
                        client.delete(name)


def _sentence(report: TensorDictBase) -> str:
    num_rows, seconds = int(report["num_rows"]), float(report["seconds"])
    who = f"collector {int(report['collector'])} ({report['device']})"
    return f"{who}: {num_rows:,} rows ({num_rows / seconds:,.0f}/s), {int(report['num_versions'])} versions seen"
