from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CorruptDataError,
    InvalidRequestError,
    InvalidSpecError,
    PeerLostError,
    RemoteProtocolError,
    SelectionError,
    SpecMismatchError,
    StoreExistsError,
    StructureChangedError,
    TDServeError,
    TransferAbortedError,
    WrongStateError,
)
from tdserve.messages.content import read_layout, select_spec
from tdserve.messages.selection.selection import parse
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.workers import MAX_DEATHS
from tdserve.server.recovery.journal import Journal
from tdserve.server.sessions.long_list_file import LongListFile, place_lists
from tdserve.store.exchange.spools import SpoolWriter
from tdserve.structure.captures.capture import capture
from tdserve.v1 import content_pb2, control_pb2, worker_pb2
from tests.errors import raises
from tests.unit.server.world import Loop, World, columns_of, content_of, new_store

TD = TensorDict({"a": torch.zeros(4, dtype=torch.int64), "b": {"c": torch.zeros(4, 2)}}, [4])
LONG = TensorDict({"a": torch.zeros(4, 1 << 14)}, [4])
"""Too long to be packed: its files are made with it."""


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A store of four rows of zeros."""
    return run(world.create("x", TD))


def writing(store: OpenedStore, td: TensorDict, index: Any = (), *keys: tuple[str, ...]) -> control_pb2.WriteRequest:
    """A write of a selection."""
    return control_pb2.WriteRequest(
        store=store.name,
        selection=parse(index).to_message(),
        keys=[content_pb2.Path(parts=key) for key in keys],
        content=content_of(td, store.spec.fingerprint),
        timeout_s=5.0,
    )


def creating(td: TensorDict) -> control_pb2.WriteRequest:
    """A write that creates the store "y"."""
    return control_pb2.WriteRequest(store="y", new_store=new_store("y", td), content=content_of(td), timeout_s=5.0)


def column(world: World, run: Loop, store: OpenedStore, key: str, index: Any = ()) -> list[Any]:
    """What a read of a selection brings."""
    asked = control_pb2.ReadRequest(store=store.name, selection=parse(index).to_message(), timeout_s=5.0)
    done = run(world.reads.read(world.session(), 1, store, asked, Deadline.after(5.0)))
    assert done is not None
    layout = read_layout(select_spec(store.spec, parse(index), ()))
    found: list[Any] = columns_of(layout, done.inline)[key].tolist()
    return found


def test_write_when_done_then_read_back_and_version_grows(world: World, run: Loop, store: OpenedStore) -> None:
    whole = TensorDict({"a": torch.arange(4), "b": {"c": torch.ones(4, 2)}}, [4])
    assert run(world.writes.write(world.session(), 1, writing(store, whole))).version == 1
    row = TensorDict({"a": torch.tensor(9)}, [])
    assert run(world.writes.write(world.session(), 2, writing(store, row, -1, ("a",)))).version == 2
    assert column(world, run, store, "a") == [0, 1, 2, 9]
    assert column(world, run, store, "a", slice(None, None, 2)) == [0, 2]
    assert column(world, run, store, "c", [3]) == [[1.0, 1.0]]
    assert store.generations is not None
    assert store.generations.values.tolist() == [2, 2, 2, 4, 4]


def test_write_when_of_another_structure_then_refused_and_nothing_changed(
    world: World, run: Loop, store: OpenedStore
) -> None:
    asked = control_pb2.WriteRequest(store="x", content=content_of(TD[:2]))
    with raises(SpecMismatchError, store="x"):
        run(world.writes.write(world.session(), 1, asked))
    assert store.content_version == 0
    assert world.db.scan("pending") == []


@pytest.mark.parametrize("index", [9, 4, [0, 4], (0, 0)])
def test_write_when_the_index_does_not_fit_then_refused_and_nothing_is_left_to_repair(
    world: World, run: Loop, store: OpenedStore, index: Any
) -> None:
    # A client checks too, but the next server would apply what is left in the journal.
    with pytest.raises(SelectionError):
        run(world.writes.write(world.session(), 1, writing(store, TD, index)))
    assert world.db.scan("pending") == []
    assert store.generations is not None
    assert not store.generations.values.any()


def test_write_when_the_content_is_too_short_then_error_and_the_store_goes_on(
    world: World, run: Loop, store: OpenedStore
) -> None:
    with pytest.raises(RemoteProtocolError):
        run(world.writes.write(world.session(), 1, writing(store, TD[:2])))
    assert column(world, run, store, "a") == [0] * 4
    assert world.db.scan("pending") == []
    run(world.writes.write(world.session(), 2, writing(store, TD)))


def test_write_when_of_another_kind_of_store_then_error(world: World, run: Loop) -> None:
    weights = run(world.create("w", TD, kind=control_pb2.STORE_KIND_WEIGHTS))
    with pytest.raises(WrongStateError, match="weights store"):
        run(world.writes.write(world.session(), 1, writing(weights, TD)))


def test_create_when_filled_then_visible_with_its_content(world: World, run: Loop) -> None:
    texts = NonTensorStack("p", "q", "r", "s")
    whole = TensorDict({"a": torch.arange(4), "b": {"c": torch.ones(4, 2)}, "s": texts}, [4])
    asked = creating(whole)
    assert run(world.writes.create(world.session(1), 1, asked)).version == 1
    assert column(world, run, world.stores.get("y"), "a") == [0, 1, 2, 3]
    with pytest.raises(StoreExistsError):
        run(world.writes.create(world.session(1), 2, asked))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"store": "z"}, InvalidRequestError),
        ({"new_store": new_store("y", TD, kind=control_pb2.STORE_KIND_REPLAY, capacity=4)}, InvalidRequestError),
        (
            {"new_store": control_pb2.CreateStoreRequest(name="y", kind="STORE_KIND_TENSORDICT")},
            InvalidSpecError,
        ),
        ({"new_store": new_store("y", TD[:2])}, StructureChangedError),
        (
            {"content": control_pb2.Content(fingerprint=capture(TD).spec.fingerprint, inline=b"short")},
            RemoteProtocolError,
        ),
    ],
)
def test_create_when_the_request_contradicts_itself_then_error_and_the_name_is_free(
    world: World, run: Loop, changes: dict[str, Any], error: type[TDServeError]
) -> None:
    fields = {"store": "y", "new_store": new_store("y", TD), "content": content_of(TD), **changes}
    asked = control_pb2.WriteRequest(**fields)
    with pytest.raises(error):
        run(world.writes.create(world.session(1), 1, asked))
    assert not world.stores.catalog.is_taken("y")


def test_create_when_its_channel_is_lost_then_the_name_is_free(world: World, run: Loop) -> None:
    session = world.session(6)  # of its own: the worker closes its channel
    session.bind(1, 0)
    session.lose_channel(0, "a test")
    with pytest.raises(TransferAbortedError):
        run(world.writes.create(session, 1, creating(LONG)))
    assert not world.stores.catalog.is_taken("y")
    assert run(world.writes.create(session, 2, creating(LONG))).version == 1


def test_create_when_asked_anew_while_a_first_attempt_fills_then_the_next_waits_for_its_end(
    world: World, run: Loop
) -> None:
    async def scenario() -> None:
        filling = asyncio.ensure_future(world.writes.create(world.session(5), 1, creating(LONG)))
        while not world.stores.loading.is_being_filled("y", 5):  # noqa: ASYNC110 (a thread makes its files)
            await asyncio.sleep(0)
        with pytest.raises(StoreExistsError):
            await world.writes.create(world.session(5), 2, creating(TD))
        assert filling.done()
        assert not world.stores.loading.is_being_filled("y", 5)
        await filling

    run(scenario())


def test_repair_when_killed_in_the_middle_of_an_apply_then_applied_and_its_retry_answered(
    world: World, run: Loop, store: OpenedStore
) -> None:
    client_id = bytes(16)
    asked = writing(store, TensorDict({"a": torch.tensor([7, 8])}, [2]), slice(1, 3), ("a",))
    journal = Journal(client_id, 5, control_pb2.Done(version=1), asked, "")
    world.db.put("pending", b"apply:" + store.record.uid.encode(), journal.to_bytes())
    assert store.generations is not None
    store.generations.values[[1, 2, 4]] |= 1  # as the apply leaves them when it is cut short
    world.reopen()
    assert run(world.writes.repair()) == 1
    again = world.stores.get("x")
    assert column(world, run, again, "a") == [0, 7, 8, 0]
    assert again.content_version == 1
    assert world.answers.find_answer(client_id, 5) == control_pb2.Done(version=1).SerializeToString()
    assert world.db.scan("pending", b"apply:") == []


@pytest.mark.parametrize("is_restarted", [False, True])
def test_write_when_the_worker_dies_of_it_each_time_then_its_rows_are_lost_until_they_are_written_again(
    world: World, run: Loop, store: OpenedStore, is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = writing(store, TensorDict({"a": torch.tensor([7, 8])}, [2]), slice(1, 3), ("a",))
    if is_restarted:
        journal = Journal(bytes(16), 5, control_pb2.Done(version=1), asked, "")
        world.db.put("pending", b"apply:" + store.record.uid.encode(), journal.to_bytes())
        world.reopen()
    with monkeypatch.context() as patch:
        patch.setattr(world.worker, "submit", lose_order)
        if is_restarted:
            assert run(world.writes.repair()) == 0
        else:
            with pytest.raises(CorruptDataError, match=f"died {MAX_DEATHS} times"):
                run(world.writes.write(world.session(), 1, asked))
    assert world.db.scan("pending", b"apply:") == []
    for _ in range(2):
        store = run(open_store(world))
        assert column(world, run, store, "a", [0, 3]) == [0, 0]
        with pytest.raises(CorruptDataError, match="rows 1, 2"):
            column(world, run, store, "a")
        world.reopen()
    store = run(open_store(world))
    run(world.writes.write(world.session(), 2, writing(store, TensorDict({"a": torch.arange(4)}, [4]), (), ("a",))))
    assert column(world, run, store, "a") == [0, 1, 2, 3]
    assert world.db.scan("pending") == []


async def open_store(world: World) -> OpenedStore:
    """Opens the store on the event loop, on which its lost rows are waited for."""
    return world.stores.get("x")


def lose_order(_: worker_pb2.Order) -> asyncio.Future[worker_pb2.Worked]:
    """The end of an order during which the worker dies."""
    lost = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lost.set_exception, PeerLostError(peer="data worker 0", reason="it died"))
    return lost


def test_repair_when_positions_had_come_ahead_then_they_are_there_after_a_crash(
    world: World, run: Loop, store: OpenedStore
) -> None:
    asked = writing(store, TensorDict({"a": torch.tensor([7, 8])}, [2]), [3, 1], ("a",))
    positions = asked.selection.items[0].positions
    ahead = LongListFile(world.root.requests_folder)
    ahead.add(positions.data)
    positions.nbytes_ahead = len(positions.data)
    positions.ClearField("data")
    message = control_pb2.ClientMessage(write=asked)
    place_lists(message, ahead)
    asked = message.write
    journal = Journal(bytes(16), 5, control_pb2.Done(version=1), asked, "")
    world.db.put("pending", b"apply:" + store.record.uid.encode(), journal.to_bytes())
    world.reopen()
    store = world.stores.get("x")
    assert run(world.writes.repair()) == 1
    assert column(world, run, store, "a", [1, 3]) == [8, 7]
    world.root.empty_requests()
    assert list(world.root.requests_folder.iterdir()) == []


def test_repair_when_the_store_was_deleted_then_dropped(world: World, run: Loop, store: OpenedStore) -> None:
    journal = Journal(bytes(16), 5, control_pb2.Done(), writing(store, TD), "")
    world.db.put("pending", b"apply:" + b"another-uid", journal.to_bytes())
    assert run(world.writes.repair()) == 0
    assert world.db.scan("pending") == []


def test_repair_when_values_had_come_over_the_channel_then_they_are_applied_from_their_file(
    world: World, run: Loop
) -> None:
    td = TensorDict({"a": torch.zeros(4, dtype=torch.int64), "v": NonTensorData("old", batch_size=[4])}, [4])
    store = run(world.create("y", td))
    asked = writing(store, TensorDict({"v": NonTensorData("new", batch_size=[4])}, [4]), (), ("v",))
    content, asked.content.values = asked.content.values, b""
    asked.content.ClearField("inline")
    asked.content.values_nbytes = len(content)
    asked.content.message_nbytes.append(len(content))
    staging = str(store.folder / "staging" / "0")
    with SpoolWriter(f"{staging}.values") as writer:
        writer.write(0, memoryview(content))
    journal = Journal(bytes(16), 5, control_pb2.Done(version=1), asked, staging)
    world.db.put("pending", b"apply:" + store.record.uid.encode(), journal.to_bytes())
    world.reopen()
    assert run(world.writes.repair()) == 1
    again = world.stores.get("y")
    reading = control_pb2.ReadRequest(store="y", keys=[content_pb2.Path(parts=["v"])])
    done = run(world.reads.read(world.session(), 1, again, reading, Deadline.after(0)))
    assert done is not None
    assert b"new" in done.accepted.values


@pytest.mark.parametrize("values_nbytes", [1, 1 << 62])
def test_write_when_values_are_announced_that_do_not_follow_then_refused_and_nothing_is_left_to_repair(
    world: World, run: Loop, store: OpenedStore, values_nbytes: int
) -> None:
    asked = writing(store, TD)
    asked.content.values_nbytes = values_nbytes
    with pytest.raises(RemoteProtocolError, match="content for 'x'"):
        run(world.writes.write(world.session(), 1, asked))
    asked.content.ClearField("inline")
    asked.content.message_nbytes.append(values_nbytes)
    with pytest.raises(RemoteProtocolError):
        run(world.writes.write(world.session(), 1, asked))
    assert world.db.scan("pending") == []
