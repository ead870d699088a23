from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, KeyNotFoundError
from tdserve.messages.content import read_layout, select_spec
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import parse
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.store.rows.generations import sum_generations
from tdserve.structure.trees import codec
from tdserve.v1 import content_pb2, control_pb2
from tests.errors import raises
from tests.unit.server.local_peer import LocalPeer
from tests.unit.server.world import Loop, World, columns_of, content_of

TD = TensorDict({"a": torch.arange(4), "v": NonTensorData("text", batch_size=[4])}, [4])


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A store of four rows, written once."""
    made = run(world.create("x", TD))
    asked = control_pb2.WriteRequest(store="x", content=content_of(TD, made.spec.fingerprint), timeout_s=5.0)
    run(world.writes.write(world.session(), 1, asked))
    return made


def reading(index: Any = (), *keys: str, timeout_s: float = 5.0, **fields: Any) -> control_pb2.ReadRequest:
    """Returns a read of a selection."""
    asked = control_pb2.ReadRequest(store="x", selection=parse(index).to_message(), timeout_s=timeout_s, **fields)
    asked.keys.extend(content_pb2.Path(parts=[key]) for key in keys)
    return asked


def read(world: World, run: Loop, store: OpenedStore, asked: control_pb2.ReadRequest) -> control_pb2.Done:
    """Returns the answer to a read of a remote client."""
    done = run(world.reads.read(world.session(), 1, store, asked, Deadline.after(asked.timeout_s)))
    assert done is not None
    return done


def test_read_when_a_selection_is_asked_for_then_its_content_comes_and_the_spec_once(
    world: World, run: Loop, store: OpenedStore
) -> None:
    done = read(world, run, store, reading(slice(1, 3), "a"))
    layout = read_layout(select_spec(store.spec, parse(slice(1, 3)), [("a",)]))
    assert columns_of(layout, done.inline)["a"].tolist() == [1, 2]
    assert codec.decode(done.accepted.spec) == store.spec
    again = read(world, run, store, reading(slice(1, 3), "a", fingerprint=store.spec.fingerprint))
    assert columns_of(layout, again.inline)["a"].tolist() == [1, 2]
    assert not again.accepted.HasField("spec")


def test_read_when_the_key_is_unknown_then_refused(world: World, run: Loop, store: OpenedStore) -> None:
    with raises(KeyNotFoundError, key="q"):
        read(world, run, store, reading((), "q"))


def test_read_when_nothing_is_newer_then_answers_at_once(world: World, run: Loop, store: OpenedStore) -> None:
    assert read(world, run, store, reading(newer_than=1, timeout_s=0.0)).nothing_newer


def test_read_when_something_newer_comes_then_it_is_read(world: World, run: Loop, store: OpenedStore) -> None:
    async def waiting() -> control_pb2.Done | None:
        asked = reading((), "a", newer_than=1)
        task = asyncio.create_task(world.reads.read(world.session(), 1, store, asked, Deadline.after(5.0)))
        await asyncio.sleep(0)
        assert not task.done()
        store.get_generation_values()[:] += 2
        store.waiters.wake()
        return await task

    done = run(waiting())
    assert done is not None
    assert done.accepted.version == 2


def test_read_when_rows_are_being_written_then_waits_for_them_and_for_no_others(
    world: World, run: Loop, store: OpenedStore
) -> None:
    store.writes.append(RowSet.run(2, 3))
    assert read(world, run, store, reading([0, 1], "a")).inline
    with pytest.raises(DeadlineExceededError, match="another write to rows of 'x'"):
        read(world, run, store, reading([1, 2], "a", timeout_s=0.05))


@pytest.mark.parametrize("lacks_values", [False, True])
def test_read_when_the_client_is_local_then_the_permit_has_the_store_and_the_missing_values(
    world: World, run: Loop, store: OpenedStore, lacks_values: bool
) -> None:
    async def local_read() -> control_pb2.Done | None:
        async with LocalPeer(world, lacks_values=lacks_values) as peer:
            return await world.reads.read(peer.session, 1, store, reading(), Deadline.after(5.0))

    done = run(local_read())
    assert done is not None
    assert (done.accepted.uid, done.inline) == (store.record.uid, b"")
    assert (b"text" in done.accepted.values) == lacks_values
    own = store.get_generation_values()[-1:]  # that of the whole store
    assert done.accepted.generation_sum == (sum_generations(own) if lacks_values else 0)
