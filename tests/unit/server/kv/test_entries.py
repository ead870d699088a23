"""Entries of keyed stores, from request to answer, with one real worker."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tensordict import TensorDict

from tdserve.base import failpoints
from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    DeadlineExceededError,
    InvalidSpecError,
    KeyNotFoundError,
    SpecMismatchError,
    StoreMovedError,
    StoreNotFoundError,
    VersionConflictError,
    WrongStateError,
)
from tdserve.base.ids import make_client_id
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.server.catalog.seals import Seal
from tdserve.server.dispatch.requests import Requests
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession
from tdserve.v1 import control_pb2
from tdserve.values.value_columns import ValueColumn, decode_block, encode_block
from tests.unit.server.replaying import in_line
from tests.unit.server.world import Loop, World, outbox


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """An empty keyed store."""
    return create(world, run)


def create(world: World, run: Loop, like: Any = None, **settings: Any) -> OpenedStore:
    """Creates a keyed store named ``k``."""
    text, kind = KeyedSettings(**settings).to_json(), control_pb2.STORE_KIND_KEYED
    return run(world.create("k", TensorDict({}, []) if like is None else like, kind=kind, settings=text))


def number(store: OpenedStore, count: int) -> int:
    """Returns the version of the entry that was put as the first, second and so on."""
    return count


def putting(store: OpenedStore, *keys: bytes, record: bytes = b"r", **fields: Any) -> control_pb2.PutRequest:
    """Returns a request to put entries."""
    content = control_pb2.Content(values=encode_block([ValueColumn(True, [record] * len(keys))]))
    fingerprint = store.spec.fingerprint
    return control_pb2.PutRequest(
        **{"store": "k", "fingerprint": fingerprint, "keys": keys, "content": content, **fields}
    )


def getting(store: OpenedStore, *keys: bytes, **fields: Any) -> control_pb2.GetRequest:
    """Returns a request to get entries."""
    return control_pb2.GetRequest(store="k", fingerprint=store.spec.fingerprint, keys=keys, **fields)


def serve(requests: Requests, run: Loop, session: ClientSession, number: int, **body: Any) -> Any:
    """Serves a request; returns its answer or raises its error."""
    run(requests.serve(session, control_pb2.ClientMessage(request=number, **body)))
    (message,) = outbox(session).messages
    if message.HasField("failure"):
        raise outbox(session).error()
    return outbox(session).done()


def read(done: control_pb2.Done) -> tuple[list[bytes], list[int]]:
    """Returns the records and versions of an answer."""
    records, versions = decode_block(done.accepted.values)
    return list(records.values), np.frombuffer(versions.values[0], "<u8").tolist()


def test_put_when_served_then_read_back_and_listed(
    world: World, requests: Requests, run: Loop, store: OpenedStore
) -> None:
    session = world.session()
    assert serve(requests, run, session, 1, put=putting(store, b"a", b"b")).version == number(store, 1)
    assert read(serve(requests, run, session, 2, get=getting(store, b"b"))) == ([b"r"], [number(store, 2)])
    assert read(serve(requests, run, session, 3, get=getting(store, b"x", b"a", asks_versions=True))) == (
        [],
        [0, number(store, 1)],
    )
    asked = control_pb2.ListRequest(store="k", fingerprint=store.spec.fingerprint, prefix=b"a")
    assert list(serve(requests, run, session, 4, list=asked).keys) == [b"a"]
    asked = control_pb2.ListRequest(store="k", fingerprint=store.spec.fingerprint, asks_count=True)
    assert serve(requests, run, session, 5, list=asked).num_rows == 2
    removing = control_pb2.RemoveRequest(store="k", fingerprint=store.spec.fingerprint, keys=[b"a"])
    assert serve(requests, run, session, 6, remove=removing).num_rows == 1
    with pytest.raises(KeyNotFoundError):
        serve(requests, run, session, 7, get=getting(store, b"b", b"a"))


def test_put_when_retried_then_answered_and_not_made_again(
    world: World, requests: Requests, run: Loop, store: OpenedStore
) -> None:
    hello = control_pb2.Hello(client_id=make_client_id(), transport="gloo")
    sessions = [world.session_of(hello, number) for number in range(1, 4)]
    for session in sessions[:2]:
        assert serve(requests, run, session, 1, put=putting(store, b"a")).version == number(store, 1)
    world.answers.forget_client(hello.client_id)
    store.get_keyed().recorded.clear()  # as if control had died before it had recorded the answer
    assert serve(requests, run, sessions[2], 1, put=putting(store, b"a")).version == number(store, 1)
    assert serve(requests, run, sessions[2], 2, put=putting(store, b"b")).version == number(store, 2)


def test_put_when_its_answer_finds_no_room_in_the_catalog_then_the_worker_keeps_it(
    world: World, requests: Requests, run: Loop, store: OpenedStore
) -> None:
    hello = control_pb2.Hello(client_id=make_client_id(), transport="gloo")
    failpoints.arm("catalog.written=ENOSPC")
    try:
        assert serve(requests, run, world.session_of(hello, 1), 1, put=putting(store, b"a")).version == number(store, 1)
    finally:
        failpoints.arm("")
    assert world.db.owes
    assert serve(requests, run, world.session(2), 1, put=putting(store, b"b")).version == number(store, 2)
    world.answers.forget_client(hello.client_id)  # as if control had died while it owed the answer
    store.get_keyed().recorded.clear()
    assert serve(requests, run, world.session_of(hello, 3), 1, put=putting(store, b"a")).version == number(store, 1)


def test_put_when_only_the_worker_has_its_answer_and_the_store_has_moved_then_a_retry_gets_it(
    world: World, requests: Requests, run: Loop, store: OpenedStore
) -> None:
    hello = control_pb2.Hello(client_id=make_client_id(), transport="gloo")
    serve(requests, run, world.session_of(hello, 1), 1, put=putting(store, b"a"))
    world.answers.forget_client(hello.client_id)  # as if control had died before it recorded the answer
    leaving, seal = world.services.moves.leaving, Seal(2, f"{7:032x}")
    run(leaving.seal(store, seal, Deadline.after(5.0)))
    run(leaving.release("k", store.record.uid, seal, 1))
    with pytest.raises(StoreMovedError):
        serve(requests, run, world.session(2), 1, put=putting(store, b"a"))
    world.reopen()
    session = world.session_of(hello, 3)
    assert serve(world.requests, run, session, 1, put=putting(store, b"a")).version == number(store, 1)


def test_put_when_the_server_was_restarted_then_goes_on(
    world: World, requests: Requests, run: Loop, store: OpenedStore
) -> None:
    serve(requests, run, world.session(), 1, put=putting(store, b"a"))
    world.reopen()
    again = world.stores.get("k")
    session = world.session()
    assert read(serve(world.requests, run, session, 1, get=getting(again, b"a"))) == ([b"r"], [number(store, 1)])
    with pytest.raises(VersionConflictError):
        serve(world.requests, run, session, 2, put=putting(again, b"a", if_versions=[0]))
    assert serve(
        world.requests, run, session, 3, put=putting(again, b"a", if_versions=[number(store, 1)])
    ).version == number(store, 2)


def test_get_when_it_waits_then_only_a_put_of_its_keys_wakes_it(
    world: World, requests: Requests, run: Loop, store: OpenedStore
) -> None:
    waiting, session = world.session(), world.session(2)

    async def wait() -> None:
        message = control_pb2.ClientMessage(request=1, get=getting(store, b"a", b"b", timeout_s=60.0))
        task = asyncio.ensure_future(requests.serve(waiting, message))
        await in_line(store)
        for number, key in enumerate([b"c", b"a", b"b"], 1):
            assert not task.done()
            await requests.serve(session, control_pb2.ClientMessage(request=number, put=putting(store, key)))
        await task

    run(wait())
    assert read(outbox(waiting).done()) == ([b"r", b"r"], [number(store, 2), number(store, 3)])
    assert len(store.get_keyed().watches) == 0


def test_get_when_nothing_comes_then_ends(world: World, requests: Requests, run: Loop, store: OpenedStore) -> None:
    with pytest.raises(DeadlineExceededError, match="'a'"):
        serve(requests, run, world.session(), 1, get=getting(store, b"a", timeout_s=0.01))
    assert len(store.get_keyed().watches) == 0


def test_request_when_for_another_store_then_refused(
    world: World, requests: Requests, run: Loop, store: OpenedStore
) -> None:
    session = world.session()
    with pytest.raises(SpecMismatchError):
        serve(requests, run, session, 1, put=putting(store, b"a", fingerprint=b"other"))
    with pytest.raises(StoreNotFoundError):
        serve(requests, run, session, 2, get=control_pb2.GetRequest(store="x"))
    run(world.create("t", TensorDict({}, [])))
    with pytest.raises(WrongStateError):
        serve(requests, run, session, 3, list=control_pb2.ListRequest(store="t"))
    with pytest.raises(WrongStateError):
        serve(requests, run, session, 4, read=control_pb2.ReadRequest(store="k"))


def test_create_when_any_entry_fits_then_it_has_no_structure(world: World, run: Loop) -> None:
    with pytest.raises(InvalidSpecError):
        create(world, run, TensorDict({"a": TensorDict({}, [])}, []))
