from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base import failpoints
from tdserve.base.errors import (
    CapacityError,
    DeadlineExceededError,
    RemoteProtocolError,
    StoreNotFoundError,
    TransferAbortedError,
    WrongStateError,
)
from tdserve.messages.content import make_rows_layout
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.limiter import Queue
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.settings import Settings
from tdserve.server.dispatch.requests import Requests
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.long_list_file import LongListFile
from tdserve.v1 import control_pb2
from tests.unit.server.world import Loop, World, content_of, new_store, outbox, outside

ROWS = TensorDict({"a": torch.arange(3.0)}, [3])


@pytest.fixture
def replay(world: World, run: Loop) -> OpenedStore:
    """A ring of ten rows."""
    return run(world.create_replay("r", ROWS[0], 10))


def extending(request: int, fingerprint: bytes) -> control_pb2.ClientMessage:
    """Returns an extend of the table by three rows."""
    asked = control_pb2.ExtendRequest(store="r", num_rows=3, content=content_of(ROWS, fingerprint), timeout_s=5.0)
    return control_pb2.ClientMessage(request=request, extend=asked)


def test_write_when_retried_by_any_session_of_its_client_then_stored_once(
    world: World, run: Loop, requests: Requests, replay: OpenedStore
) -> None:
    first = world.session()
    message = extending(7, replay.spec.fingerprint)
    run(requests.serve(first, message))
    again = world.session_of(first.hello, 2)
    run(requests.serve(again, message))
    assert outbox(again).done() == outbox(first).done()
    assert len(replay.get_table()) == 3
    run(requests.serve(world.session(3), message))  # the same number of another client
    assert len(replay.get_table()) == 6


@pytest.mark.parametrize("kind", ["extend", "change"])
def test_change_when_its_client_asks_for_it_no_more_then_refused_and_nothing_is_changed(
    world: World, run: Loop, requests: Requests, replay: OpenedStore, kind: str
) -> None:
    session = world.session()
    message = extending(7, replay.spec.fingerprint)
    run(requests.serve(session, message))
    world.answers.forget(session.client_id, control_pb2.Answered(below=10, but_for=[8]))
    if kind == "change":
        message = control_pb2.ClientMessage(request=7, change=control_pb2.ChangeRequest(store="r"))
        message.change.clear = True
    late = world.session_of(session.hello, 2)
    run(requests.serve(late, message))  # an attempt that was overtaken by another, whose answer is forgotten
    assert isinstance(outbox(late).error(), WrongStateError)
    message.request = 8
    assert len(replay.get_table()) == 3
    run(requests.serve(late, message))
    assert len(replay.get_table()) == (6 if kind == "extend" else 0)


def sampling(request: int, **fields: Any) -> control_pb2.ClientMessage:
    """Returns a sample of five rows of the table."""
    asked = control_pb2.SampleRequest(**{"store": "r", "num_rows": 5, "timeout_s": 0.01, **fields})
    return control_pb2.ClientMessage(request=request, sample=asked)


def test_sample_when_its_buffers_are_posted_and_there_are_no_rows_then_must_wait(
    world: World, run: Loop, requests: Requests, replay: OpenedStore
) -> None:
    session = world.session(90)  # of its own: its void content finds no channel
    sizes = make_rows_layout(replay.spec, 5).message_nbytes
    run(requests.serve(session, sampling(7, message_nbytes=sizes, timeout_s=20.0)))
    assert outbox(session).done() == control_pb2.Done(must_wait=True)
    assert replay.get_table().counts.samples == 0
    run(requests.serve(session, sampling(7)))  # the same number again, as told
    assert isinstance(outbox(session).error(), DeadlineExceededError)
    assert not session.ended.is_set()


@pytest.mark.parametrize("is_known", [True, False])
def test_read_when_its_buffers_are_posted_and_the_structure_is_another_then_must_wait(
    world: World, run: Loop, requests: Requests, is_known: bool
) -> None:
    store = run(world.create("x", TensorDict({"a": torch.arange(4)}, [4])))
    if is_known:
        store.writes.append(RowSet.run(2, 3))  # somebody may stand still in the middle of it
    session = world.session(93 + is_known)  # of its own: its void content finds no channel
    asked = control_pb2.ReadRequest(
        store="x", fingerprint=store.spec.fingerprint if is_known else b"older", message_nbytes=[128], timeout_s=20.0
    )
    run(requests.serve(session, control_pb2.ClientMessage(request=7, read=asked)))
    assert outbox(session).done() == control_pb2.Done(must_wait=True)
    assert not session.ended.is_set()


