from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.errors import (
    RemoteProtocolError,
    StoreNotFoundError,
    TransferAbortedError,
    WrongStateError,
)
from tdserve.server.entry import Entry
from tdserve.server.requests import Requests
from tdserve.server.session import ClientSession
from tdserve.v1 import control_pb2
from tests.unit.server.world import Loop, World, content_of, outbox

ROWS = TensorDict({"a": torch.arange(3.0)}, [3])


@pytest.fixture
def requests(world: World) -> Requests:
    """The router over the parts of the world."""
    return Requests(
        world.stores,
        world.answers,
        replays=world.replays,
        tensordicts=world.tensordicts,
        publishing=world.publishing,
    )


@pytest.fixture
def replay(world: World, run: Loop) -> Entry:
    """A ring of ten rows."""
    return run(world.create_replay("r", ROWS[0], 10))


def extending(request: int, fingerprint: bytes) -> control_pb2.ClientMessage:
    """Extends the replay by three rows."""
    asked = control_pb2.ExtendRequest(store="r", num_rows=3, content=content_of(ROWS, fingerprint), timeout_s=5.0)
    return control_pb2.ClientMessage(request=request, extend=asked)


def test_write_when_retried_by_any_session_of_its_client_then_stored_once(
    world: World, run: Loop, requests: Requests, replay: Entry
) -> None:
    assert replay.row_spec is not None
    first = world.session()
    message = extending(7, replay.row_spec.fingerprint)
    run(requests.serve(first, message))
    again = ClientSession(2, first.hello, world.session().link, worker=world.worker, interface="127.0.0.1")
    again.opened()
    run(requests.serve(again, message))
    assert outbox(again).done() == outbox(first).done()
    assert len(replay.replay_table()) == 3
    run(requests.serve(world.session(3), message))  # the same number of another client
    assert len(replay.replay_table()) == 6


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (control_pb2.ClientMessage(request=1), RemoteProtocolError),
        (control_pb2.ClientMessage(request=1, hello=control_pb2.Hello()), RemoteProtocolError),
        (control_pb2.ClientMessage(request=1, read=control_pb2.ReadRequest(store="no")), StoreNotFoundError),
        (control_pb2.ClientMessage(request=1, latest=control_pb2.LatestRequest(store="r")), WrongStateError),
    ],
)
def test_request_when_it_cannot_be_then_one_failure_and_the_session_goes_on(
    world: World, run: Loop, requests: Requests, replay: Entry, message: Any, error: type[Exception]
) -> None:
    session = world.session()
    run(requests.serve(session, message))
    assert isinstance(outbox(session).error(), error)
    assert not session.ended.is_set()
    assert session.protocol.requests == frozenset()


def test_read_when_of_weights_then_says_what_the_store_is(world: World, run: Loop, requests: Requests) -> None:
    run(world.create("w", ROWS, kind=control_pb2.STORE_KIND_WEIGHTS))
    session = world.session()
    run(requests.serve(session, control_pb2.ClientMessage(request=1, read=control_pb2.ReadRequest(store="w"))))
    error = outbox(session).error()
    assert isinstance(error, WrongStateError)
    assert "'w' is a weights store" in str(error)


def test_request_when_its_number_is_taken_then_failure_and_the_session_ends(
    world: World, run: Loop, requests: Requests
) -> None:
    session = world.session()
    session.protocol.begin(1)
    run(requests.serve(session, control_pb2.ClientMessage(request=1, read=control_pb2.ReadRequest(store="x"))))
    assert isinstance(outbox(session).error(), WrongStateError)
    assert session.ended.is_set()


def test_request_when_cancelled_while_it_waits_then_aborted(
    world: World, run: Loop, requests: Requests, replay: Entry
) -> None:
    async def scenario() -> ClientSession:
        session = world.session()
        asked = control_pb2.SampleRequest(store="r", num_rows=1, timeout_s=20.0)
        session.run(requests.serve(session, control_pb2.ClientMessage(request=4, sample=asked)), 4)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        session.cancel(4)
        assert await session.finish(5.0)
        return session

    error = outbox(run(scenario())).error()
    assert isinstance(error, TransferAbortedError)
    assert error.transfer == 4
