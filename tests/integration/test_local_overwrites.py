"""Rows that a local client was overwriting when it died raise an error for every reader until they are written
again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.cluster.sums import MAX_DAMAGED_ROWS
from tests.integration.crashing import Crashing
from tests.integration.forked_clients import TIMEOUT_S, Child, ForkedClients
from tests.integration.local_roles import NUM_ROWS, numbers_in, rows
from tests.integration.self_signals import BEHIND, placing
from tests.processes import state_of, wait_for

pytestmark = pytest.mark.integration

BEFORE, LOST, AFTER = 1, 2, 3
"""The content before the fault, the content that the dying client wrote, and the content that another client wrote
later."""

SHORT_S = 0.3
"""Wait for what must not happen."""

TOTAL = 2 * NUM_ROWS
"""Rows of a store, of which the first half is overwritten."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    with tdserve.Server(tmp_path_factory.mktemp("overwrites"), port=0) as started:
        yield started


@pytest.fixture(params=["shm", "gloo"])
def client(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client that survives every test."""
    with server.client(transport=request.param, timeout_s=20.0) as made:
        yield made


def list_damaged(client: tdserve.Client, name: str) -> tuple[int, list[int]]:
    """Returns how many rows the server knows to be damaged, and the first of them."""
    facts = client.describe(name).as_dict()
    return facts["num_damaged"], facts["damaged_rows"]


def check_lost(handle: Any, name: str) -> None:
    """Checks that the first half is unreadable and the second whole."""
    for index in (slice(None), slice(0, NUM_ROWS), 3, torch.tensor([TOTAL - 1, 0])):
        with pytest.raises(tdserve.CorruptDataError, match=name):
            handle[index]
    assert numbers_in(handle[NUM_ROWS:]) == [BEFORE] * NUM_ROWS
    assert numbers_in(handle[-1]) == [BEFORE]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "text"])
@pytest.mark.parametrize("at", [0, 1, BEHIND])
def test_set_when_its_client_is_killed_in_the_middle_then_the_rows_are_lost_until_written_again(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client, at: int, text: str
) -> None:
    name = f"killed-{client.transport}-{at}-{text}"
    handle = client.memmap(rows(BEFORE, TOTAL, text=text), name)
    assert numbers_in(handle[0]) == [BEFORE]  # this client's cached structure and mappings must not mislead it
    before = client.describe(name).version
    with forked_clients.start("write", server.address, "overwrite", name, LOST, at=at, text=text) as writer:
        assert writer.line() == "connected shm"
        writer.wait_killed()
    check_lost(handle, name)
    assert list_damaged(client, name) == (NUM_ROWS, list(range(min(NUM_ROWS, MAX_DAMAGED_ROWS))))
    with pytest.raises(tdserve.CorruptDataError, match=name):
        client.from_remote_init(name)
    into = rows(0, TOTAL, text=text)
    with pytest.raises(tdserve.CorruptDataError, match=name):
        client.recv(into, name)
    handle[1:NUM_ROWS] = rows(AFTER, NUM_ROWS - 1, text=text)
    assert numbers_in(handle[1:]) == [AFTER] * (NUM_ROWS - 1) + [BEFORE] * NUM_ROWS
    with pytest.raises(tdserve.CorruptDataError, match=f"{name}.*rows 0"):
        handle[0]
    assert list_damaged(client, name) == (1, [0])
    handle[0] = rows(AFTER, 1, text=text)[0]
    assert list_damaged(client, name) == (0, [])
    assert numbers_in(handle[:]) == [AFTER] * NUM_ROWS + [BEFORE] * NUM_ROWS
    assert client.describe(name).version > before


def nested(number: int, num_rows: int = NUM_ROWS, *, text: str = "") -> TensorDict:
    """Returns rows of a replay table with a nested part, which is overwritten by its key."""
    return TensorDict({"content": rows(number, num_rows, text=text)}, [num_rows])


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "text"])
def test_set_at_when_its_client_is_killed_in_the_middle_then_the_rows_are_gone_and_others_get_them(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client, text: str
) -> None:
    replay = client.create_replay(f"killed-{client.transport}-{text}-rows", nested(0, text=text)[0], TOTAL)
    replay.extend(nested(BEFORE, TOTAL, text=text))
    with forked_clients.start(
        "write", server.address, "overwrite", replay.name, LOST, at=1, text=text, nested=True
    ) as writer:
        assert writer.line() == "connected shm"
        writer.wait_killed()
    assert numbers_in(replay[:]["content"]) == numbers_in(replay[1:]["content"]) == [BEFORE] * NUM_ROWS
    # overwritten rows count as reserved until their writer can write no more
    wait_for(lambda: replay.info()["reserved_rows"] == 0, "the end of the rows that were lost")
    assert numbers_in(replay[:]["content"]) == [BEFORE] * NUM_ROWS
    assert set(numbers_in(replay.sample(50)["content"])) == {BEFORE}
    assert replay.extend(nested(AFTER, text=text)).tolist() == list(range(NUM_ROWS))
    assert numbers_in(replay[:]["content"]) == [AFTER] * NUM_ROWS + [BEFORE] * NUM_ROWS
    assert replay.info()["reserved_rows"] == 0


@pytest.mark.slow
def test_set_when_its_client_stands_still_in_the_middle_then_others_wait_for_it_and_read_around_it(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client
) -> None:
    name = f"stopped-{client.transport}"
    handle = client.memmap(rows(BEFORE, TOTAL), name)
    assert numbers_in(handle[0]) == [BEFORE]
    with forked_clients.start(
        "write", server.address, "overwrite", name, LOST, at=1, signal_number=signal.SIGSTOP
    ) as writer:
        writer.wait_stopped()
        handle[NUM_ROWS:] = rows(AFTER)
        assert numbers_in(handle[NUM_ROWS:]) == [AFTER] * NUM_ROWS
        with pytest.raises(tdserve.DeadlineExceededError):
            handle.set_at_("body", torch.zeros(1).double(), 0, timeout_s=SHORT_S)
        with pytest.raises(tdserve.DeadlineExceededError):
            client.from_remote_init(name, timeout_s=SHORT_S)
        handle[NUM_ROWS:] = rows(AFTER)  # a write that timed out blocks no other
        writer.signal(signal.SIGCONT)
        assert writer.line() == "connected shm"
        assert writer.line() == "done stored"
    assert numbers_in(handle[:]) == [LOST] * NUM_ROWS + [AFTER] * NUM_ROWS


@pytest.mark.slow
def test_set_when_the_server_is_killed_while_its_client_stands_still_then_only_its_end_frees_the_rows(
    forked_clients: ForkedClients, tmp_path: Path
) -> None:
    stop: dict[str, Any] = {"at": 1, "signal_number": signal.SIGSTOP}
    with Crashing(tmp_path) as crashing, crashing.server.client(timeout_s=60.0) as client:
        address = crashing.server.address
        first, second = (client.memmap(rows(BEFORE, TOTAL), name) for name in ("first", "second"))
        replay = client.create_replay("r", nested(0)[0], TOTAL)
        replay.extend(nested(BEFORE, TOTAL))
        with (
            forked_clients.start("write", address, "overwrite", "first", LOST, **stop) as resumed,
            forked_clients.start("write", address, "overwrite", "second", LOST, **stop) as killed,
            forked_clients.start("write", address, "overwrite", "r", LOST, nested=True, **stop) as of_replay,
        ):
            for writer in (resumed, killed, of_replay):
                writer.wait_stopped()
            crashing.restart()
            assert len(replay) == NUM_ROWS
            for handle in (first, second):
                check_lost(handle, handle.name)
                with pytest.raises(tdserve.DeadlineExceededError, match="stopped"):
                    handle.set_at_("body", torch.zeros(1).double(), 0, timeout_s=SHORT_S)
            replay.extend(nested(AFTER))  # must not overwrite the rows of a writer that may go on
            assert numbers_in(replay[:]["content"]) == [AFTER] * NUM_ROWS
            assert replay.info()["reserved_rows"] == NUM_ROWS
            for writer in (killed, of_replay):
                writer.kill()
            second[:NUM_ROWS] = rows(AFTER)
            assert numbers_in(second[:]) == [AFTER] * NUM_ROWS + [BEFORE] * NUM_ROWS
            resumed.signal(signal.SIGCONT)
            assert resumed.line() == "connected shm"
            assert resumed.line() == "done stored"  # again, over another session
        assert numbers_in(first[:]) == [LOST] * NUM_ROWS + [BEFORE] * NUM_ROWS
        replay.extend(nested(AFTER, TOTAL))
        assert numbers_in(replay[:]["content"]) == [AFTER] * TOTAL


@pytest.mark.slow
def test_set_at_when_the_server_is_killed_while_its_client_stands_still_then_its_retry_saves_the_rows_of_a_table(
    forked_clients: ForkedClients, tmp_path: Path
) -> None:
    stop: dict[str, Any] = {"at": 1, "signal_number": signal.SIGSTOP}
    with Crashing(tmp_path) as crashing, crashing.server.client(timeout_s=60.0) as client:
        replay = client.create_replay("r", nested(0)[0], TOTAL)
        replay.extend(nested(BEFORE, TOTAL))
        with forked_clients.start(
            "write", crashing.server.address, "overwrite", "r", LOST, nested=True, **stop
        ) as writer:
            writer.wait_stopped()
            crashing.restart()
            assert len(replay) == NUM_ROWS, "nobody gets rows that are half written"
            writer.signal(signal.SIGCONT)
            assert writer.line() == "connected shm"
            assert writer.line() == "done stored"  # again, over another session
        assert numbers_in(replay[:]["content"]) == [LOST] * NUM_ROWS + [BEFORE] * NUM_ROWS


@pytest.mark.slow
def test_set_when_several_wait_for_the_same_rows_then_one_after_the_other_gets_them(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client
) -> None:
    name = f"waiting-{client.transport}"
    handle = client.memmap(rows(BEFORE, TOTAL), name)
    stop: dict[str, Any] = {"at": 1, "signal_number": signal.SIGSTOP}
    with (
        forked_clients.start("write", server.address, "overwrite", name, 10, **stop) as first,
        ThreadPoolExecutor(4) as threads,
    ):
        first.wait_stopped()
        with (
            forked_clients.start("write", server.address, "overwrite", name, 11, **stop) as second,
            forked_clients.start("write", server.address, "overwrite", name, 12, **stop) as third,
        ):
            for each in (second, third):
                assert each.line() == "connected shm"
            waiting = threads.submit(handle.__setitem__, slice(0, NUM_ROWS), rows(13))
            first.signal(signal.SIGCONT)
            left = [second, third]
            while left:
                stopped = wait_for(lambda: _stopped(left) or None, "the next turn")
                client.describe(name)  # by now the server has answered everything that it allowed at that time
                assert _stopped(left) == stopped, "two write the same rows"
                left.remove(stopped[0])
                stopped[0].signal(signal.SIGCONT)
            waiting.result(TIMEOUT_S)
            for each in (second, third):
                assert each.line() == "done stored"
    assert len(set(numbers_in(handle[:NUM_ROWS]))) == 1


class Gate:
    """Holds a write in the middle of its copying until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached = Event()
        self.may_go_on = Event()
        put_selection = placing.put_selection

        def holding(*arguments: Any, **named: Any) -> None:
            put_selection(*arguments, **named)
            self.is_reached.set()
            assert self.may_go_on.wait(TIMEOUT_S)
            put_selection(*arguments, **named)

        monkeypatch.setattr(placing, "put_selection", holding)


def test_close_when_another_thread_is_overwriting_then_that_ends_first_and_no_other_begins(
    server: tdserve.Server, client: tdserve.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"closed-{client.transport}"
    handle = client.memmap(rows(BEFORE, TOTAL), name)
    gate = Gate(monkeypatch)
    writer = server.client(transport="shm", timeout_s=20.0)
    with ThreadPoolExecutor(3) as threads:
        written = writer[name]
        writing = threads.submit(written.__setitem__, slice(0, NUM_ROWS), rows(AFTER))
        assert gate.is_reached.wait(TIMEOUT_S)
        waiting = threads.submit(written.set_at_, "body", torch.zeros(1).double(), 0)  # for the same rows
        wait_for(lambda: client.describe(name).num_waiting == 1, "the other write to wait")
        closing = threads.submit(writer.close)
        wait_for(lambda: writer.is_closed, "the client to be closing")
        with pytest.raises(tdserve.ClosedError):
            written[NUM_ROWS:] = rows(LOST)
        wait_for(lambda: client.describe(name).num_waiting == 0, "the one that waits to be given up")
        gate.may_go_on.set()
        writing.result(TIMEOUT_S)
        with pytest.raises(tdserve.ClosedError):
            waiting.result(TIMEOUT_S)
        closing.result(TIMEOUT_S)
    assert numbers_in(handle[:]) == [AFTER] * NUM_ROWS + [BEFORE] * NUM_ROWS


def _stopped(writers: list[Child]) -> list[Child]:
    """Lists the processes that are stopped."""
    return [each for each in writers if state_of(each.pid) == "T"]
