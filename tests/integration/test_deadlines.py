"""Calls keep their deadlines in every state of the server: stopped or gone, with an open session or without."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.client.local.end import OVERWRITES_TIMEOUT_S
from tdserve.client.session import abandoned_requests
from tests.integration.crashing import Crashing
from tests.integration.local_roles import numbers_in, rows
from tests.processes import all_below, is_gone, state_of, wait_for

pytestmark = pytest.mark.integration

LIMIT_S = 6.0
"""Limit for calls without a timeout of their own, twenty at once on a busy machine; alone they take 2 s."""

ROW = TensorDict({"x": torch.zeros(3), "y": torch.zeros(2000)}, [])
ROWS = ROW.expand(300).clone()

MANY = torch.arange(300).repeat(400)
"""Row numbers that take more bytes than a socket's buffers."""

Calls = dict[str, Callable[[], object]]


def calls_of(client: tdserve.Client, store: Any, replay: Any, queue: Any) -> Calls:
    """Returns every kind of call that takes ``timeout_s`` and needs the server."""
    return {
        "latest": lambda: client.latest("weights", timeout_s=0),
        "publish": lambda: client.publish("weights", ROW, timeout_s=0),
        "recv": lambda: client.recv(ROWS.clone(), "store", timeout_s=0),
        "send": lambda: client.send(ROWS, "store", timeout_s=0),
        "from_remote_init": lambda: client.from_remote_init("store", timeout_s=0),
        "init_remote": lambda: client.init_remote(ROW, "fresh", timeout_s=0),
        "load_memmap": lambda: client.load_memmap("store", timeout_s=0),
        "describe": lambda: client.describe("store", timeout_s=0),
        "replay": lambda: client.replay("replay", timeout_s=0),
        "queue": lambda: client.queue("queue", timeout_s=0),
        "group": lambda: client.group("group", 2, timeout_s=0),
        "get": lambda: store.get("y", timeout_s=0),
        "to_tensordict": lambda: store.to_tensordict(timeout_s=0),
        "set_at_": lambda: store.set_at_("x", torch.zeros(3), 0, timeout_s=0),
        "set_": lambda: store.set_("y", torch.zeros(300, 2000), timeout_s=0),
        "set": lambda: store.set("z", torch.zeros(300), timeout_s=0),
        "extend": lambda: replay.extend(ROWS, timeout_s=0),
        "sample": lambda: replay.sample(256, timeout_s=0),
        "update_priority": lambda: replay.update_priority(torch.arange(2), torch.ones(2), timeout_s=0),
        "update_priority of many": lambda: replay.update_priority(MANY, torch.ones(len(MANY)), timeout_s=0),
        "batches": lambda: next(replay.batches(4, timeout_s=0)),
        "take": lambda: queue.take(1, ack=False, timeout_s=0),
    }


def timed(call: Callable[[], object]) -> float:
    """Returns how many seconds a call takes until it gives up, or has read what this process can read by itself."""
    began_s = time.monotonic()
    with suppress(tdserve.DeadlineExceededError, tdserve.ConnectError, tdserve.PeerLostError):
        call()
    return time.monotonic() - began_s


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    """A server with a store of each kind."""
    with Crashing(tmp_path_factory.mktemp("deadlines")) as made, made.server.client() as client:
        client.memmap(ROWS, "store")
        client.create_replay("replay", ROW, 1000, sampler=tdserve.Prioritized()).extend(ROWS)
        client.create_queue("queue", ROW, 10)
        client.publish("weights", ROW)
        yield made


