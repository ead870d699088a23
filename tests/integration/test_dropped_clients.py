"""Clients that nobody closed: they end once nothing that they handed out can be used any more, and not before."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tdserve
from tdserve import aio
from tests.integration.conftest import FreshServer, example
from tests.processes import START_TIMEOUT_S, wait_for

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]

TIMEOUT_S = 60.0

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "gloo", "grpc"])


def list_sessions(watching: tdserve.Client) -> set[int]:
    """Returns the numbers of the server's open sessions."""
    return {each["session"] for each in watching.stats()["sessions"]}


def wait_for_end(watching: tdserve.Client, session: int) -> None:
    """Waits until the server has ended a session."""
    wait_for(lambda: session not in list_sessions(watching), "the end of a session", timeout_s=TIMEOUT_S)


@contextmanager
def warned_of(address: str) -> Iterator[None]:
    """A block that drops a client: there must be one warning, as soon as no thread holds the client any more."""

    def has_warned() -> bool:
        gc.collect()
        return bool(caught)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield
        wait_for(has_warned, "a warning of the client that was dropped", timeout_s=TIMEOUT_S)
    assert [str(each.message) for each in caught] == [f"unclosed client of {address}"]


def fill_queue(watching: tdserve.Client, name: str) -> tdserve.QueueHandle:
    """Makes a queue with the rows of ``example()``."""
    queue = watching.create_queue(name, example()[0], 8)
    queue.extend(example())
    return queue


@TRANSPORTS
def test_client_when_dropped_then_its_session_ends_with_a_warning_and_its_leases_are_free(
    server: tdserve.Server, sweeper: tdserve.Client, name: str, transport: Any
) -> None:
    queue = fill_queue(sweeper, name)
    client = server.client(transport=transport, timeout_s=START_TIMEOUT_S)
    held = client.queue(name).take(4, ack=False)
    assert held["n", "y"].tolist() == [0, 1, 2, 3]
    session = client.stats()["session"]
    assert session in list_sessions(sweeper)
    with warned_of(server.address):
        del client
        gc.collect()
    wait_for_end(sweeper, session)
    assert queue.take(4, timeout_s=TIMEOUT_S).rows["n", "y"].tolist() == [0, 1, 2, 3]


@TRANSPORTS
def test_client_when_dropped_after_every_kind_of_call_then_it_is_freed_without_the_garbage_collector(
    server: tdserve.Server, sweeper: tdserve.Client, name: str, transport: Any
) -> None:
    def use() -> tuple[weakref.ref[tdserve.Client], int]:
        client = server.client(transport=transport, timeout_s=START_TIMEOUT_S)
        table = client.create_replay(name, example()[0], 64)
        table.extend(example())
        table.extend(example(), return_early=True).result(TIMEOUT_S)
        assert len(table.sample(2)) == 2
        client.publish(f"{name}-w", example())
        assert client.latest(f"{name}-w") is not None
        kept = client.create_kv(f"{name}-k")
        kept["a"] = 1
        assert kept["a"] == 1
        client.memmap(example(), f"{name}-s")[0] = example()[1]
        for suffix in ("-w", "-k", "-s"):
            client.delete(name + suffix)
        return weakref.ref(client), client.stats()["session"]

    gc.collect()
    gc.disable()
    try:
        with warned_of(server.address):
            client, session = use()
            wait_for(lambda: client() is None, "the end of the last call", timeout_s=TIMEOUT_S)
    finally:
        gc.enable()
    wait_for_end(sweeper, session)


def test_client_when_closed_and_dropped_then_there_is_no_warning(server: tdserve.Server) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with server.client(timeout_s=START_TIMEOUT_S) as client:
            client.stores()
        del client
        unused = tdserve.Client(server.address)  # has opened no session
        del unused
        gc.collect()
    assert [str(each.message) for each in caught if each.category is ResourceWarning] == []


