"""A call that ends in the middle of its content costs the session its content channel, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.client.session.channels.content_channel import MAX_BROKEN
from tdserve.client.session.session import Session
from tests.processes import ready_worker, stopped, wait_for
from tests.roots import make_quick_root

pytestmark = pytest.mark.integration

ID = TensorDict({"id": torch.tensor(0)}, [])
IDS = TensorDict({"id": torch.arange(8)}, [8])
SMALL, MEDIUM, LARGE = 10_000, 500_000, 10_000_000
"""Floats of a row: one message, several messages that are posted at once, and more than that."""

TIMEOUT_S = 60.0


def rows(num_floats: int, value: float = 1.0) -> TensorDict:
    """Returns one row."""
    return TensorDict({"x": torch.full((1, num_floats), float(value))}, [1])


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    """A server that takes a stopped worker for a slow one, and whose clients do the same."""
    with make_quick_root() as root, tdserve.Server(root, worker_timeout_s=TIMEOUT_S) as started:
        yield started


@pytest.fixture
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client over gloo."""
    with server.client(transport="gloo", timeout_s=TIMEOUT_S) as made:
        yield made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that only this test uses."""
    return f"s-{abs(hash(request.node.name))}"


def worker_of(client: tdserve.Client) -> int:
    """Returns the data worker's process id."""
    return int(ready_worker(client)["pid"])


def session_of(client: tdserve.Client) -> Session:
    """Returns the client's session, a new one if it was lost."""
    return client.session(Deadline.after(TIMEOUT_S))


def channel_number(client: tdserve.Client) -> int:
    """Returns the number of channels that were lost."""
    return session_of(client).contents.current.number


def has_lost(client: tdserve.Client, num_lost: int) -> bool:
    """Returns whether so many channels were lost."""
    return channel_number(client) == num_lost


CALLS: dict[str, Callable[[tdserve.Client, str], Any]] = {
    "write of one message": lambda client, name: client[f"{name}-small"].extend(rows(SMALL), timeout_s=1.0),
    "write": lambda client, name: client[f"{name}-medium"].extend(rows(MEDIUM), timeout_s=1.0),
    "large write": lambda client, name: client[f"{name}-large"].extend(rows(LARGE), timeout_s=1.0),
    "overwrite": lambda client, name: client.send(rows(MEDIUM), f"{name}-store", timeout_s=1.0),
    "publish": lambda client, name: client.publish(f"{name}-weights", rows(MEDIUM), timeout_s=1.0),
    "sample": lambda client, name: client[f"{name}-medium"].sample(3, timeout_s=1.0),
    "sample that is not expected": lambda client, name: client[f"{name}-medium"].sample(3, timeout_s=0.5),
    "read": lambda client, name: client.from_remote_init(f"{name}-store", timeout_s=1.0),
    "take": lambda client, name: client.queue(f"{name}-tasks").take(2, timeout_s=1.0).__enter__(),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CALLS)
def test_call_when_it_ends_in_its_content_then_all_else_goes_on(
    server: tdserve.Server, client: tdserve.Client, name: str, kind: str
) -> None:
    with ExitStack() as stack:
        todo = client.create_queue(f"{name}-todo", like=ID, max_size=100)
        todo.extend(IDS)
        tables = {
            size: client.create_replay(f"{name}-{size}", like=rows(floats)[0], capacity=20)
            for size, floats in (("small", SMALL), ("medium", MEDIUM), ("large", LARGE))
        }
        tasks = client.create_queue(f"{name}-tasks", like=rows(MEDIUM)[0], max_size=3)
        tasks.extend(torch.cat([rows(MEDIUM)] * 3))
        client.init_remote(rows(MEDIUM), f"{name}-store")
        client.publish(f"{name}-weights", rows(MEDIUM))
        tables["medium"].extend(rows(MEDIUM))
        tables["small"].extend(rows(SMALL))
        batches: Any = stack.enter_context(tables["small"].batches(3, prefetch=4))
        taken = todo.take(4)
        assert taken.__enter__()["id"].tolist() == [0, 1, 2, 3]
        next(batches)
        session, worker = session_of(client), worker_of(client)
        for num_lost in (1, 2):
            with stopped(worker):
                early = [tables["small"].extend(rows(SMALL), return_early=True) for _ in range(3)]
                with pytest.raises(tdserve.DeadlineExceededError):
                    CALLS[kind](client, name)
            assert [future.result(TIMEOUT_S).numel() for future in early] == [1, 1, 1]
            if kind != "read":  # that was given up before its content was announced
                wait_for(partial(has_lost, client, num_lost), "the loss of the channel")
        for _ in range(6):
            next(batches)
        assert session_of(client) is session
        other = stack.enter_context(server.client(transport="gloo"))
        assert other.queue(todo.name).take(4, timeout_s=5.0, ack=False)["id"].tolist() == [4, 5, 6, 7]
        taken.__exit__(None, None, None)
        assert len(todo) == 4  # those that the other has
        CALLS[kind](client, name)
        assert tables["small"].info()["inserts"] == 7 + (kind == "write of one message")
        assert session_of(client) is session


def test_take_when_it_ends_in_its_content_then_the_rows_are_there_for_others(client: tdserve.Client, name: str) -> None:
    tasks = client.create_queue(name, like=rows(MEDIUM)[0], max_size=4)
    tasks.extend(torch.cat([rows(MEDIUM, value) for value in range(4)]))
    held = tasks.take(1)
    assert held.__enter__()["x"][0, 0] == 0.0
    session = session_of(client)
    with stopped(worker_of(client)), pytest.raises(tdserve.DeadlineExceededError):
        tasks.take(3, timeout_s=1.0).__enter__()
    with tasks.take(3, timeout_s=TIMEOUT_S) as again:
        assert again["x"][:, 0].tolist() == [1.0, 2.0, 3.0]
    held.__exit__(None, None, None)
    assert len(tasks) == 0
    assert session_of(client) is session


