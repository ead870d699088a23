"""Loops that drop what they open, over and over: nothing of it stays."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import tdserve
from tests.integration.conftest import FreshServer, example
from tests.integration.test_dropped_clients import TIMEOUT_S, TRANSPORTS, list_sessions
from tests.processes import START_TIMEOUT_S, wait_for

pytestmark = pytest.mark.integration


class Counts(NamedTuple):
    """What must not grow."""

    threads: int
    descriptors: int
    sessions: int
    objects: int


NUM_ROUNDS = 90

MOST_WHEN_IDLE = Counts(threads=25, descriptors=100, sessions=1, objects=1 << 30)
"""What one client that does nothing adds to its program."""

MORE = Counts(threads=5, descriptors=5, sessions=0, objects=NUM_ROUNDS)
"""Growth that is no leak: a pool starts threads when it needs them. A leak would grow with each round."""


def drop_client(client: tdserve.Client, address: str, transport: Any, name: str) -> None:
    dropped = tdserve.connect(address, transport=transport, timeout_s=START_TIMEOUT_S)
    dropped[f"{name}-s"][0]
    dropped.replay(name).extend(example(), return_early=True)


def close_client(client: tdserve.Client, address: str, transport: Any, name: str) -> None:
    with tdserve.connect(address, transport=transport, timeout_s=START_TIMEOUT_S) as closed:
        closed[f"{name}-s"][0]
        closed.replay(name).extend(example(), return_early=True)


def drop_handles(client: tdserve.Client, address: str, transport: Any, name: str) -> None:
    client[f"{name}-s"][1:]["n"]
    client.replay(name).sample(2)
    client.kv(f"{name}-k").get("a")
    client.queue(f"{name}-q").take(2, ack=False)


def drop_batches(client: tdserve.Client, address: str, transport: Any, name: str) -> None:
    batches = client.replay(name).batches(2)
    next(batches)


def drop_taken_batches(client: tdserve.Client, address: str, transport: Any, name: str) -> None:
    next(iter(client.queue(f"{name}-q").batches(2)))


def drop_leases(client: tdserve.Client, address: str, transport: Any, name: str) -> None:
    client.queue(f"{name}-q").take(2)


def drop_subscription(client: tdserve.Client, address: str, transport: Any, name: str) -> None:
    next(client.subscribe(f"{name}-w"))


def drop_writer(client: tdserve.Client, address: str, transport: Any, name: str) -> None:
    client.replay(name).writer().append(example()[0])


LOOPS = [
    drop_client,
    close_client,
    drop_handles,
    drop_batches,
    drop_taken_batches,
    drop_leases,
    drop_subscription,
    drop_writer,
]


@pytest.mark.full
@TRANSPORTS
@pytest.mark.parametrize("step", LOOPS)
@pytest.mark.filterwarnings("ignore:unclosed client:ResourceWarning")
def test_loop_when_it_drops_what_it_opens_then_threads_descriptors_sessions_and_objects_stay(
    fresh_server: FreshServer, transport: Any, step: Callable[[tdserve.Client, str, Any, str], None]
) -> None:
    server, name = fresh_server(), "loop"
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    most_when_idle = Counts(
        MOST_WHEN_IDLE.threads + threads, MOST_WHEN_IDLE.descriptors + descriptors, *MOST_WHEN_IDLE[2:]
    )
    with server.client(transport=transport, timeout_s=START_TIMEOUT_S) as client:
        client.memmap(example(), f"{name}-s")
        client.create_replay(name, example()[0], 64).extend(example())
        client.create_kv(f"{name}-k")["a"] = 1
        client.create_queue(f"{name}-q", example()[0], 4096).extend(example(2048))
        client.publish(f"{name}-w", example())

        def count() -> Counts:
            gc.collect()
            sessions = len(list_sessions(client))
            return Counts(threading.active_count(), len(os.listdir("/proc/self/fd")), sessions, len(gc.get_objects()))

        def go_round(num_rounds: int) -> None:
            for _ in range(num_rounds):
                step(client, server.address, transport, name)

        def find_settled(most: Counts) -> Counts | None:
            found = count()
            return found if all(now <= limit for now, limit in zip(found, most, strict=True)) else None

        go_round(NUM_ROUNDS // 3)
        idle = wait_for(lambda: find_settled(most_when_idle), "an idle client", timeout_s=TIMEOUT_S)
        most = Counts(*(now + more for now, more in zip(idle, MORE, strict=True)))
        go_round(NUM_ROUNDS)
        wait_for(lambda: find_settled(most), f"a return to {idle} from {count()}", timeout_s=TIMEOUT_S)
