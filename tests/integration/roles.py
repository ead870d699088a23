"""The roles of a fleet's children. Each child has a client of its own."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import tdserve
from tdserve.base.config import TransportName
from tests.integration.checked_rows import checked_ids, checked_rows

Say = Callable[..., None]

transport: TransportName = "gloo"
"""Transport of every client here; set by the program that runs the roles."""

TIMEOUT_S = 90.0
"""Timeout of every call: a data worker may be killed, and twenty processes share two cores."""


def extend(address: str, say: Say, *, name: str, writer: int, num_extends: int, num_rows: int, num_floats: int) -> None:
    """Writes checked rows and prints how many were acknowledged."""
    with tdserve.connect(address, transport=transport, timeout_s=TIMEOUT_S) as client:
        replay = client.replay(name)
        for start in range(0, num_extends * num_rows, num_rows):
            index = replay.extend(checked_rows(writer, start, num_rows, num_floats))
            assert len(set(index.tolist())) == num_rows
        say("stored", num_extends * num_rows)


def sample(address: str, say: Say, *, name: str, num_rows: int, until: int, path: str) -> None:
    """Samples until the table has this many inserts. Keeps which row was read where; fails if a row is torn."""
    with tdserve.connect(address, transport=transport, timeout_s=TIMEOUT_S) as client:
        replay = client.replay(name)
        seen: dict[tuple[int, int], int] = {}
        num_sampled = 0
        is_over = False
        while not is_over:
            is_over = replay.info()["inserts"] >= until  # the last sample is of the complete table
            batch = replay.sample(num_rows)
            places = zip(batch["index"].tolist(), batch["generation"].tolist(), strict=True)
            for place, row in zip(places, checked_ids(batch).tolist(), strict=True):
                assert seen.setdefault(place, row) == row, f"two rows at {place}: {row} and {seen[place]}"
            num_sampled += num_rows
        np.save(path, np.array([(*place, row) for place, row in seen.items()], np.int64))
        say("sampled", num_sampled)


def count(address: str, say: Say, *, name: str, num_rows: int, num_samples: int, num_cells: int) -> None:
    """Prints how often each row was drawn."""
    with tdserve.connect(address, transport=transport, timeout_s=TIMEOUT_S) as client:
        replay = client.replay(name)
        counts = np.zeros(num_cells, np.int64)
        for _ in range(num_samples):
            counts += np.bincount(replay.sample(num_rows)["index"].numpy(), minlength=num_cells)
        say("counted", *counts)


def keep_ratio(address: str, say: Say, *, name: str, writer: int, num_calls: int, num_rows: int) -> None:
    """Writes (``writer`` from 0) or samples (-1) as fast as the limiter allows."""
    with tdserve.connect(address, transport=transport, timeout_s=TIMEOUT_S) as client:
        replay = client.replay(name)
        for call in range(num_calls):
            if writer < 0:
                replay.sample(num_rows)
            else:
                replay.extend(checked_rows(writer, call * num_rows, num_rows, 4))
        say("over", num_calls * num_rows)


def drain(address: str, say: Say, *, name: str, num_rows: int) -> None:
    """Takes rows of a queue until its end, and prints which of them it has consumed."""
    with tdserve.connect(address, transport=transport, timeout_s=TIMEOUT_S) as client:
        queue = client.queue(name)
        say("begins")
        try:
            while True:
                taken = queue.take(num_rows, ack=False)
                try:
                    queue.ack(taken)
                except tdserve.WrongStateError:
                    say("lost", *taken["number"].tolist())  # they are given back with the session
                else:
                    say("consumed", *taken["number"].tolist())
        except tdserve.EndOfStreamError:
            say("over")


def hold(address: str, say: Say, *, name: str, num_rows: int, consumer: str = "") -> None:
    """Takes rows and never acknowledges them."""
    with tdserve.connect(address, transport=transport, timeout_s=TIMEOUT_S) as client:
        table: Any = client.replay(name) if consumer else client.queue(name)
        more = {"consumer": consumer} if consumer else {}
        say("holds", *table.take(num_rows, ack=False, **more)["number"].tolist())
        signal.pause()


def epoch(address: str, say: Say, *, name: str, num_rows: int, num_samples: int) -> None:
    """Prints which rows were sampled."""
    with tdserve.connect(address, transport=transport, timeout_s=TIMEOUT_S) as client:
        replay = client.replay(name)
        for _ in range(num_samples):
            say("drew", *replay.sample(num_rows)["number"].tolist())
        say("over")


def overwrite(address: str, say: Say, *, name: str, first: int, num_rows: int, size: int) -> None:
    """Overwrites one leaf of the same rows again and again with growing numbers, and prints the acknowledged ones."""
    with tdserve.connect(address, transport=transport, timeout_s=TIMEOUT_S) as client:
        table = client.replay(name)
        for number in itertools.count(1):
            value = torch.full((num_rows, size), float(number))
            table.set_at_("reward", value, torch.arange(first, first + num_rows))
            say("stored", number)


def share(
    address: str, say: Say, *, name: str, rank: int, world_size: int, num_rows: int, first: int, num_steps: int
) -> None:
    """Reads its share of some steps, and prints each with the numbers of its rows; fails if a row is torn."""
    with tdserve.connect(address, transport=transport, timeout_s=TIMEOUT_S) as client:
        replay = client.replay(name)
        for step in range(first, first + num_steps):
            batch = replay.sample(num_rows, rank=rank, world_size=world_size, step=step)
            say("step", step, *checked_ids(batch).tolist())
        say("done", rank)
        signal.pause()


ROLES: dict[str, Callable[..., None]] = {
    "extend": extend,
    "sample": sample,
    "count": count,
    "keep_ratio": keep_ratio,
    "drain": drain,
    "hold": hold,
    "epoch": epoch,
    "overwrite": overwrite,
    "share": share,
}