def test_request_when_it_came_by_mail_then_only_until_it_is_answered(
    world: World, run: Loop, requests: Requests, replay: OpenedStore
) -> None:
    session = world.session()
    session.mailed_requests.add(7)
    run(requests.serve(session, extending(7, replay.spec.fingerprint)))
    assert outbox(session).messages == []
    assert session.mailed_requests == set()
    run(requests.serve(session, sampling(7, num_rows=1)))
    assert outbox(session).done().accepted.num_rows == 1


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
    world: World, run: Loop, requests: Requests, replay: OpenedStore, message: Any, error: type[Exception]
) -> None:
    session = world.session()
    run(requests.serve(session, message))
    assert isinstance(outbox(session).error(), error)
    assert not session.ended.is_set()
    assert not session.requests


def test_read_when_of_weights_then_wrong_state_names_the_kind(world: World, run: Loop, requests: Requests) -> None:
    run(world.create("w", ROWS, kind=control_pb2.STORE_KIND_WEIGHTS))
    session = world.session()
    run(requests.serve(session, control_pb2.ClientMessage(request=1, read=control_pb2.ReadRequest(store="w"))))
    error = outbox(session).error()
    assert isinstance(error, WrongStateError)
    assert "'w' is a weights store" in str(error)


def test_request_when_its_number_is_under_way_then_it_begins_when_that_has_ended(
    world: World, run: Loop, requests: Requests, replay: OpenedStore
) -> None:
    fingerprint = replay.spec.fingerprint

    async def scenario() -> ClientSession:
        session = world.session()
        session.begin(1)  # an attempt that the client has given up; its end is not noticed here
        messages = extending(1, fingerprint), sampling(1, num_rows=1)
        tasks = [asyncio.create_task(requests.serve(session, message)) for message in messages]
        for _ in range(5):
            await asyncio.sleep(0)
        assert outbox(session).messages == []
        session.end(1)
        await asyncio.wait_for(asyncio.gather(*tasks), 20.0)
        return session

    session = run(scenario())
    assert [each.WhichOneof("body") for each in outbox(session).messages] == ["done", "done"]
    assert not session.requests
    assert not session.ended.is_set()


@pytest.mark.parametrize("has_content", [False, True])
def test_request_when_cancelled_before_it_could_begin_then_aborted(
    world: World, run: Loop, requests: Requests, replay: OpenedStore, has_content: bool
) -> None:
    async def scenario() -> ClientSession:
        session = world.session()
        session.begin(1)
        session.run(requests.serve(session, extending(1, b"") if has_content else sampling(1)), 1)
        for _ in range(3):
            await asyncio.sleep(0)
        session.cancel(1)
        assert await session.finish(20.0)
        return session

    session = run(scenario())
    assert isinstance(outbox(session).error(), TransferAbortedError)
    assert [dict(tally.errors) for tally in world.services.call_times] == [{TransferAbortedError.code: 1}]
    assert session.requests == {1}
    assert not session.ended.is_set()  # what its client sends is discarded


def test_request_when_cancelled_while_it_waits_then_aborted(
    world: World, run: Loop, requests: Requests, replay: OpenedStore
) -> None:
    async def scenario() -> ClientSession:
        session = world.session()
        asked = control_pb2.SampleRequest(store="r", num_rows=1, timeout_s=20.0)
        session.run(requests.serve(session, control_pb2.ClientMessage(request=4, sample=asked)), 4)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        session.cancel(4)
        assert await session.finish(20.0)
        return session

    error = outbox(run(scenario())).error()
    assert isinstance(error, TransferAbortedError)
    assert error.transfer == 4


def test_request_when_cancelled_right_behind_it_then_aborted_all_the_same(
    world: World, run: Loop, requests: Requests, replay: OpenedStore
) -> None:
    session = world.session()

    def both() -> None:  # as two mails that a worker reports together
        session.run_at_once(requests.serve(session, sampling(4, timeout_s=20.0)), 4)
        session.cancel(4)

    async def scenario() -> None:
        await outside(both)
        assert await session.finish(20.0)

    run(scenario())
    assert isinstance(outbox(session).error(), TransferAbortedError)
    assert not session.requests


