from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import StoreNotFoundError
from tdserve.server.dispatch.requests import Requests
from tdserve.server.execution.garbage import MIN_GONE, STORES_AT_A_TIME, Garbage
from tdserve.v1 import control_pb2
from tests.unit.server.local_peer import LocalPeer
from tests.unit.server.replaying import rows
from tests.unit.server.world import Loop, World, outbox

KINDS: dict[str, Any] = {
    "tensordict": {"kind": control_pb2.STORE_KIND_TENSORDICT},
    "replay": {"kind": control_pb2.STORE_KIND_REPLAY, "capacity": 4},
    "weights": {"kind": control_pb2.STORE_KIND_WEIGHTS},
}


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    """Enables the garbage collector again after a test."""
    yield
    gc.enable()


@pytest.mark.slow
def test_note_when_stores_are_many_then_they_are_left_out_now_and_then() -> None:
    garbage, before = Garbage(), gc.get_freeze_count()
    for _ in range(STORES_AT_A_TIME - 1):
        garbage.note_store(10)
    assert gc.get_freeze_count() <= before  # objects that were left out before may go at any time
    kept: list[list[int]] = [[] for _ in range(10_000)]
    garbage.note_store(10)
    assert gc.get_freeze_count() >= before + len(kept) // 2


class Circular:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.slow
@pytest.mark.parametrize(("num_deleted", "is_freed"), [(MIN_GONE - 1, False), (MIN_GONE, True)])
def test_note_when_enough_stores_were_deleted_then_what_was_left_out_is_looked_at_again(
    num_deleted: int, *, is_freed: bool
) -> None:
    garbage, circular = Garbage(), Circular()
    garbage.settle()
    left = weakref.ref(circular)
    del circular
    for _ in range(num_deleted):
        garbage.note_deletion()
    for _ in range(STORES_AT_A_TIME):
        garbage.note_store(10)
    assert (left() is None) == is_freed


@pytest.mark.slow
def test_create_when_stores_are_many_then_the_collector_looks_at_the_last_of_them_alone(
    world: World, run: Loop
) -> None:
    for number in range(2 * STORES_AT_A_TIME):
        run(world.create(f"w{number}", TensorDict({"a": torch.zeros(1)}, [1]), **KINDS["weights"]))
    first = world.stores.get("w0")
    assert not any(each is first for each in gc.get_objects())


@pytest.mark.parametrize("kind", KINDS)
def test_delete_when_what_a_store_had_was_left_out_then_it_is_freed_all_the_same(
    world: World, run: Loop, kind: str
) -> None:
    like = rows(0)[0] if kind == "replay" else rows(0)
    store = run(world.create("s", like, **KINDS[kind]))
    Garbage().settle()
    gc.disable()
    is_freed = asyncio.Event()
    weakref.finalize(store, run.loop.call_soon_threadsafe, is_freed.set)
    del store

    async def delete() -> None:
        await world.creation.delete("s")
        await is_freed.wait()

    run(delete())


def test_delete_when_a_request_has_failed_in_the_middle_then_the_store_is_freed_all_the_same(
    world: World, run: Loop, requests: Requests
) -> None:
    store = run(world.create_replay("s", rows(0)[0], 4))
    gc.disable()
    is_freed, session = asyncio.Event(), world.session()
    weakref.finalize(store, run.loop.call_soon_threadsafe, is_freed.set)
    asked = control_pb2.ClientMessage(
        request=1, sample=control_pb2.SampleRequest(store="s", num_rows=5, timeout_s=20.0)
    )
    del store

    async def scenario() -> None:
        waiting = asyncio.create_task(requests.serve(session, asked))
        await asyncio.sleep(0)
        await world.creation.delete("s")
        await waiting
        await asyncio.wait_for(is_freed.wait(), 20.0)

    run(scenario())
    assert isinstance(outbox(session).error(), StoreNotFoundError)


def test_session_when_it_has_ended_then_it_is_freed_at_once(world: World, run: Loop, requests: Requests) -> None:
    store = run(world.create_replay("s", rows(0)[0], 4))
    gc.disable()
    left: list[weakref.ref[Any]] = []

    async def scenario() -> None:
        async with LocalPeer(world, 50) as peer:
            asked = control_pb2.SampleRequest(store=store.name, num_rows=5, timeout_s=0.0)
            await requests.serve(peer.session, control_pb2.ClientMessage(request=1, sample=asked))
            left.append(weakref.ref(peer.session))
            left.append(weakref.ref(peer.local))

    run(scenario())
    run(asyncio.sleep(0))
    assert [each() for each in left] == [None, None]
