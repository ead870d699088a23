from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CapacityError,
    CorruptDataError,
    DeadlineExceededError,
    PeerLostError,
)
from tdserve.client.local.local_writes import put_selection
from tdserve.control.status import encode_failure
from tdserve.messages.selection.selection import parse
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.lost_rows import Overwrite
from tdserve.structure.captures.capture import capture
from tdserve.v1 import content_pb2, control_pb2
from tests.unit.server.local_peer import LocalPeer, mapped
from tests.unit.server.replaying import create, extend, rows, sample
from tests.unit.server.world import Loop, World, content_of

TD = TensorDict({"a": torch.zeros(4, dtype=torch.int64), "b": torch.zeros(4, 2)}, [4])


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A store of four rows of zeros."""
    return run(world.create("x", TD))


def writing(
    store: OpenedStore, index: Any, *keys: tuple[str, ...], values: bytes = b"", timeout_s: float = 20.0
) -> control_pb2.WriteRequest:
    """A write of a local client: its tensors come another way."""
    return control_pb2.WriteRequest(
        store=store.name,
        selection=parse(index).to_message(),
        keys=[content_pb2.Path(parts=key) for key in keys],
        content=control_pb2.Content(fingerprint=store.spec.fingerprint, values=values),
        timeout_s=timeout_s,
    )


def begin(
    world: World, peer: LocalPeer, asked: control_pb2.WriteRequest, request: int = 1
) -> asyncio.Task[control_pb2.Done]:
    """The write, under way."""
    return asyncio.create_task(world.writes.write(peer.session, request, asked))


def put(store: OpenedStore, index: Any, number: int) -> None:
    """What the client does when it is let."""
    target = mapped(store)
    shape = target.leaves["a",][index].shape
    td = TensorDict({"a": torch.full(shape, number), "b": torch.full((*shape, 2), float(number))}, shape)
    put_selection(target, parse(index), capture(td))


def numbers(store: OpenedStore) -> list[int]:
    """Generations."""
    found: list[int] = store.get_generation_values().tolist()
    return found


def read(world: World, run: Loop, store: OpenedStore, index: Any = ()) -> control_pb2.Done:
    """Reads as any client does."""
    asked = control_pb2.ReadRequest(store=store.name, selection=parse(index).to_message(), timeout_s=0.05)
    done = run(world.reads.read(world.session(9), 1, store, asked, Deadline.after(0.05)))
    assert done is not None
    return done


def content(store: OpenedStore) -> list[int]:
    """The leaf ``a`` as it lies there."""
    found: list[int] = mapped(store).leaves["a",].tolist()
    return found


def test_write_when_the_client_has_written_then_committed_and_until_then_unreadable(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> control_pb2.Done:
        async with LocalPeer(world) as peer:
            write = begin(world, peer, writing(store, slice(1, 3)))
            assert (await peer.accepted()).uid == store.record.uid
            assert numbers(store) == [0, 1, 1, 0, 1]
            (record,) = Overwrite.load(world.db, store.record.uid)
            assert (record.lock_name, record.rows.rows.tolist()) == (peer.lock_name, [1, 2])
            put(store, slice(1, 3), 7)
            peer.done()
            done = await write
            assert world.answers.find_answer(peer.session.client_id, 1) == done.SerializeToString()
            return done

    done = run(scenario())
    assert (numbers(store), done.version) == ([0, 2, 2, 0, 2], 1)
    assert content(store) == [0, 7, 7, 0]
    assert Overwrite.load(world.db, store.record.uid) == []
    assert store.writes == []


def test_write_when_the_client_will_not_then_its_reason_and_the_rows_are_readable_again(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer, writing(store, 1))
            await peer.accepted()
            peer.done(failure=encode_failure(CapacityError(what="a disk", asked=2, free=1)))
            with pytest.raises(CapacityError):
                await write

    before = numbers(store)
    run(scenario())
    assert numbers(store)[:-1] == before[:-1]  # so the row still has its checksum
    assert numbers(store)[-1] % 2 == 0
    assert not store.lost
    assert world.db.scan("pending") == []
    assert read(world, run, store).inline


@pytest.mark.parametrize("leaf", ["a", "text"])
def test_write_when_its_client_gave_it_up_before_its_permit_then_it_gets_none_and_all_is_as_before(
    world: World, run: Loop, leaf: str
) -> None:
    store = run(world.create("y", TD.clone().set("text", NonTensorStack(*"abcd"))))
    stored = content_of(TD[1].clone().set_non_tensor("text", "new")).values if leaf == "text" else b""

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            peer.session.begin(1)
            write = begin(world, peer, writing(store, 1, values=stored))
            peer.session.cancel(1)
            await asyncio.wait({write}, timeout=5.0)
            assert write.cancelled()
            peer.session.end(1)
            await peer.leave()
            assert await peer.is_let_go()

    run(scenario())
    assert all(number % 2 == 0 for number in numbers(store))
    assert not store.lost
    assert world.db.scan("pending") == []


async def lose(world: World, store: OpenedStore) -> None:
    """A client goes while it writes rows 1 and 2."""
    async with LocalPeer(world) as peer:
        write = begin(world, peer, writing(store, [1, 2]))
        await peer.accepted()
        await peer.leave()
        with pytest.raises(PeerLostError):
            await write


def test_write_when_the_session_ends_in_the_middle_then_rows_are_lost_also_after_a_restart(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def find() -> OpenedStore:
        return world.stores.get("x")

    run(lose(world, store))
    for _ in range(2):
        found = run(find())
        assert numbers(found)[:4] == [0, 1, 1, 0]
        for index in (1, slice(None, 2), ()):
            with pytest.raises(CorruptDataError, match=r"rows .*write them again"):
                read(world, run, found, index)
        assert read(world, run, found, [0, 3]).inline
        world.process_watch.close()
        world.reopen()


@pytest.mark.parametrize("is_local", [False, True])
def test_write_when_rows_were_lost_and_are_written_again_then_whole(
    world: World, run: Loop, store: OpenedStore, is_local: bool
) -> None:
    async def scenario() -> None:
        await lose(world, store)
        if is_local:
            async with LocalPeer(world, 2) as other:
                again = begin(world, other, writing(store, [1, 2]))
                await other.accepted()
                put(store, [1, 2], 5)
                other.done()
                await again
        else:
            asked = writing(store, [1, 2])
            two = TensorDict({"a": torch.full((2,), 5), "b": torch.full((2, 2), 5.0)}, [2])
            asked.content.CopyFrom(content_of(two, store.spec.fingerprint))
            await world.writes.write(world.session(2), 1, asked)

    run(scenario())
    assert all(number % 2 == 0 for number in numbers(store))
    assert content(store) == [0, 5, 5, 0]
    assert not store.lost
    assert Overwrite.load(world.db, store.record.uid) == []
    assert read(world, run, store).inline


def test_write_when_a_part_of_lost_rows_is_written_then_the_others_stay_lost(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> None:
        await lose(world, store)
        async with LocalPeer(world, 2) as other:
            for request, asked in ((1, writing(store, 1)), (2, writing(store, 2, ("a",)))):
                again = begin(world, other, asked, request)
                await other.accepted()
                other.done(request)
                await again

    run(scenario())
    assert [number % 2 for number in numbers(store)] == [0, 0, 1, 0, 1]
    assert read(world, run, store, 1).inline
    with pytest.raises(CorruptDataError, match="rows 2"):
        read(world, run, store, 2)


def test_write_when_the_process_that_lost_the_rows_is_still_there_then_waits_for_its_end(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> None:
        stopped = LocalPeer(world)
        async with stopped:
            write = begin(world, stopped, writing(store, [1, 2]))
            await stopped.accepted()
            await stopped.leave()
            with pytest.raises(PeerLostError):
                await write
            async with LocalPeer(world, 2) as other:
                with pytest.raises(DeadlineExceededError, match="the process that stopped"):
                    await begin(world, other, writing(store, 2, timeout_s=0.02))
                elsewhere = begin(world, other, writing(store, 3), 2)
                await other.accepted()
                other.done(2)
                await elsewhere
                again = begin(world, other, writing(store, 2), 3)
                stopped.let_go()
                await other.accepted()
                other.done(3)
                await again

    run(scenario())
    assert [number % 2 for number in numbers(store)[:4]] == [0, 1, 0, 0]


def test_write_when_others_write_the_same_rows_then_one_after_the_other_and_other_rows_at_once(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as first, LocalPeer(world, 2) as second, LocalPeer(world, 3) as third:
            writes = [begin(world, first, writing(store, [0, 1]))]
            await first.accepted()
            writes += [begin(world, second, writing(store, [1, 2])), begin(world, third, writing(store, [1]))]
            elsewhere = begin(world, first, writing(store, 3), 2)
            await first.accepted()
            first.done(2)
            await elsewhere
            assert len(store.writes) == 1
            first.done()
            await writes[0]
            # Both were woken by that. Whoever comes first has row 1 for itself.
            await second.accepted()
            assert len(store.writes) == 1
            second.done()
            await writes[1]
            await third.accepted()
            assert len(store.writes) == 1
            third.done()
            await writes[2]

    run(scenario())
    assert numbers(store) == [2, 6, 2, 2, 8]


def test_write_when_a_journalled_one_and_a_local_one_meet_then_one_after_the_other(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            local = begin(world, peer, writing(store, [0, 1]))
            await peer.accepted()
            asked = writing(store, [1, 2])
            two = TensorDict({"a": torch.full((2,), 5), "b": torch.full((2, 2), 5.0)}, [2])
            asked.content.CopyFrom(content_of(two, store.spec.fingerprint))
            journalled = asyncio.create_task(world.writes.write(world.session(2), 1, asked))
            again = begin(world, peer, writing(store, 1), 2)
            put(store, [0, 1], 7)
            peer.done()
            await local
            (message,) = [await peer.receive()]
            assert message.request == 2
            assert len(store.writes) == 1
            peer.done(2)
            await asyncio.gather(journalled, again)

    run(scenario())
    assert all(number % 2 == 0 for number in numbers(store))
    assert content(store)[2] == 5


def test_write_when_several_are_under_way_then_each_answer_has_its_version(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> list[int]:
        async with LocalPeer(world) as peer:
            writes = [begin(world, peer, writing(store, row), row + 1) for row in range(3)]
            for _ in writes:
                await peer.accepted()
            versions = []
            for row in (2, 0, 1):
                peer.done(row + 1)
                versions.append((await writes[row]).version)
                assert store.content_version == versions[-1]
            return versions

    assert run(scenario()) == [1, 2, 3]


def test_write_when_it_has_values_alone_then_the_client_has_nothing_to_do(world: World, run: Loop) -> None:
    store = run(world.create("v", TensorDict({"a": torch.zeros(2), "t": NonTensorData("old")}, [2])))
    new = content_of(TensorDict({"t": NonTensorData("new")}, [2])).values

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            await begin(world, peer, writing(store, (), ("t",), values=new))

    run(scenario())
    assert b"new" in read(world, run, store).accepted.values
    assert numbers(store) == [2, 2, 2]


def test_write_when_its_values_do_not_fit_then_refused_and_the_rows_are_readable(world: World, run: Loop) -> None:
    td = TensorDict({"a": torch.zeros(2), "t": NonTensorData("old")}, [2])
    store = run(world.create("v", td, max_object_bytes=1 << 20))
    huge = content_of(TensorDict({"t": NonTensorData("x" * (2 << 20))}, [2])).values

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            with pytest.raises(CapacityError):
                await begin(world, peer, writing(store, (), values=huge))

    run(scenario())
    assert all(number % 2 == 0 for number in numbers(store))
    assert not store.lost
    assert world.db.scan("pending") == []


def test_write_when_rows_of_a_table_are_lost_then_they_are_not_drawn_and_reserved_only_after_the_proof(
    world: World, run: Loop
) -> None:
    table = create(world, run, capacity=4, sampler=Fifo())
    extend(world, run, table, rows(10, 4))

    async def lose(stopped: LocalPeer) -> None:
        write = begin(world, stopped, writing(table, [1, 2]))
        await stopped.accepted()
        await stopped.leave()
        with pytest.raises(PeerLostError):
            await write

    async def scenario() -> None:
        async with LocalPeer(world) as stopped:
            await lose(stopped)
            plan = table.get_table().samples.draw_sample(2, rng=np.random.default_rng())
            assert plan is not None
            assert plan.rows.tolist() == [0, 3]
            info = table.get_table().info()
            assert (info["num_rows"], info["num_held"]) == (4, 2)
        gone = asyncio.Event()
        world.process_watch.watch(stopped.lock_name, gone.set)
        await gone.wait()

    run(scenario())
    assert sorted(extend(world, run, table, rows(20, 4), request=2)) == [0, 1, 2, 3]
    assert sample(world, run, table, 4)["a"] == [20, 21, 22, 23]
    assert not table.lost
    assert world.db.scan("pending", b"overwrites:") == []