def leasing(request: int) -> control_pb2.ClientMessage:
    """Returns a sample of two rows on lease."""
    asked = control_pb2.SampleRequest(store="q", num_rows=2, timeout_s=20.0, is_lease=True)
    return control_pb2.ClientMessage(request=request, sample=asked)


@pytest.mark.parametrize("comes", ["before", "as it ends", "after"])
def test_request_when_cancelled_with_rows_on_lease_then_only_those_are_given_back(
    world: World, run: Loop, requests: Requests, comes: str
) -> None:
    settings = Settings(limiter=Queue(4), sampler=Fifo(), is_queue=True).to_json()
    kind = control_pb2.STORE_KIND_REPLAY
    queue = run(world.create("q", ROWS[0], kind=kind, capacity=4, settings=settings))
    filling = control_pb2.ExtendRequest(
        store="q", num_rows=3, content=content_of(ROWS, queue.spec.fingerprint), timeout_s=5.0
    )

    async def scenario() -> ClientSession:
        session = world.session()
        await requests.serve(session, control_pb2.ClientMessage(request=1, extend=filling))
        one = leasing(2)
        one.sample.num_rows = 1
        await requests.serve(session, one)
        if comes == "after":
            await requests.serve(session, leasing(3))
            assert queue.get_table().info()["num_leased"] == 3
            requests.cancel(session, 3)
            assert await session.finish(20.0)
        elif comes == "as it ends":

            async def serve() -> None:
                await requests.serve(session, leasing(3))
                asyncio.get_running_loop().call_soon(requests.cancel, session, 3)  # the task is done, and still kept

            session.run(serve(), 3)
            for _ in range(100):
                await asyncio.sleep(0)
            assert await session.finish(20.0)
        else:
            session.run(requests.serve(session, leasing(3)), 3)
            requests.cancel(session, 3)  # it has not begun
            for _ in range(100):
                await asyncio.sleep(0)
            assert await session.finish(20.0)
        requests.cancel(session, 9)  # which never was
        return session

    session = run(scenario())
    assert queue.get_table().info()["num_leased"] == 1
    assert session.cancelled_requests == set()


def test_lists_when_the_catalog_owes_changes_then_those_of_reads_go_at_once_and_others_once_it_owes_none(
    world: World, run: Loop, requests: Requests
) -> None:
    folder = world.root.requests_folder
    selection = control_pb2.ReadRequest(selection={"items": [{"positions": {"nbytes_ahead": 16}}]}).selection

    def serve(request: int, **body: Any) -> None:
        ahead = LongListFile(folder)
        ahead.add(bytes(16))
        run(requests.serve(world.session(), control_pb2.ClientMessage(request=request, **body), ahead))

    failpoints.arm("catalog.written=ENOSPC")
    try:
        world.db.delete("pending", b"a record that is over")
        assert world.db.owes
        serve(1, read=control_pb2.ReadRequest(store="no", selection=selection))
        assert list(folder.iterdir()) == []
        for request in (2, 3):
            serve(request, write=control_pb2.WriteRequest(store="no", selection=selection))
        assert len(list(folder.iterdir())) == 2
        run(requests.remove_kept_lists())
        assert len(list(folder.iterdir())) == 2
    finally:
        failpoints.arm("")
    assert world.db.settle()
    run(requests.remove_kept_lists())
    assert list(folder.iterdir()) == []


def test_request_when_the_files_of_its_store_find_no_room_then_answered_and_served_once_there_is(
    world: World, run: Loop, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        if name == "files.made":
            fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise fault

    run(world.creation.create(new_store("x", ROWS)))  # its files are made when it is first used
    session, asked = world.session(), control_pb2.ReadRequest(store="x", timeout_s=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "on_reach", refuse)
        run(requests.serve(session, control_pb2.ClientMessage(request=1, read=asked)))
    assert isinstance(outbox(session).error(), CapacityError)
    run(requests.serve(session, control_pb2.ClientMessage(request=2, read=asked)))
    assert outbox(session).done().accepted.HasField("spec")
