"""Serves the requests of sessions that create and delete stores; each is carried out once, however often it is sent."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tdserve.base.errors import NotSupportedError
from tdserve.base.ids import check_store_name
from tdserve.rules.placement import PlacementRecord
from tdserve.server.catalog.creation import Creation
from tdserve.server.catalog.stores import Stores
from tdserve.server.durability.syncing import Syncing
from tdserve.server.execution import inline_tasks
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.kinds.placement_kind import read_placement
from tdserve.server.moves.restored_settings import RestoredSettings
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.weights.relays import Relays
from tdserve.store.database.catalog_db import Transaction
from tdserve.v1 import control_pb2


class StoreRequests:
    """Creation and deletion of stores, as requested by sessions.

    Args:
        stores: The server's stores.
        creation: Creates and deletes them.
        answers: Answers to committed requests, for their retries.
        relays: Told of deleted weights.
        syncing: Syncs deletions that must be on the disk before they are answered.
    """

    def __init__(
        self, stores: Stores, creation: Creation, answers: CommittedAnswers, relays: Relays, syncing: Syncing
    ) -> None:
        self._stores = stores
        self._creation = creation
        self._answers = answers
        self._relays = relays
        self._syncing = syncing
        self._restored_settings = RestoredSettings(stores, creation)

    async def create(
        self, session: ClientSession, request: int, asked: control_pb2.CreateStoreRequest
    ) -> control_pb2.Done:
        """Creates a store; errors as in ``Creation.create``, ``Creation.begin_hidden``, or
        ``RestoredSettings.settle``."""
        await inline_tasks.ensure_task()
        if asked.is_hidden:
            return control_pb2.Done(created_store=await self._creation.begin_hidden(session.number, asked))
        changed_settings = await self._restored_settings.settle(asked) if asked.exists_ok else ""
        made = await self._creation.create(asked, self._make_record(session, request))
        made.changed_settings = changed_settings
        return control_pb2.Done(created_store=made)

    async def end_filling(
        self, session: ClientSession, request: int, asked: control_pb2.EndFillingRequest
    ) -> control_pb2.Done:
        """Makes a hidden store visible, or deletes it; errors as in ``Creation.end_filling``."""
        await inline_tasks.ensure_task()
        done = control_pb2.Done()
        await self._creation.end_filling(session.number, asked, self._make_record(session, request))
        return done

    async def delete(
        self, session: ClientSession, request: int, asked: control_pb2.DeleteStoreRequest
    ) -> control_pb2.Done:
        """Deletes a store; errors as in ``Creation.delete``.

        Raises:
            NotSupportedError: Other servers have parts of it, which would be left behind.
        """
        name = check_store_name(asked.name)
        store, known = self._stores.find_if_open(name), self._stores.catalog.find(name)
        if known is not None and not asked.deletes_record and (placement := read_placement(known)) is not None:
            _check_no_parts(name, placement)
        if known is None or not known.packed:
            await inline_tasks.ensure_task()
        await self._creation.delete(name, self._make_record(session, request), uid=asked.uid)
        if store is not None:
            self._relays.forget_deleted(store)
        if known is not None and known.durability == "disk":
            await inline_tasks.ensure_task()
            await self._syncing.wait_synced()
        return control_pb2.Done()

    def _make_record(self, session: ClientSession, request: int) -> _RecordAnswer:
        return _RecordAnswer(self._answers, session.client_id, request)


def _check_no_parts(name: str, placement: PlacementRecord) -> None:
    if placement.is_listed:
        where = f"servers {', '.join(map(str, placement.servers))} of a cluster have parts of it"
        reason = f"{where}; connect to all of its servers, as in tdserve.connect('a:7707,b:7707')"
        raise NotSupportedError(feature=f"deleting {name!r} at one server", reason=reason)


class _RecordAnswer:
    """Opens the transaction that commits a change together with the answer of its request."""

    def __init__(self, answers: CommittedAnswers, client_id: bytes, request: int) -> None:
        self._answers = answers
        self._client_id = client_id
        self._request = request

    def __call__(self, done: control_pb2.Done, *, uses_reserve: bool = False) -> AbstractContextManager[Transaction]:
        answer = done.SerializeToString()
        return self._answers.begin_transaction(self._client_id, self._request, answer, uses_reserve=uses_reserve)
