from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import (
    InvalidRequestError,
    InvalidSpecError,
    NotSupportedError,
    StoreExistsError,
    StoreNotFoundError,
    TDServeError,
    TransferAbortedError,
    WrongStateError,
)
from tdserve.messages.row_sets import RowSet
from tdserve.rules.catalog import DEFAULT_MAX_OBJECT_BYTES
from tdserve.server.catalog import descriptions
from tdserve.server.catalog.creation import Creation
from tdserve.server.kinds.table_kind import MAX_CAPACITY_ROWS
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.worker_spec_cache import WorkerSpecCache
from tdserve.store.database.catalog_db import Transaction
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2
from tests.errors import raises
from tests.unit.server.world import Loop, World

SPEC = codec.encode(capture(TensorDict({"a": torch.zeros(4, 2)}, [4])).spec)
TENSORDICT = control_pb2.STORE_KIND_TENSORDICT
REPLAY = control_pb2.STORE_KIND_REPLAY


def make_request(**fields: Any) -> control_pb2.CreateStoreRequest:
    """A request for a tensordict store "x"."""
    return control_pb2.CreateStoreRequest(**{"name": "x", "kind": TENSORDICT, "spec": SPEC, **fields})


@pytest.mark.parametrize(("kind", "num_rows"), [(TENSORDICT, 4), (REPLAY, 0), (control_pb2.STORE_KIND_WEIGHTS, 4)])
def test_create_when_of_any_kind_then_described(world: World, run: Loop, kind: Any, num_rows: int) -> None:
    answer = run(world.creation.create(make_request(kind=kind, capacity=10)))
    assert answer.created
    assert (answer.description.kind, answer.description.num_rows) == (kind, num_rows)
    store = world.stores.get("x")  # makes the files, if it needed none until now
    assert list((world.root.path / answer.description.path).iterdir())
    assert descriptions.describe(world.stores, store, with_spec=False) == answer.description


def test_create_when_an_attempt_before_has_only_made_way_then_made(world: World, run: Loop) -> None:
    """A widened table: the server was killed when the old table, to which nobody had written, was gone."""
    first = run(world.creation.create(make_request(kind=REPLAY, capacity=10))).description
    run(world.creation.delete("x"))
    again = make_request(kind=REPLAY, capacity=10, replaces_empty_uid=first.uid)
    made = run(world.creation.create(again)).description
    assert made.uid != first.uid
    with pytest.raises(StoreExistsError):
        run(world.creation.create(again))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"name": ""}, InvalidRequestError),
        ({"name": "../x"}, InvalidRequestError),
        ({"kind": 0}, InvalidRequestError),
        ({"spec": None}, InvalidSpecError),
        ({"kind": REPLAY, "capacity": 0}, InvalidRequestError),
        ({"max_object_bytes": 5}, InvalidRequestError),
        ({"kind": REPLAY, "capacity": MAX_CAPACITY_ROWS + 1}, InvalidRequestError),
        ({"kind": REPLAY, "capacity": 5, "min_size": 6}, InvalidRequestError),
        ({"kind": REPLAY, "capacity": 5, "settings": '{"sampler": {"kind": "psychic"}}'}, NotSupportedError),
    ],
)
def test_create_when_it_cannot_be_then_typed_error_and_nothing_is_there(
    world: World, run: Loop, fields: dict[str, Any], error: type[TDServeError]
) -> None:
    with pytest.raises(error):
        run(world.creation.create(make_request(**fields)))
    assert len(world.stores.catalog) == 0
    assert list((world.root.path / "stores").glob("*")) == []


def test_create_when_it_exists_then_returned_only_with_exists_ok(world: World, run: Loop) -> None:
    run(world.creation.create(make_request()))
    assert not run(world.creation.create(make_request(exists_ok=True))).created
    with pytest.raises(StoreExistsError):
        run(world.creation.create(make_request()))
    with raises(StoreExistsError, name="x"):
        run(world.creation.create(make_request(exists_ok=True, kind=REPLAY, capacity=3)))


@pytest.mark.parametrize("fields", [{}, {"kind": REPLAY, "capacity": 3}])
def test_create_when_it_names_a_limit_of_values_then_kept_described_and_sent_to_workers(
    world: World, run: Loop, fields: dict[str, Any]
) -> None:
    limit = 3 << 20
    answer = run(world.creation.create(make_request(max_object_bytes=limit, **fields)))
    assert answer.description.max_object_bytes == limit
    assert world.stores.get("x").make_ref(WorkerSpecCache(lambda: None)).max_object_bytes == limit
    assert not run(world.creation.create(make_request(exists_ok=True, **fields))).created
    with pytest.raises(StoreExistsError, match="max_object_bytes"):
        run(world.creation.create(make_request(exists_ok=True, max_object_bytes=limit * 2, **fields)))
    default = run(world.creation.create(make_request(name="y", **fields)))
    assert default.description.max_object_bytes == DEFAULT_MAX_OBJECT_BYTES


def test_create_when_two_ask_at_once_then_one_is_made_and_both_get_it(world: World, run: Loop) -> None:
    async def scenario() -> list[bool]:
        answers = await asyncio.gather(*(world.creation.create(make_request(exists_ok=True)) for _ in range(5)))
        assert len({answer.description.uid for answer in answers}) == 1
        return [answer.created for answer in answers]

    assert sorted(run(scenario())) == [False, False, False, False, True]