@pytest.mark.slow
def test_take_when_it_is_granted_after_its_end_then_the_rows_are_there_for_others(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    tasks = client.create_queue(name, like=rows(MEDIUM)[0], max_size=4)
    few = client.create_queue(f"{name}-few", like=ID, max_size=8)
    tasks.extend(torch.cat([rows(MEDIUM, value) for value in range(4)]))
    few.extend(IDS)
    tasks.take(1, ack=False)
    session = session_of(client)
    with stopped(server.pid):
        for queue in (tasks, few):
            with pytest.raises(tdserve.DeadlineExceededError):
                queue.take(3, timeout_s=0.2).__enter__()
    with server.client(transport="gloo") as other:
        assert other.queue(name).take(3, timeout_s=TIMEOUT_S, ack=False)["x"][:, 0].tolist() == [1.0, 2.0, 3.0]
        assert len(other.queue(few.name).take(8, timeout_s=TIMEOUT_S, ack=False)) == 8
    assert session_of(client) is session


def test_write_when_its_content_had_not_begun_to_move_then_its_channel_stays(client: tdserve.Client, name: str) -> None:
    full = client.create_queue(name, like=rows(MEDIUM)[0], max_size=1)
    full.extend(rows(MEDIUM))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(full.extend, rows(MEDIUM), timeout_s=2.0)
        early = full.extend(rows(MEDIUM), timeout_s=2.0, return_early=True)
        wait_for(lambda: full.info()["num_waiting"] == 2, "both at the queue")
        with stopped(worker_of(client)):
            for future in (waiting, early):
                with pytest.raises(tdserve.DeadlineExceededError):
                    future.result(TIMEOUT_S)
    assert channel_number(client) == 0
    with full.take(1):
        pass
    full.extend(rows(MEDIUM))
    assert full.info()["inserts"] == 2
    assert channel_number(client) == 0


def test_store_when_its_first_write_ends_in_its_content_then_its_name_is_free(
    client: tdserve.Client, name: str
) -> None:
    client.init_remote(rows(MEDIUM), f"{name}-other")
    session = session_of(client)
    with stopped(worker_of(client)), pytest.raises(tdserve.DeadlineExceededError):
        client.init_remote(rows(MEDIUM), name, timeout_s=1.0)
    made = wait_for(lambda: _made(client, TensorDict({"y": torch.ones(MEDIUM)}, []), name), "the end of the first try")
    assert made["y"].sum() == MEDIUM
    assert session_of(client) is session


def _made(client: tdserve.Client, td: TensorDict, name: str) -> Any:
    try:
        client.init_remote(td, name)
        return client.from_remote_init(name)
    except tdserve.StoreExistsError:
        return None


@pytest.mark.slow
def test_calls_of_many_threads_when_a_channel_breaks_again_and_again_then_each_write_is_stored_once(
    client: tdserve.Client, name: str
) -> None:
    made = client.create_replay(name, like=rows(SMALL)[0], capacity=1_000)
    store = client.init_remote(rows(MEDIUM), f"{name}-store")
    assert store is not None
    session, num_breaks = session_of(client), 3

    def work(thread: int) -> int:
        for number in range(10):
            made.extend(rows(SMALL, thread * 100 + number))
            assert client.from_remote_init(f"{name}-store")["x"].shape == (1, MEDIUM)
            assert made.sample(2)["x"].shape == (2, SMALL)
        return thread

    with ThreadPoolExecutor(8) as threads:
        working = [threads.submit(work, thread) for thread in range(8)]
        for count in range(num_breaks):
            wait_for(lambda count=count: made.info()["inserts"] > 10 * count, "progress")  # type: ignore[misc]
            session.contents.get(session.contents.current).close()
            wait_for(lambda count=count: channel_number(client) > count, "another channel")  # type: ignore[misc]
        assert [each.result(2 * TIMEOUT_S) for each in working] == list(range(8))
    assert sorted(made[:]["x"][:, 0].tolist()) == sorted(
        float(thread * 100 + number) for thread in range(8) for number in range(10)
    )
    assert session_of(client) is session
    assert channel_number(client) >= num_breaks


def make_ring(client: tdserve.Client, name: str) -> tuple[tdserve.ReplayHandle, Session]:
    """Creates a ring with a small row, and returns the session that wrote it."""
    made = client.create_replay(name, like=rows(SMALL)[0], capacity=100)
    made.extend(rows(SMALL))
    return made, session_of(client)


@pytest.mark.slow
def test_channel_when_it_is_cut_at_any_moment_then_replaced_and_the_session_goes_on(
    client: tdserve.Client, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tdserve.client")
    made, session = make_ring(client, name)
    for count in range(MAX_BROKEN - 1):
        early = [made.extend(rows(SMALL), return_early=True) for _ in range(2)]
        session.contents.get(session.contents.current).close()
        made.sample(3)
        assert [future.result(TIMEOUT_S).numel() for future in early] == [1, 1]
        assert made.info()["inserts"] == 3 + 2 * count
        assert f"session {session.welcome.session}: channel {count} for content is lost: " in caplog.text
    assert session_of(client) is session


@pytest.mark.slow
def test_channel_when_it_breaks_too_often_then_the_session_ends_and_another_is_opened(
    client: tdserve.Client, name: str
) -> None:
    made, session = make_ring(client, name)
    for _ in range(MAX_BROKEN + 1):
        session.contents.get(session.contents.current).close()
        made.sample(3)
        if session.is_lost:
            break
    assert session.is_lost
    assert session_of(client) is not session
    made.extend(rows(SMALL))
    assert made.info()["inserts"] == 2
