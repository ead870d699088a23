"""Extends and samples of local clients: rows on record before they are filled, held back until a writer is proved
gone."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tdserve.base.errors import (
    CapacityError,
    CorruptDataError,
    DeadlineExceededError,
    PeerLostError,
    RemoteProtocolError,
)
from tdserve.client.local.local_writes import put_rows
from tdserve.control.status import encode_failure
from tdserve.messages.content import make_rows_layout
from tdserve.messages.row_numbers import decode_rows
from tdserve.messages.selection.selection import parse
from tdserve.rules.replay.limiter import Queue
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.reserved import ReservedRows
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2
from tdserve.values.value_columns import decode_block
from tests.unit.server.local_peer import LocalPeer, mapped
from tests.unit.server.replaying import create, extend, extending, rows, sample, sampling
from tests.unit.server.world import Loop, World, content_of


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """An empty ring of eight rows, sampled oldest first."""
    return create(world, run, sampler=Fifo())


def here(
    store: OpenedStore, num_rows: int = 3, *, values: bytes = b"", timeout_s: float = 20.0
) -> control_pb2.ExtendRequest:
    """A request of a local client: its tensors come another way."""
    found = control_pb2.Content(fingerprint=store.spec.fingerprint, values=values)
    return control_pb2.ExtendRequest(store=store.name, num_rows=num_rows, content=found, timeout_s=timeout_s)


def begin(
    world: World, peer: LocalPeer, asked: control_pb2.ExtendRequest, request: int = 1
) -> asyncio.Task[control_pb2.Done]:
    """The extend, under way."""
    return asyncio.create_task(world.extends.extend(peer.session, request, asked))


def reserved(world: World, store: OpenedStore) -> list[list[int]]:
    """Rows that are on record as being filled."""
    return [each.rows.tolist() for each in ReservedRows.load(world.db, store.record.uid)]


def test_extend_when_the_client_has_written_then_live_and_on_record_until_then(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer, here(store))
            accepted = await peer.accepted()
            assert accepted.uid == store.record.uid
            assert decode_rows(accepted.rows).tolist() == [0, 1, 2]
            assert reserved(world, store) == [[0, 1, 2]]
            assert len(store.get_table()) == 0
            peer.done(columns=put_rows(mapped(store), accepted, [capture(rows(10))]).columns)
            assert decode_rows((await write).indices).tolist() == [0, 1, 2]

    run(scenario())
    assert reserved(world, store) == []
    assert sample(world, run, store, 3)["a"] == [10, 11, 12]


def test_extend_when_the_rules_look_at_leaves_then_the_client_reports_their_values(world: World, run: Loop) -> None:
    store = create(world, run, sampler=Slices(slice_len=2, trajectory_key="g"))

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer, here(store, 4))
            accepted = await peer.accepted()
            assert [tuple(path.parts) for path in accepted.columns] == [("g",)]
            written = put_rows(mapped(store), accepted, [capture(rows(10, 4))])
            assert [np.frombuffer(each, np.int32).tolist() for each in written.columns] == [[5, 5, 6, 6]]
            peer.done(columns=written.columns)
            await write

    run(scenario())
    assert sorted(set(sample(world, run, store, 4)["g"])) in ([5], [6], [5, 6])


@pytest.mark.parametrize("way", ["refuse", "die"])
def test_extend_when_the_client_writes_no_more_then_its_rows_are_free_at_once(
    world: World, run: Loop, store: OpenedStore, way: str
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer, here(store, 8))
            await peer.accepted()
            if way == "refuse":
                peer.done(failure=encode_failure(CapacityError(what="a disk", asked=2, free=1)))
            else:
                peer.let_go()
                await peer.leave()
            with pytest.raises(CapacityError if way == "refuse" else PeerLostError):
                await write

    run(scenario())
    assert reserved(world, store) == []
    assert sorted(extend(world, run, store, rows(20, 8), request=2)) == list(range(8))


def test_extend_when_the_clients_process_still_lives_then_its_rows_stay_reserved_until_it_is_gone(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as stopped:
            write = begin(world, stopped, here(store, 3))
            await stopped.accepted()
            await stopped.leave()
            with pytest.raises(PeerLostError):
                await write
            assert reserved(world, store) == [[0, 1, 2]]
            others = await world.extends.extend(world.session(2), 1, extending(store, rows(20, 5)))
            assert decode_rows(others.indices).tolist() == [3, 4, 5, 6, 7]
            assert not set(sampled_rows(store)) & {0, 1, 2}
            whole = asyncio.create_task(
                world.extends.extend(world.session(3), 1, extending(store, rows(30, 8), timeout_s=20.0))
            )
            await asyncio.sleep(0)
            assert not whole.done()
            stopped.let_go()
            assert len(decode_rows((await whole).indices)) == 8
            assert reserved(world, store) == []

    run(scenario())
    assert sorted(sample(world, run, store, 8)["a"]) == list(range(30, 38))


def sampled_rows(store: OpenedStore) -> list[int]:
    """Rows that are live."""
    found: list[int] = store.get_table().state.list_live_rows().tolist()
    return found


def test_extend_when_the_server_was_restarted_then_rows_of_a_stopped_client_are_held_back_all_the_same(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def stop() -> LocalPeer:
        peer = LocalPeer(world)
        await peer.__aenter__()
        write = begin(world, peer, here(store, 3))
        await peer.accepted()
        await peer.leave_in(write)
        return peer

    stopped = run(stop())
    world.process_watch.close()
    world.reopen()

    async def scenario() -> None:
        again = world.stores.get("r")
        assert again.get_table().info()["num_reserved"] == 3
        with pytest.raises(DeadlineExceededError):
            await world.extends.extend(world.session(2), 1, extending(again, rows(20, 8)))
        whole = asyncio.create_task(
            world.extends.extend(world.session(3), 1, extending(again, rows(30, 8), timeout_s=20.0))
        )
        stopped.let_go()
        assert len(decode_rows((await whole).indices)) == 8
        assert reserved(world, again) == []
        await stopped.__aexit__(None, None, None)

    run(scenario())


def test_extend_when_the_client_was_killed_before_a_restart_then_nothing_is_held_back(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer, here(store, 3))
            await peer.accepted()
            await peer.leave()
            with pytest.raises(PeerLostError):
                await write

    run(scenario())
    world.process_watch.close()
    world.reopen()

    async def find() -> OpenedStore:
        return world.stores.get("r")

    again = run(find())
    assert again.get_table().info()["num_reserved"] == 0
    assert reserved(world, again) == []


def with_value(number: int, value: Any) -> TensorDict:
    """A row."""
    return TensorDict({"a": torch.tensor(number), "v": NonTensorData(value)}, [])


def crowded(world: World, run: Loop) -> tuple[OpenedStore, bytes]:
    """A table with room for 1 MiB of values, and those of three rows that are more."""
    like = with_value(0, "x")
    store = run(world.create("v", like, kind=control_pb2.STORE_KIND_REPLAY, capacity=4, max_object_bytes=1 << 20))
    huge: Any = torch.stack([with_value(number, "y" * (1 << 20)) for number in range(3)])
    return store, content_of(huge).values


def test_extend_when_its_values_are_refused_and_its_client_is_stopped_then_its_rows_are_held_back_all_the_same(
    world: World, run: Loop
) -> None:
    store, huge = crowded(world, run)

    async def scenario() -> None:
        async with LocalPeer(world) as stopped:
            write = begin(world, stopped, here(store, 3, values=huge))
            await stopped.accepted()
            await stopped.leave()
            with pytest.raises((CapacityError, PeerLostError)):
                await write
            assert reserved(world, store) == [[0, 1, 2]]
            assert store.get_table().info()["num_reserved"] == 3

    run(scenario())


def test_extend_when_its_values_are_refused_and_its_client_has_written_then_its_rows_are_free(
    world: World, run: Loop
) -> None:
    store, huge = crowded(world, run)

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer, here(store, 3, values=huge))
            await peer.accepted()
            peer.done()
            with pytest.raises(CapacityError):
                await write
            assert reserved(world, store) == []
            assert store.get_table().info()["num_reserved"] == 0

    run(scenario())


def test_sample_when_the_client_is_local_then_it_gets_row_numbers_and_copies_them(
    world: World, run: Loop, store: OpenedStore
) -> None:
    extend(world, run, store, rows(10, 6))

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            done = await world.samples.sample(peer.session, 1, sampling(4))
            assert done is not None
            accepted = done.accepted
            assert (accepted.num_rows, accepted.uid, accepted.wants_written) == (4, store.record.uid, False)
            assert decode_rows(accepted.rows).tolist() == [0, 1, 2, 3]
            assert accepted.generations == store.get_generation_values()[:4].tobytes()
            assert not done.HasField("inline")

    run(scenario())
    assert store.get_table().counts.samples == 4


def test_sample_when_the_client_is_local_and_waits_for_messages_then_refused_and_nothing_is_counted(
    world: World, run: Loop, store: OpenedStore
) -> None:
    extend(world, run, store, rows(10, 4))

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            sizes = make_rows_layout(store.spec, 4, ()).message_nbytes
            with pytest.raises(RemoteProtocolError, match="the client copies"):
                await world.samples.sample(peer.session, 1, sampling(4, message_nbytes=sizes))

    run(scenario())
    assert store.get_table().counts.samples == 0


def test_sample_when_the_client_cannot_read_values_then_they_come_along(world: World, run: Loop) -> None:
    store = run(world.create_replay("v", with_value(0, "x"), 4))
    batch: Any = torch.stack([with_value(number, f"value {number}") for number in range(2)])
    run(world.extends.extend(world.session(), 1, extending(store, batch)))

    async def scenario(*, lacks_values: bool) -> control_pb2.Accepted:
        async with LocalPeer(world, lacks_values=lacks_values) as peer:
            asked = control_pb2.ReadRequest(store="v", fingerprint=store.spec.fingerprint)
            done = await world.row_reads.read(peer.session, 1, asked)
            assert done is not None
            return done.accepted

    assert not run(scenario(lacks_values=False)).values
    (column,) = decode_block(run(scenario(lacks_values=True)).values)
    assert [b"value 0" in column.values[0], b"value 1" in column.values[1]] == [True, True]


@pytest.fixture
def queue(world: World, run: Loop) -> OpenedStore:
    """A queue of four rows, full."""
    made = create(world, run, capacity=4, sampler=Fifo(), limiter=Queue(4), max_times_sampled=1)
    extend(world, run, made, rows(10, 4))
    return made


def test_sample_when_its_rows_leave_the_table_then_no_writer_gets_them_before_they_were_copied(
    world: World, run: Loop, queue: OpenedStore
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            taking = asyncio.create_task(world.samples.sample(peer.session, 1, sampling(3)))
            accepted = await peer.accepted()
            assert accepted.wants_written
            assert decode_rows(accepted.rows).tolist() == [0, 1, 2]
            with pytest.raises(DeadlineExceededError):
                await world.extends.extend(world.session(2), 1, extending(queue, rows(20, 2)))
            peer.done()
            await taking
            await world.extends.extend(world.session(2), 2, extending(queue, rows(20, 3)))

    run(scenario())
    assert sample(world, run, queue, 4)["a"] == [13, 20, 21, 22]


@pytest.mark.parametrize("way", ["refuse", "leave"])
def test_sample_when_its_rows_could_not_be_copied_then_they_are_there_again(
    world: World, run: Loop, queue: OpenedStore, way: str
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            taking = asyncio.create_task(world.samples.sample(peer.session, 1, sampling(3)))
            await peer.accepted()
            if way == "refuse":
                peer.done(failure=encode_failure(CorruptDataError(path="x", expected="a", actual="b")))
            else:
                await peer.leave()
            with pytest.raises(CorruptDataError if way == "refuse" else PeerLostError):
                await taking

    run(scenario())
    assert sample(world, run, queue, 4)["a"] == [10, 11, 12, 13]


def test_read_when_rows_were_lost_then_error_also_for_a_local_client(
    world: World, run: Loop, store: OpenedStore
) -> None:
    extend(world, run, store, rows(10, 6))
    asked = control_pb2.WriteRequest(
        store="r",
        selection=parse(1).to_message(),
        content=control_pb2.Content(fingerprint=store.spec.fingerprint),
        timeout_s=20.0,
    )

    async def scenario() -> None:
        async with LocalPeer(world) as stopped, LocalPeer(world, 2) as reader:
            write = asyncio.create_task(world.writes.write(stopped.session, 1, asked))
            await stopped.accepted()
            await stopped.leave()
            with pytest.raises(PeerLostError):
                await write
            reading = control_pb2.ReadRequest(
                store="r", fingerprint=store.spec.fingerprint, selection=parse([1, 2]).to_message()
            )
            with pytest.raises(CorruptDataError, match="rows 1: "):
                await world.row_reads.read(reader.session, 1, reading)

    run(scenario())