def test_delete_when_there_is_no_such_store_then_error(world: World, run: Loop) -> None:
    run(world.creation.create(make_request()))
    run(world.creation.delete("x"))
    with pytest.raises(StoreNotFoundError):
        run(world.creation.delete("x"))


def begin(creation: Creation, name: str, session: int) -> Coroutine[Any, Any, OpenedStore]:
    """Begins to fill a store over a session."""
    return creation.begin_filling(session, *creation.read(make_request(name=name)))


def test_abandon_when_the_session_ends_then_only_its_loading_stores_go(world: World, run: Loop) -> None:
    run(world.creation.create(make_request(name="whole")))
    run(begin(world.creation, "half", 3))
    run(begin(world.creation, "other", 4))
    run(world.creation.abandon(3))
    assert world.stores.loading.list_of(3) == []
    assert [store.name for store in world.stores.loading.list_of(4)] == ["other"]
    run(world.creation.create(make_request(name="half")))


def test_begin_filling_when_the_session_has_begun_that_before_then_the_same_store(world: World, run: Loop) -> None:
    assert run(begin(world.creation, "half", 3)) is run(begin(world.creation, "half", 3))


def test_begin_filling_when_the_session_has_ended_then_error_and_the_name_is_free(world: World, run: Loop) -> None:
    with pytest.raises(TransferAbortedError, match="ended"):
        run(begin(Creation(world.stores, sessions={4}), "x", 3))
    assert not world.stores.catalog.is_taken("x")


def test_begin_filling_when_an_ended_session_still_fills_the_store_then_waits_until_that_is_abandoned(
    world: World, run: Loop
) -> None:
    is_open = {3, 4}
    creation = Creation(world.stores, sessions=is_open)

    async def scenario() -> OpenedStore:
        first = await begin(creation, "x", 3)
        with pytest.raises(StoreExistsError):
            await begin(creation, "x", 4)
        is_open.remove(3)
        retry = asyncio.ensure_future(begin(creation, "x", 4))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not retry.done()
        await creation.abandon(3)
        made = await retry
        assert made.record.uid != first.record.uid
        return made

    made = run(scenario())
    assert world.stores.loading.list_of(4) == [made]


class Recorder:
    """Opens transactions of a world, and counts the answers that are committed with them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.num_recorded = 0

    def __call__(self, done: control_pb2.Done, *, uses_reserve: bool = False) -> AbstractContextManager[Transaction]:
        self.num_recorded += 1
        return self._world.db.begin_transaction(uses_reserve=uses_reserve)


def test_hidden_store_when_its_session_ends_the_filling_then_visible_from_then_on(world: World, run: Loop) -> None:
    record = Recorder(world)
    run(world.creation.begin_hidden(3, make_request(is_hidden=True)))
    store = world.stores.loading.find_hidden("x", 3)
    assert store is not None
    assert (world.stores.find("x"), world.stores.loading.find_hidden("x", 4)) == (None, None)
    for session, identity in ((4, store.identity), (3, "another")):
        with pytest.raises(StoreNotFoundError):
            run(world.creation.end_filling(session, make_end(identity), record))
    store.writes.append(RowSet.from_rows(np.arange(2)))
    with pytest.raises(WrongStateError, match="being written"):
        run(world.creation.end_filling(3, make_end(store.identity), record))
    store.writes.clear()
    assert record.num_recorded == 0
    run(world.creation.end_filling(3, make_end(store.identity), record))
    assert record.num_recorded == 1
    assert world.stores.find("x") is store
    assert world.stores.loading.list_of(3) == []
    with pytest.raises(StoreNotFoundError):
        run(world.creation.end_filling(3, make_end(store.identity), record))
    world.reopen()
    assert "x" in world.stores.catalog


def test_hidden_store_when_given_up_or_abandoned_or_after_a_restart_then_gone(world: World, run: Loop) -> None:
    def hide() -> str:
        run(world.creation.begin_hidden(3, make_request(is_hidden=True)))
        store = world.stores.loading.find_hidden("x", 3)
        assert store is not None
        return store.identity

    run(world.creation.end_filling(3, make_end(hide(), gives_up=True), Recorder(world)))
    assert not world.stores.catalog.is_taken("x")
    hide()
    run(world.creation.abandon(3))
    assert not world.stores.catalog.is_taken("x")
    hide()
    world.reopen()
    assert not world.stores.catalog.is_taken("x")
    assert list((world.root.path / "stores").glob("*")) == []


def test_hidden_store_when_its_session_creates_it_again_or_it_has_rules_then_refused(world: World, run: Loop) -> None:
    run(world.creation.begin_hidden(3, make_request(is_hidden=True)))
    with pytest.raises(StoreExistsError):
        run(world.creation.begin_hidden(3, make_request(is_hidden=True)))
    with pytest.raises(StoreExistsError):
        run(begin(world.creation, "x", 3))
    with pytest.raises(InvalidRequestError, match="visible at once"):
        run(world.creation.begin_hidden(3, make_request(name="y", kind=REPLAY, capacity=3, is_hidden=True)))


def make_end(identity: str, **fields: Any) -> control_pb2.EndFillingRequest:
    """The end of the filling of a store "x"."""
    return control_pb2.EndFillingRequest(store="x", identity=identity, **fields)
