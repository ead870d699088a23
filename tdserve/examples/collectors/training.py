"""The learner: samples rows, improves the policy, publishes it, and reports its progress."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator
from contextlib import suppress

import torch
from tensordict import TensorDictBase

import tdserve
from tdserve.base.errors import TDServeError
from tdserve.examples.collectors.task import PATIENCE_S, Names, collect, loss, make_policy, make_report

CAPACITY = 50_000
MIN_ROWS = 1_000
BATCH_SIZE = 512
UPDATES_PER_VERSION = 16
LEARNING_RATE = 3e-3


def lead(
    client: tdserve.Client, run: str, *, num_collectors: int, num_versions: int, max_seconds: float
) -> Generator[str]:
    """Is the learner: makes the stores, waits for the collectors, and publishes versions; the last one says that it is.

    Args:
        client: An open client, the caller's.
        run: Name of the run, new on this server. Its stores are removed at the end.
        num_collectors: Number of collectors, which report when they begin, and what they did at the end.
        num_versions, max_seconds: The run ends with the first of them that is reached.

    Yields:
        A line for each version, after it was published, and at the end a line for each collector.
    """
    names, policy = Names.of(run), make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    try:
        reports = client.create_queue(names.reports, like=make_report()[0], max_size=2 * num_collectors)
        like = collect(policy, 1, torch.device("cpu"))[0]
        rows = client.create_replay(names.rows, like=like, capacity=CAPACITY, min_size=MIN_ROWS)
        client.publish(names.policy, policy, metadata={"is_last": False})
        with reports.take(num_collectors, timeout_s=PATIENCE_S):
            pass  # all are there
        seen_s, num_rows, is_last = time.monotonic(), 0, False
        end_s = seen_s + max_seconds
        with rows.batches(BATCH_SIZE, prefetch=4, timeout_s=PATIENCE_S) as batches:
            while not is_last:
                for batch in itertools.islice(batches, UPDATES_PER_VERSION):
                    optimizer.zero_grad()
                    loss(policy, batch).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                num_versions -= 1
                is_last = num_versions == 0 or time.monotonic() > end_s
                version = client.publish(names.policy, policy, metadata={"is_last": is_last})
                before, before_s = num_rows, seen_s
                num_rows, seen_s = rows.info()["inserts"], time.monotonic()
                rate = f"{num_rows:,} rows ({(num_rows - before) / (seen_s - before_s):,.0f}/s)"
                yield f"version {version:3}: {rate}, mean reward {batch['reward'].mean().item():.2f}"
        with reports.take(num_collectors, timeout_s=PATIENCE_S) as found:
            yield from map(_describe_collection, sorted(found, key=lambda report: int(report["collector"])))
    finally:
        with suppress(TDServeError):
            for name in names:
                if name in client:
                    client.delete(name)


def _describe_collection(report: TensorDictBase) -> str:
    num_rows, seconds = int(report["num_rows"]), float(report["seconds"])
    who = f"collector {int(report['collector'])} ({report['device']})"
    return f"{who}: {num_rows:,} rows ({num_rows / seconds:,.0f}/s), {int(report['num_versions'])} versions seen"