@pytest.mark.slow
@TRANSPORTS
def test_client_when_dropped_while_its_server_is_away_then_it_is_freed(
    fresh_server: FreshServer, transport: Any
) -> None:
    server = fresh_server()

    def fail(call: Callable[[], object]) -> None:
        with suppress(tdserve.TDServeError):
            call()
            pytest.fail("there was no error")

    def use() -> weakref.ref[tdserve.Client]:
        client = server.client(transport=transport, timeout_s=START_TIMEOUT_S)
        store = client.memmap(example(), "s")
        client.timeout_s = 1.0
        server.shutdown()
        for call in (
            lambda: store[0],
            lambda: client.publish("w", example(), return_early=True).result(),
            client.stats,
        ):
            fail(call)
        return weakref.ref(client)

    with warned_of(server.address):
        client = use()
        wait_for(lambda: gc.collect() is None or client() is None, "its end", timeout_s=TIMEOUT_S)


# ---------------------------------------------------------------- what keeps a client


class Kept(NamedTuple):
    """Something that a test keeps of a client, and how to use it."""

    kept: Any
    use: Callable[[Any], object]


def keep_handle(client: tdserve.Client, name: str) -> Kept:
    return Kept(client.memmap(example(), name), lambda store: store[1])


def keep_view(client: tdserve.Client, name: str) -> Kept:
    return Kept(client.memmap(example(), name).unsqueeze(0), lambda view: view[0])


def keep_call(client: tdserve.Client, name: str) -> Kept:
    client.memmap(example(), name)
    return Kept(client.describe, lambda describe: describe(name))


def keep_rows(client: tdserve.Client, name: str) -> Kept:
    return Kept(iter(client.memmap(example(), name)), next)


def keep_batches(client: tdserve.Client, name: str) -> Kept:
    table = client.create_replay(name, example()[0], 8)
    table.extend(example())
    return Kept(table.batches(2), lambda batches: [next(batches) for _ in range(8)])


def keep_taken_batches(client: tdserve.Client, name: str) -> Kept:
    return Kept(iter(fill_queue(client, name).batches(2)), next)


def keep_lease(client: tdserve.Client, name: str) -> Kept:
    return Kept(fill_queue(client, name).take(2), lambda taken: taken.ack())


def keep_writer(client: tdserve.Client, name: str) -> Kept:
    def write(writer: Any) -> None:
        writer.append(example()[0])
        writer.flush()
        assert writer.num_acknowledged == 1

    return Kept(client.create_replay(name, example()[0], 8).writer(), write)


def keep_subscription(client: tdserve.Client, name: str) -> Kept:
    client.publish(name, example())
    return Kept(client.subscribe(name), next)


def keep_group(client: tdserve.Client, name: str) -> Kept:
    return Kept(client.group(name, 1), lambda group: group.barrier())


def keep_entries(client: tdserve.Client, name: str) -> Kept:
    kept = client.create_kv(name)
    kept["a"] = 1
    return Kept(iter(kept.items()), next)


KEEPERS = [
    keep_handle,
    keep_view,
    keep_call,
    keep_rows,
    keep_batches,
    keep_taken_batches,
    keep_lease,
    keep_writer,
    keep_subscription,
    keep_group,
    keep_entries,
]


@TRANSPORTS
@pytest.mark.parametrize("keep", KEEPERS)
def test_client_when_something_of_it_is_kept_then_that_works_and_the_session_ends_with_it(
    server: tdserve.Server,
    sweeper: tdserve.Client,
    name: str,
    transport: Any,
    keep: Callable[[tdserve.Client, str], Kept],
) -> None:
    def open_client() -> tuple[Kept, int]:
        client = server.client(transport=transport, timeout_s=START_TIMEOUT_S)
        return keep(client, name), client.stats()["session"]

    (kept, use), session = open_client()
    gc.collect()
    use(kept)
    gc.collect()
    assert session in list_sessions(sweeper)
    with warned_of(server.address):
        del kept, use
        # Threads of iterators and writers have the client until they end.
        wait_for(lambda: gc.collect() is None or session not in list_sessions(sweeper), "its end", timeout_s=TIMEOUT_S)


