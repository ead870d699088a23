"""The event loop of a server does no work in proportion to its stores, whatever a client asks of one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.loop_costs import WatchedServer, long_ones

pytestmark = [pytest.mark.integration, pytest.mark.full]  # it measures time, which is unreliable beside other tests

SIZES = [
    pytest.param((2_000, 0.006), id="2000"),
    pytest.param((20_000, 0.005), id="20000", marks=[pytest.mark.full, pytest.mark.timeout(1200)]),
]
"""Stores, and seconds of the loop's own CPU that a callback may take."""

NUM_ROWS = 64


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[WatchedServer]:
    """A server whose loop is watched."""
    with WatchedServer(tmp_path / "root", tmp_path, adoptable=(str(tmp_path),)) as server:
        yield server


def uses_of_stores(client: tdserve.Client) -> dict[str, Callable[[], object]]:
    """Returns calls that make one request of every kind to existing stores."""
    rows = TensorDict({"x": torch.arange(NUM_ROWS)}, [NUM_ROWS])
    store = client.memmap(rows, "store")
    table = client.create_replay("table", like=rows[0], capacity=4 * NUM_ROWS, sampler=tdserve.Prioritized())
    queue = client.create_queue("queue", like=rows[0], max_size=4 * NUM_ROWS)
    numbers = table.extend(rows)
    weights = TensorDict({"w": torch.zeros(8)}, [])
    client.publish("weights", weights)

    def take_and_acknowledge() -> None:
        queue.extend(rows)
        queue.ack(queue.take(NUM_ROWS, ack=False))

    def look_for_what_is_not_there() -> None:
        with suppress(tdserve.DeadlineExceededError):
            client.from_remote_init("stor", timeout_s=1.5)

    return {
        "list": client.stores,
        "list some": lambda: client.stores("store 7"),
        "keys": lambda: client.keys("store"),
        "describe": lambda: client.describe("store"),
        "stats": client.stats,
        "get": lambda: client.from_remote_init("store"),
        "read": lambda: store["x"],
        "write": lambda: store.set_("x", rows["x"]),
        "write a row": lambda: store.set_at_("x", rows["x"][:1], slice(0, 1)),
        "extend": lambda: table.extend(rows),
        "sample": lambda: table.sample(16),
        "read a row of a table": lambda: table[0],
        "write rows of a table": lambda: table.set_at_("x", rows["x"], numbers),
        "change priorities": lambda: table.update_priority(numbers, torch.ones(NUM_ROWS)),
        "length": lambda: len(table),
        "take and acknowledge": take_and_acknowledge,
        "publish": lambda: client.publish("weights", weights),
        "latest": lambda: client.latest("weights"),
        "what is not there": look_for_what_is_not_there,
    }


def beginnings_and_ends(
    watched: WatchedServer, client: tdserve.Client, folder: Path
) -> dict[str, Callable[[], object]]:
    """Returns calls that make and remove stores, sessions and groups of every kind."""
    rows = TensorDict({"x": torch.arange(NUM_ROWS)}, [NUM_ROWS])
    names = (f"new {number}" for number in itertools.count())

    def create_and_delete() -> None:
        client.memmap(rows, name := next(names))
        client.delete(name)

    def create_table_and_delete() -> None:
        client.create_replay(name := next(names), like=rows[0], capacity=NUM_ROWS)
        client.delete(name)

    def publish_and_delete() -> None:
        client.publish(name := next(names), rows)
        client.delete(name)

    def adopt_and_delete() -> None:
        rows.memmap(str(folder / (name := next(names))))
        client.adopt(folder / name, name)
        client.delete(name)

    def come_and_go() -> None:
        for transport in ("gloo", "shm"):
            with watched.client(transport=transport) as other:
                other.from_remote_init("store 0")["x"]

    def meet() -> None:
        name = next(names)

        def join(rank: int) -> None:
            with watched.client(transport="gloo") as other, other.group(name, 2, rank) as group:
                group.broadcast(TensorDict({"x": torch.zeros(2)}, []), src=0)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(join, range(2)))

    return {
        "create": create_and_delete,
        "create a table": create_table_and_delete,
        "publish the first version": publish_and_delete,
        "adopt": adopt_and_delete,
        "come and go": come_and_go,
        "meet": meet,
    }


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("size", SIZES)
def test_loop_when_there_are_very_many_stores_then_no_call_keeps_it_busy(
    watched: WatchedServer, tmp_path: Path, transport: str, size: tuple[int, float]
) -> None:
    num_stores, limit_s = size
    with watched.client(transport=transport, timeout_s=110.0) as client:
        few = TensorDict({"x": torch.zeros(2)}, [2])
        for number in range(num_stores):
            client.init_remote(few, f"store {number}")
        calls = {**uses_of_stores(client), **beginnings_and_ends(watched, client, tmp_path)}
        assert long_ones(watched, calls, limit_s) == {}
