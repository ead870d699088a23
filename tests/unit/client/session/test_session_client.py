from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ClosedError,
    ConnectError,
    DeadlineExceededError,
    InvalidRequestError,
    NotLocalError,
    NotSupportedError,
    PeerLostError,
    StoreMovedError,
    StoreNotFoundError,
)
from tdserve.client.local.end import open_local
from tdserve.client.session.requests.request_numbers import MAX_WRITES_UNDER_WAY
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.v1 import control_pb2
from tests.processes import wait_for


def test_client_when_the_transport_needs_a_device_and_has_none_then_refused() -> None:
    with pytest.raises(NotSupportedError, match="nccl"):
        SessionClient("127.0.0.1:1", transport="nccl")


def test_client_when_an_argument_is_wrong_then_refused() -> None:
    with pytest.raises(InvalidRequestError):
        SessionClient("127.0.0.1:1", transport="pigeon")  # type: ignore[arg-type]


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_client_when_pickled_then_allows_what_it_allowed(allow_pickle: bool) -> None:
    with SessionClient("127.0.0.1:1", allow_pickle=allow_pickle) as made:
        assert pickle.loads(pickle.dumps(made)).allow_pickle is allow_pickle


@pytest.mark.parametrize("changes", [True, False])
def test_call_when_the_session_is_lost_then_again_with_the_same_number_if_it_changes_something(
    client: tdserve.Client, changes: bool
) -> None:
    number = client.requests.begin_change() if changes else None
    tries: list[tuple[Session, int]] = []

    def attempt(session: Session, request: int, deadline: Deadline) -> str:
        tries.append((session, request))
        if len(tries) < 3:
            raise PeerLostError(peer="it", reason="said the test")
        return "done"

    assert client.call(attempt, client.make_deadline(None), request=number) == "done"
    assert {request for _, request in tries} == {number} if changes else len({request for _, request in tries}) == 3
    assert len({session.welcome.session for session, _ in tries}) == 3


def test_call_when_the_time_is_up_then_the_transports_error(client: tdserve.Client) -> None:
    def attempt(session: Session, request: int, deadline: Deadline) -> None:
        raise PeerLostError(peer="it", reason="said the test")

    with pytest.raises(PeerLostError):
        client.call(attempt, Deadline.after(0.01))


@pytest.mark.parametrize("is_sent", [True, False])
def test_call_when_the_time_is_up_for_a_change_then_connect_error_only_if_nothing_of_it_was_sent(
    client: tdserve.Client, is_sent: bool
) -> None:
    """Whoever gets a ConnectError may make the call again, perhaps at another server."""

    def attempt(session: Session, request: int, deadline: Deadline) -> None:
        if is_sent:
            session.send(request, change=control_pb2.ChangeRequest(store="x"))
        raise ConnectError(address="it", reason="said the test")

    expected = (PeerLostError, "may yet carry out: said the test") if is_sent else (ConnectError, "said the test")
    with pytest.raises(expected[0], match=expected[1]):
        client.call(attempt, Deadline.after(0.2), request=client.requests.begin_change())


