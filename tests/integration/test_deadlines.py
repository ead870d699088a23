"""Calls keep their deadlines whether the server is stopped or gone, with an open session or without."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.client.local.end import OVERWRITES_TIMEOUT_S
from tdserve.client.session.requests import abandoned_requests
from tests.integration.crashing import Crashing
from tests.integration.ending_in_time import LIMIT_S, check_all_end_in_time, stopped, timed
from tests.integration.local_roles import numbers_in, rows
from tests.integration.timed_calls import (
    FEW,
    NOT_TRIED,
    ROW,
    ROWS,
    SMALL,
    Handles,
    create_stores,
    list_methods,
    make_calls,
    open_handles,
)
from tests.processes import all_below, is_gone, wait_for

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    """A server with a store of each kind."""
    with Crashing(tmp_path_factory.mktemp("deadlines")) as made, made.server.client() as client:
        create_stores(client)
        yield made


def test_methods_with_a_timeout_when_listed_then_each_has_a_case(crashing: Crashing, tmp_path: Path) -> None:
    with crashing.server.client() as client:
        tried = {name.split(" ")[0] for name in make_calls(client, open_handles(client), 0.0, tmp_path)}
    assert set(list_methods()) - tried - set(NOT_TRIED) == set()


def test_calls_without_a_timeout_when_within_a_block_that_has_one_then_end_by_it(crashing: Crashing) -> None:
    with crashing.server.client() as client:
        handles = open_handles(client)
        calls: dict[str, Callable[[], object]] = {
            "stores": client.stores,
            "stats": client.stats,
            "keys": lambda: client.keys("store"),
            "create_replay": lambda: client.create_replay("within", SMALL, 10),
            "create_queue": lambda: client.create_queue("within", SMALL, 10),
            "create_kv": lambda: client.create_kv("within"),
            "delete": lambda: client.delete("absent"),
            "info": handles.replay.info,
            "len": lambda: len(handles.queue),
            "kv info": handles.entries.info,
            "extend": lambda: handles.replay.extend(ROWS),
        }
        with stopped(crashing.server):
            for name, call in calls.items():
                began_s = time.monotonic()
                with tdserve.within(0.1), tdserve.within(60.0), pytest.raises(tdserve.DeadlineExceededError):
                    call()
                assert time.monotonic() - began_s < LIMIT_S, name
        assert client.stores()  # after the block, the client's default
        with pytest.raises(tdserve.InvalidRequestError, match="-1 is not 0 s or more"), tdserve.within(-1.0):
            pass


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
@pytest.mark.parametrize("transport", ["gloo", "grpc", "shm", "none"])
def test_calls_when_the_server_stands_still_then_they_end_in_time_and_its_session_goes_on(
    crashing: Crashing, transport: Any, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(crashing.server.client(transport="auto" if transport == "none" else transport))
        handles = open_handles(client)
        calls = make_calls(client, handles, 0.0, tmp_path)
        session = client.session(Deadline.after(20.0))
        if transport == "none":
            other = stack.enter_context(pickle.loads(pickle.dumps(client)))  # what it does early may open a session
            calls = make_calls(other, copy_handles(handles), 0.0, tmp_path)
        with stopped(crashing.server):
            check_all_end_in_time(calls)
        assert client["store"].get("x").shape == (300, 3)
        assert transport in ("gloo", "grpc") or client.session(Deadline.after(20.0)) is session


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "grpc", "shm"])
def test_calls_when_the_server_stops_amid_them_then_they_end_in_time_and_later_ones_succeed(
    crashing: Crashing, transport: Any, tmp_path: Path
) -> None:
    with crashing.server.client(transport=transport) as client:
        client.checkpoint(str(tmp_path / "checkpoint"))
        for _ in range(3):
            calls = make_calls(client, open_handles(client), 0.3, tmp_path)
            check_all_end_in_time(calls, stopped(crashing.server))
            wait_for(lambda: is_whole(client), "reads after the server has gone on")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "grpc", "shm"])
def test_extend_when_a_writer_of_its_handle_waits_without_a_limit_then_ends_in_time(
    crashing: Crashing, transport: Any
) -> None:
    name = f"beside-a-writer-{transport}"
    with crashing.server.client(transport=transport) as client:
        table = client.create_replay(name, SMALL, 1000)
        for _ in range(3):  # the next extend may ask for rows to claim: others wait for its answer
            table.extend(FEW)
        with table.writer(batch=1) as writer:
            with stopped(crashing.server):
                writer.append(SMALL)
                wait_for(lambda: writer.num_under_way > 0, "a row under way")
                early = table.extend(FEW, timeout_s=0.2, return_early=True)
                with pytest.raises(tdserve.DeadlineExceededError):
                    early.result(LIMIT_S)
                assert timed(lambda: table.extend(FEW, timeout_s=0.2)) < LIMIT_S
            writer.flush(timeout_s=30.0)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "grpc", "shm"])
def test_calls_when_many_were_given_up_before_them_then_they_end_in_time(crashing: Crashing, transport: Any) -> None:
    with crashing.server.client(transport=transport) as client:
        replay = client.replay("uniform")
        replay.sample(4)
        with stopped(crashing.server), ThreadPoolExecutor(16) as threads:
            assert max(threads.map(lambda _: timed(lambda: replay.sample(4, timeout_s=0.01)), range(160))) < LIMIT_S
        wait_for(lambda: is_whole(client), "reads after the server has gone on")


def is_whole(client: tdserve.Client) -> bool:
    """Returns whether everything can be read again."""
    with suppress(tdserve.TDServeError):
        return client["store"].get("x", timeout_s=1.0).shape == (300, 3) and "a" in client.kv("entries")
    return False


def copy_handles(handles: Handles) -> Handles:
    """Returns handles of a client without a session."""
    return Handles(*(pickle.loads(pickle.dumps(each)) for each in handles))


@pytest.mark.slow
def test_calls_when_the_server_is_gone_then_they_end_in_time(crashing: Crashing, tmp_path: Path) -> None:
    with crashing.server.client() as client:
        handles = open_handles(client)
        other = pickle.loads(pickle.dumps(client))
        workers = all_below(crashing.server.pid)
        crashing.kill()
        try:
            for pid in workers:
                wait_for(lambda pid=pid: is_gone(pid), f"the end of process {pid}")  # type: ignore[misc]
            check_all_end_in_time(make_calls(other, copy_handles(handles), 0.0, tmp_path))
            check_all_end_in_time(make_calls(client, handles, 0.0, tmp_path))
        finally:
            crashing.start()
        assert other["store"].get("x", timeout_s=30.0).shape == (300, 3)
        other.close()


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
