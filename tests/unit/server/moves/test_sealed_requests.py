"""Requests that are under way when their store is sealed, as for a checkpoint or a move."""

from __future__ import annotations

import asyncio

from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreMovedError
from tdserve.server.opened_store import OpenedStore
from tdserve.server.requests import Requests
from tdserve.server.seals import Seal
from tdserve.v1 import control_pb2
from tests.unit.server.replaying import create
from tests.unit.server.world import Loop, World, outbox

SEAL = Seal(3, f"{7:032x}")


async def pause(requests: Requests, store: OpenedStore) -> None:
    """Brings a store to rest for a moment."""
    leaving = requests.moves.leaving
    await leaving.seal(store, SEAL, Deadline.after(20.0))
    leaving.unseal(store.name, SEAL)


def test_delete_when_the_store_is_sealed_just_now_then_refused_and_its_retry_deletes(
    world: World, run: Loop, requests: Requests
) -> None:
    store, session = create(world, run), world.session()
    delete = control_pb2.ClientMessage(request=7)
    delete.delete_store.name = store.name

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: session.run_at_once(requests.serve(session, delete), 7))  # before the seal begins
        await asyncio.create_task(pause(requests, store))
        await session.finish(20.0)
        assert isinstance(outbox(session).error(), StoreMovedError)
        assert store.name in world.stores.catalog
        await requests.serve(session, delete)
        outbox(session).done()
        assert store.name not in world.stores.catalog

    run(scenario())