def test_call_when_a_change_was_sent_and_the_next_session_is_refused_then_retried_with_its_number(
    server: tdserve.Server, local_client: tdserve.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts, or ends, while a client opens a session has other files than it named, or none."""
    local = local_client.session(Deadline.after(20.0)).local
    assert local is not None
    link, tries, is_refused = tmp_path / "root", list[int](), Event()
    link.symlink_to(local.root)

    def attempt(session: Session, request: int, deadline: Deadline) -> str:
        tries.append(request)
        if len(tries) == 1:
            session.send(request, change=control_pb2.ChangeRequest(store="x"))
            link.unlink()
            raise PeerLostError(peer="it", reason="said the test")
        return "done"

    def open_noted(*given: Any, **named: Any) -> Any:
        try:
            return open_local(*given, **named)
        except NotLocalError:
            is_refused.set()
            raise

    monkeypatch.setattr("tdserve.client.session.session.open_local", open_noted)
    with server.client(transport="shm", root=str(link)) as client, ThreadPoolExecutor(1) as pool:
        number = client.requests.begin_change()
        called = pool.submit(client.call, attempt, Deadline.after(20.0), request=number)
        wait_for(lambda: called.done() or is_refused.is_set(), "a session that is refused")
        link.symlink_to(local.root)
        assert called.result() == "done"
        assert tries == [number, number]
        link.unlink()
        client.session(Deadline.after(20.0)).close()
        with pytest.raises(NotLocalError):  # of this one nothing was sent
            client.call(attempt, Deadline.after(20.0), request=client.requests.begin_change())


@pytest.mark.parametrize(("error", "stays"), [(StoreNotFoundError(name="x"), True), (KeyboardInterrupt(), False)])
def test_call_when_refused_or_interrupted_then_raised_at_once(
    client: tdserve.Client, error: BaseException, stays: bool
) -> None:
    sessions: list[Session] = []

    def attempt(session: Session, request: int, deadline: Deadline) -> None:
        sessions.append(session)
        raise error

    with pytest.raises(type(error)):
        client.call(attempt, client.make_deadline(None))
    (session,) = sessions
    assert session.is_lost is not stays


def test_call_when_its_store_rests_then_it_asks_until_its_deadline_and_names_that(client: tdserve.Client) -> None:
    """A scheduled checkpoint must not end a consumer's wait early, nor by another error than usual."""
    deadlines: list[Deadline] = []

    def attempt(session: Session, request: int, deadline: Deadline) -> None:
        deadlines.append(deadline)
        raise StoreMovedError(name="x")

    with pytest.raises(DeadlineExceededError, match=r"store 'x', which is at rest .* did not happen within 0.3 s"):
        client.call(attempt, Deadline.after(0.3))
    assert len(deadlines) > 4
    assert all(each.expired for each in deadlines)
    with pytest.raises(StoreMovedError, match="at rest"):
        client.call(attempt, Deadline.after(0))


def test_call_when_its_store_has_moved_then_a_write_waits_for_the_window_there_and_another_change_does_not(
    client: tdserve.Client, server: tdserve.Server
) -> None:
    sessions: list[Session] = []

    def attempt(session: Session, request: int, deadline: Deadline) -> int:
        sessions.append(session)
        if len(sessions) % 2:
            raise StoreMovedError(name="x", server=1, move="m")
        return elsewhere.requests.num_writes

    def change(number: int, timeout_s: float) -> int:
        return client.call(attempt, Deadline.after(timeout_s), request=number)

    with server.client() as elsewhere:
        client.find_moved = lambda error, deadline: elsewhere
        assert change(client.requests.begin_write(Deadline.never), 30.0) == 1
        writes = [elsewhere.requests.begin_write(Deadline.never) for _ in range(MAX_WRITES_UNDER_WAY)]
        assert change(client.requests.begin_change(), 30.0) == len(writes)
        with pytest.raises(DeadlineExceededError, match="one of the 64 writes"):
            change(client.requests.begin_write(Deadline.never), 0.05)
        assert client.requests.num_writes == 0


def test_client_when_pickled_then_another_one_of_the_same_server(client: tdserve.Client, name: str) -> None:
    client.publish(name, torch.nn.Linear(2, 1))
    with pickle.loads(pickle.dumps(client)) as other:
        assert (
            other.session(other.make_deadline(None)).welcome.session != client.session(Deadline.never).welcome.session
        )
        assert name in other.stores()
        assert other.timeout_s == client.timeout_s


def test_close_when_done_then_every_call_raises_closed_error(server: tdserve.Server) -> None:
    client = server.client()
    client.close()
    client.close()
    with pytest.raises(ClosedError, match=client.address):
        client.session(client.make_deadline(None))
    with pytest.raises(ClosedError):
        client.stores()


def test_timeout_when_assigned_then_of_every_call(client: tdserve.Client, name: str) -> None:
    client.timeout_s = 0.05
    assert client.make_deadline(None).timeout_s == 0.05
    assert client.catalog.timeout_s == 0.05