@contextmanager
def stopped(server: tdserve.Server) -> Iterator[None]:
    """Stops all processes of the server during the block."""
    pids = [server.pid, *all_below(server.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        wait_for(lambda pid=pid: state_of(pid) == "T", f"process {pid} to stand still")  # type: ignore[misc]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def check_all_end_in_time(calls: Calls) -> None:
    """Makes all calls at once and checks their times."""
    with ThreadPoolExecutor(len(calls)) as threads:
        took_s = dict(zip(calls, threads.map(timed, calls.values()), strict=True))
    assert {name: round(each_s, 2) for name, each_s in took_s.items() if each_s > LIMIT_S} == {}


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "text"])
def test_call_when_a_write_in_place_was_never_permitted_by_a_silent_server_then_in_time_and_its_rows_are_whole(
    crashing: Crashing, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(abandoned_requests, "SILENT_S", 0.0)
    name = f"unpermitted-{text}"
    with crashing.server.client(transport="shm") as client:
        handle = client.memmap(TensorDict({"all": rows(1, 4, text=text)}, [4]), name)
        assert numbers_in(handle[:]["all"]) == [1] * 4
        with stopped(crashing.server):
            with pytest.raises(tdserve.DeadlineExceededError):
                handle.set_at_("all", rows(2, 2, text=text), slice(0, 2), timeout_s=0.1)
            assert (
                timed(lambda: handle.set_at_("all", rows(3, 1, text=text)[0], 3, timeout_s=0.1)) < OVERWRITES_TIMEOUT_S
            )
            assert not client.has_session
        wait_for(lambda: client.stats()["num_sessions"] == 1, "the end of the silent session")
        assert numbers_in(handle[:]["all"]) == [1] * 4


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm", "none"])
def test_calls_when_the_server_stands_still_then_they_end_in_time_and_its_session_goes_on(
    crashing: Crashing, transport: Any
) -> None:
    with crashing.server.client(transport="auto" if transport == "none" else transport) as client:
        calls = calls_of(client, *handles_of(client))
        session = client.session(Deadline.after(20.0))
        if transport == "none":
            other = pickle.loads(pickle.dumps(client))
            calls = calls_of(other, *(pickle.loads(pickle.dumps(each)) for each in handles_of(client)))
        with stopped(crashing.server):
            check_all_end_in_time(calls)
        assert client["store"].get("x").shape == (300, 3)
        assert transport == "gloo" or client.session(Deadline.after(20.0)) is session


@pytest.mark.slow
def test_calls_when_the_server_is_gone_then_they_end_in_time(crashing: Crashing, tmp_path: Path) -> None:
    with crashing.server.client() as client:
        handles = handles_of(client)
        other = pickle.loads(pickle.dumps(client))
        workers = all_below(crashing.server.pid)
        crashing.kill()
        try:
            for pid in workers:
                wait_for(lambda pid=pid: is_gone(pid), f"the end of process {pid}")  # type: ignore[misc]
            check_all_end_in_time(calls_of(other, *(pickle.loads(pickle.dumps(each)) for each in handles)))
            check_all_end_in_time(calls_of(client, *handles))
        finally:
            crashing.start()
        assert other["store"].get("x", timeout_s=30.0).shape == (300, 3)
        other.close()


def handles_of(client: tdserve.Client) -> tuple[Any, Any, Any]:
    """Returns handles of the stores, each of which was used once."""
    store, replay, queue = client["store"], client.replay("replay"), client.queue("queue")
    store[0]
    replay.sample(256)
    return store, replay, queue


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "grpc"])
def test_writes_when_one_before_them_has_more_time_then_those_that_were_not_sent_end_in_time(
    crashing: Crashing, transport: Any
) -> None:
    name = f"waited-{transport}"
    with crashing.server.client(transport=transport) as client:
        table, entries = client.create_replay(name, ROW, 1000), client.create_kv(f"{name}-entries")
        table.extend(ROWS[:1])
        crashing.kill()
        wait_for(lambda: not client.has_session, "the end of the session")
        try:
            patient: list[Any] = [
                table.extend(ROWS[:2], timeout_s=60.0, return_early=True),
                entries.put("patient", 1, timeout_s=60.0, return_early=True),
            ]
            hasty: list[Any] = [
                table.extend(ROWS[:3], timeout_s=0.2, return_early=True),
                entries.put("hasty", 2, timeout_s=0.2, return_early=True),
            ]
            assert timed(lambda: table.extend(ROWS[:4], timeout_s=0.2)) < LIMIT_S
            assert timed(lambda: entries.put("hasty", 3, timeout_s=0.2)) < LIMIT_S
            for future in hasty:
                with pytest.raises(tdserve.DeadlineExceededError):
                    future.result(LIMIT_S)
            assert not any(future.done() for future in patient)
        finally:
            crashing.start()
        for future in patient:
            future.result(60.0)
        assert len(table) == 3
        assert list(entries.keys()) == ["patient"]