@TRANSPORTS
def test_client_when_only_a_future_is_kept_then_its_call_is_finished_before_the_session_ends(
    server: tdserve.Server, sweeper: tdserve.Client, name: str, transport: Any
) -> None:
    queue = sweeper.create_queue(name, example()[0], 4)

    def begin() -> tuple[Any, int]:
        client = server.client(transport=transport, timeout_s=TIMEOUT_S)
        client.queue(name).extend(example())
        return client.queue(name).extend(example(), return_early=True), client.stats()["session"]

    with warned_of(server.address):
        future, session = begin()
        gc.collect()
        assert not future.done()
        assert session in list_sessions(sweeper)
        with queue.take(4):  # makes room
            pass
        wait_for(lambda: session not in list_sessions(sweeper), "the end of its session", timeout_s=TIMEOUT_S)
    assert len(future.result(TIMEOUT_S)) == 4


def test_async_client_when_dropped_then_its_session_ends_and_a_kept_handle_delays_that(
    server: tdserve.Server, sweeper: tdserve.Client, name: str
) -> None:
    queue = fill_queue(sweeper, name)

    async def use() -> tuple[int, int]:
        client = await aio.connect(server.address, timeout_s=START_TIMEOUT_S)
        session = (await client.stats())["session"]
        kept = await client.queue(name)
        del client
        gc.collect()
        taken = await kept.take(2, ack=False)
        return session, len(taken)

    with warned_of(server.address):
        session, num_rows = asyncio.run(use())
        gc.collect()
    assert num_rows == 2
    wait_for_end(sweeper, session)
    assert queue.take(4, timeout_s=TIMEOUT_S).rows["n", "y"].tolist() == [0, 1, 2, 3]


# ---------------------------------------------------------------- forks, exits


def test_client_when_a_forked_child_drops_it_then_the_parent_goes_on_without_a_warning(
    server: tdserve.Server, sweeper: tdserve.Client
) -> None:
    clients = [server.client(timeout_s=START_TIMEOUT_S)]
    session = clients[0].stats()["session"]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ResourceWarning)
                clients.clear()
                gc.collect()
            status = 2 if caught else 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert clients[0].stats()["session"] == session
    clients[0].close()


PROGRAM = """
import gc, sys, tdserve
client = tdserve.connect({address!r}, transport={transport!r})
store = client[{name!r}]
assert len(store) == 4
{end}
print("over")
"""


@TRANSPORTS
@pytest.mark.parametrize(
    ("end", "is_warned"),
    [
        ("", False),
        ("del client, store", True),
        ("import atexit; atexit.register(globals().clear)", None),
        ("hold = [client]; hold.append(hold); del client, store, hold", None),
    ],
    ids=["kept", "dropped", "dropped-at-exit", "in-a-cycle"],
)
def test_program_when_it_ends_with_an_unclosed_client_then_it_exits_at_once_and_warns_of_a_dropped_one_only(
    server: tdserve.Server, sweeper: tdserve.Client, name: str, transport: str, end: str, is_warned: bool | None
) -> None:
    sweeper.memmap(example(), name)
    before = list_sessions(sweeper)
    program = PROGRAM.format(address=server.address, transport=transport, name=name, end=end)
    command = [sys.executable, "-W", "default::ResourceWarning:__main__", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=TIMEOUT_S, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "over\n"
    if is_warned is not None:
        assert (f"unclosed client of {server.address}" in done.stderr) == is_warned, done.stderr
    assert "Traceback" not in done.stderr
    wait_for(lambda: list_sessions(sweeper) <= before, "the end of its session", timeout_s=TIMEOUT_S)
