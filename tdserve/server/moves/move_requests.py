"""Serves the steps of moves, which a client takes at the server that has a store and at the one that gets it, and those
of checkpoints.

``server/README.md`` has reading orders of moves and recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import RemoteProtocolError, WrongStateError
from tdserve.rules.placement import PlacementRecord
from tdserve.server.catalog.creation import Creation
from tdserve.server.catalog.seals import Seal
from tdserve.server.catalog.stores import Stores
from tdserve.server.durability.syncing import Syncing
from tdserve.server.execution import inline_tasks
from tdserve.server.kinds.placement_kind import find_forward, make_placement
from tdserve.server.kv.keyed_entries import KeyedEntries
from tdserve.server.moves.arriving_stores import ArrivingStores
from tdserve.server.moves.checkpoints import Checkpoints
from tdserve.server.moves.leaving_stores import LeavingStores, read_blocks
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.weights.relays import Relays
from tdserve.v1 import control_pb2

_Handler = Callable[[ClientSession, int, Any], Coroutine[Any, Any, control_pb2.Done]]


class MoveRequests:
    """The steps of moves. Each is safe to repeat.

    Args:
        stores: All stores of the server.
        creation: Deletes records of where stores are.
        syncing: Syncs stores that have come.
        entries: Keeps the answers to changes of keyed stores that leave.
        relays: Pass on versions of weights that leave.

    Attributes:
        leaving: Stores that leave this server.
        arriving: Stores that come to it.
        checkpoints: Copies of all stores.
        handlers: Handlers of these requests, by kind.
    """

    def __init__(
        self, stores: Stores, creation: Creation, syncing: Syncing, entries: KeyedEntries, relays: Relays
    ) -> None:
        self._stores = stores
        self._creation = creation
        self.leaving = LeavingStores(stores, entries, relays)
        self.arriving = ArrivingStores(stores, syncing)
        self.checkpoints = Checkpoints(stores)
        self.handlers: Mapping[str, _Handler] = {
            "move": partial(self._serve_to_the_end, self.serve),
            "checkpoint": partial(self._serve_to_the_end, self.checkpoints.serve),
        }

    def restore(self) -> None:
        """Finishes or removes what a restart has interrupted. Call it before clients are served."""
        self.leaving.restore()
        self.arriving.restore()
        self.checkpoints.restore()

    async def on_session_ended(self, session: int) -> None:
        """Lets the stores serve again that a session had sealed, and removes what was kept for it."""
        self.leaving.on_session_ended(session)
        await self.checkpoints.on_session_ended(session)

    async def _serve_to_the_end(
        self, serve: _Handler, session: ClientSession, request: int, asked: Any
    ) -> control_pb2.Done:
        """Takes a step. If it outlives its session, which waits only for a while, nothing stays of what it has sealed
        or listed since."""
        try:
            return await serve(session, request, asked)
        finally:
            if session.ended.is_set():
                await self.on_session_ended(session.number)

    async def serve(self, session: ClientSession, request: int, asked: control_pb2.MoveRequest) -> control_pb2.Done:
        """Takes one step; errors as in the methods of ``LeavingStores`` and ``ArrivingStores``."""
        await inline_tasks.ensure_task()
        step = asked.WhichOneof("step")
        if step in ("list_files", "read", "seal"):
            return control_pb2.Done(moved=await self._read(session, step, asked))
        if step == "list_complete":
            granted = [each for each in self.arriving.list_complete() if session.caller.grant.has_store(each.store)]
            return control_pb2.Done(moved=control_pb2.MoveAnswer(complete=granted))
        if step == "unseal":
            self.leaving.unseal(asked.store, Seal(session.number, asked.move))
        elif step == "release":
            await self.leaving.release(asked.store, asked.uid, Seal(session.number, asked.move), asked.release)
        elif step == "receive":
            await self.arriving.receive(
                asked.store, asked.move, asked.receive, client_id=session.client_id, continues=asked.continues
            )
        elif step == "write":
            await self.arriving.write(asked.move, asked.write.blocks)
        elif step == "sync":
            await self.arriving.sync(asked.move)
        elif step == "complete":
            await self.arriving.complete(asked.store, asked.move, asked.complete)
        elif step == "show":
            await self.arriving.show(asked.store, asked.move)
        elif step == "give_up":
            await self.arriving.give_up(asked.move)
        elif step == "place":
            await self.place(asked.store, asked.place, move=asked.move, expected=asked.expected)
        else:
            raise RemoteProtocolError(expected="a step of a move", received=step or "an empty message")
        return control_pb2.Done(moved=control_pb2.MoveAnswer())

    async def _read(self, session: ClientSession, step: str, asked: control_pb2.MoveRequest) -> control_pb2.MoveAnswer:
        await self._stores.open_apart(asked.store)
        store = self.leaving.find(asked.store, asked.uid)
        if step == "list_files":
            by = Seal(session.number, asked.move)
            return control_pb2.MoveAnswer(files=await self.leaving.list_files(store, by), uid=store.record.uid)
        if step == "read":
            return control_pb2.MoveAnswer(blocks=await read_blocks(store.folder, asked.read.blocks))
        return await self.leaving.seal(store, Seal(session.number, asked.move), Deadline.after(asked.timeout_s))

    async def place(self, name: str, settings: str, *, move: str = "", expected: str = "") -> None:
        """Records where a store is, in the place of an earlier record of that.

        Args:
            settings: The record as JSON; "" deletes that of a move.
            move: The move whose record is deleted.
            expected: The record that is replaced; "" for any.

        Raises:
            StoreExistsError: A store has the name. Nothing was changed.
            WrongStateError: There is another record than expected. Nothing was changed.
        """
        stores, known = self._stores, self._stores.catalog.find(name)
        if not settings:
            forward = None if known is None else find_forward(known)
            if forward is not None and forward.move == move:
                await self._creation.delete(name)
            return
        if expected and (known is None or known.settings != expected):
            raise WrongStateError(state=f"another record of {name!r} than {expected}", event="replacing it")
        record, spec = make_placement(name, PlacementRecord.from_json(settings))
        if known is None or known.kind != record.kind:
            made = stores.make_packed(record, spec)
            with stores.db.begin_transaction() as txn:
                stores.pack(made, None, txn)
            return
        placed = replace(known, settings=record.settings)
        stores.db.put("stores", name.encode(), placed.to_bytes())
        stores.catalog.replace(placed)
        if (opened := stores.opened.get(name)) is not None:
            opened.record = placed
