"""Creates and deletes stores on request."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CorruptDataError,
    InvalidRequestError,
    InvalidSpecError,
    StoreExistsError,
    StoreNotFoundError,
    TransferAbortedError,
    WrongStateError,
)
from tdserve.base.ids import check_store_name
from tdserve.messages.store_kinds import KIND_NAMES, describe_kind
from tdserve.rules.catalog import StoreRecord, explain_difference
from tdserve.server.catalog import descriptions
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution import inline_tasks
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.kinds.policies import wake_followers
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.store.database.catalog_db import Transaction
from tdserve.structure.trees import codec
from tdserve.structure.trees.difference import describe_difference
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2

CREATION_TIMEOUT_S = 60.0
"""Limit for the creation of a store by another request: reserving space takes up to 0.4 s per GiB."""


class Record(Protocol):
    """A function that opens the transaction that commits a change together with its answer."""

    def __call__(
        self, done: control_pb2.Done, *, uses_reserve: bool = False
    ) -> AbstractContextManager[Transaction]: ...


class Creation:
    """Creation and deletion of stores.

    Args:
        stores: The server's stores.
        sessions: Numbers of the open sessions. A store is deleted if its session ends before it has filled the store.
    """

    def __init__(self, stores: Stores, sessions: Container[object]) -> None:
        self._stores = stores
        self._sessions = sessions
        self._beginning: dict[
            tuple[int, str], asyncio.Event
        ] = {}  # hidden stores that are being made: when that is over

    def read(self, request: control_pb2.CreateStoreRequest) -> tuple[StoreRecord, Spec]:
        """Returns the store that a request asks for, as for ``Stores.create``.

        Raises:
            InvalidSpecError, InvalidRequestError, NotSupportedError, KeyNotFoundError: There is no such store.
        """
        name = check_store_name(request.name)
        kind = KINDS.get(KIND_NAMES.get(request.kind, ""))
        if kind is None:
            raise InvalidRequestError(argument="kind", reason=f"{request.kind} is not a kind of store")
        if not request.HasField("spec"):
            raise InvalidSpecError(store=name, reason="the request has no structure")
        spec = codec.decode(request.spec)
        return kind.make_record(request, spec, self._stores), spec

    async def find_begun(self, session: int, wanted: StoreRecord, spec: Spec) -> OpenedStore | None:
        """Returns the store of this name and structure that this session has begun to fill before, and may fill again;
        None if the name is free. Waits for what will be over soon: a request that the session's client has abandoned,
        and what a session that has ended has begun.

        Raises:
            StoreExistsError: A store has this name, or another session is filling it.
        """
        name = wanted.name
        while self._stores.catalog.is_taken(name):
            loader = 0 if name in self._stores.catalog else self._stores.loading.find_loader(name)
            is_filling = self._stores.loading.is_being_filled(name, session)
            if self._stores.loading.is_begun(name, session, spec) and not is_filling:
                return self._stores.loading.get(name, session)
            if not is_filling and (not loader or loader in self._sessions):
                self._stores.catalog.check_free(name)
            await inline_tasks.ensure_task()
            await self._stores.wait_settled(name, Deadline.after(CREATION_TIMEOUT_S))
        return None

    async def begin_filling(self, session: int, wanted: StoreRecord, spec: Spec) -> OpenedStore:
        """Returns a new, invisible store for its first content. It goes with the session if that does not fill it.

        Raises:
            StoreExistsError, CapacityError: Nothing was created.
            TransferAbortedError: The session has ended.
        """
        while (made := await self.find_begun(session, wanted, spec)) is None:
            with suppress(StoreExistsError):  # another request was quicker
                made = await self._stores.create(replace(wanted, loading=True), spec, owner_session=session)
                break
        if session not in self._sessions:
            await self._stores.delete(made)  # it will not be filled
            raise TransferAbortedError(transfer=0, reason=f"session {session} has ended")
        return made

    async def begin_hidden(
        self, session: int, request: control_pb2.CreateStoreRequest
    ) -> control_pb2.CreateStoreResponse:
        """Creates a store that only writes of this session see until it ends the filling; errors as in
        ``begin_filling``."""
        wanted, spec = self.read(request)
        if KINDS[wanted.kind].has_rules:
            raise InvalidRequestError(argument="is_hidden", reason=f"{describe_kind(wanted.kind)} is visible at once")
        key, ended = (session, request.filling), asyncio.Event()
        self._beginning[key] = ended
        try:
            store = await self.begin_filling(session, wanted, spec)
            store.is_hidden, store.filling = True, request.filling
        finally:
            self._beginning.pop(key, None)
            ended.set()
        return self._answer(store, created=True)

    async def end_filling(self, session: int, request: control_pb2.EndFillingRequest, record: Record) -> None:
        """Makes a hidden store of this session visible, or deletes it.

        Args:
            record: Opens the transaction that commits the change together with the answer.

        Raises:
            StoreNotFoundError: This session has no such hidden store (any more).
            WrongStateError: Some of its rows are incomplete. Nothing was changed.
        """
        if request.gives_up and (beginning := self._beginning.get((session, request.filling))) is not None:
            await beginning.wait()
        store = self._stores.loading.find_hidden(request.store, session)
        known = ("", "") if store is None else (store.identity, store.filling)
        is_meant = known[0] == request.identity or (request.gives_up and known[1] == request.filling != "")
        if store is None or not is_meant:
            raise StoreNotFoundError(name=request.store)
        if request.gives_up:
            await self._stores.delete(store, partial(record, control_pb2.Done(), uses_reserve=True))
            return
        if store.writes or store.lost:
            state = f"rows of store {store.name!r} are being written, or lost"
            raise WrongStateError(state=state, event="making it visible")
        with record(control_pb2.Done()) as txn:
            self._stores.publish_loaded(store, txn)
        store.is_hidden = False

    async def create(
        self, request: control_pb2.CreateStoreRequest, record: Record | None = None
    ) -> control_pb2.CreateStoreResponse:
        """Creates a store, or returns the existing one with ``exists_ok``.

        Args:
            record: Opens the transaction that commits the store together with the answer.

        Raises:
            StoreExistsError, InvalidSpecError, InvalidRequestError, CapacityError: Nothing was created.
        """
        wanted, spec = self.read(request)
        name = wanted.name
        if request.replaces_empty_uid:
            await self._stores.open_apart(name)
            await self._make_way(name, request.replaces_empty_uid)
        await self._stores.open_apart(name)
        may_be_packed = KINDS[wanted.kind].may_be_packed(wanted, spec)
        if may_be_packed and not self._stores.catalog.is_taken(name):
            await self._stores.seals.wait_for_creation()
        existing = find_or_refuse(self._stores, wanted, spec, exists_ok=request.exists_ok)
        if may_be_packed and existing is None and not self._stores.catalog.is_taken(name):
            packed = self._stores.make_packed(wanted, spec)
            description = descriptions.describe_packed(self._stores, packed, with_spec=False)
            made_later = control_pb2.CreateStoreResponse(description=description, created=True)
            done = control_pb2.Done(created_store=made_later)
            with self._stores.db.begin_transaction() if record is None else record(done) as txn:
                self._stores.pack(packed, None, txn)
            return made_later
        if existing is None:

            def begin(store: OpenedStore) -> AbstractContextManager[Transaction]:
                done = control_pb2.Done(created_store=self._answer(store, created=True))
                return self._stores.db.begin_transaction() if record is None else record(done)

            try:
                made = await self._stores.create(wanted, spec, begin=begin)
            except StoreExistsError:
                loader = self._stores.loading.find_loader(name)
                if not request.exists_ok and (not loader or loader in self._sessions):
                    raise
                # Another request was quicker. It may still be creating the files, and may fail. It does fail if its
                # session has ended, and may then be the first attempt of this very call.
                await self._stores.wait_settled(name, Deadline.after(CREATION_TIMEOUT_S))
                return await self.create(request, record)
            return self._answer(made, created=True)
        return self._answer(existing, created=False)

    def _answer(self, store: OpenedStore, *, created: bool) -> control_pb2.CreateStoreResponse:
        store.catch_up()
        has_leaves = bool(store.record.added_leaves)  # of which the caller need not have named all
        description = descriptions.describe(self._stores, store, with_spec=has_leaves)
        return control_pb2.CreateStoreResponse(description=description, created=created)

    async def _make_way(self, name: str, uid: str) -> None:
        """Deletes a replay table that was never written to.

        Raises:
            StoreExistsError: Rows were written to it, or it was recreated. Nothing was changed.
        """
        if name not in self._stores.catalog:
            return  # an earlier attempt has deleted it
        store = self._stores.get(name)
        store.catch_up()
        table = store.table
        if store.record.uid != uid or table is None or table.ring.inserts or table.ring.num_reserved:
            raise StoreExistsError(name=name, reason="rows were written to it, or it was created again")
        await self.delete(name)

    async def delete(self, name: str, record: Record | None = None, *, uid: str = "") -> None:
        """Deletes a store, even a damaged one; the user's folder of an adopted store stays.

        Args:
            record: Opens the transaction that commits the deletion together with the answer.
            uid: Its incarnation; "" for any.

        Raises:
            StoreNotFoundError: There is none, or another incarnation.
        """
        open_transaction = self._stores.db.begin_transaction if record is None else partial(record, control_pb2.Done())
        begin = partial(open_transaction, uses_reserve=True)
        known = self._stores.catalog.find(check_store_name(name))
        if known is not None and known.packed and uid in ("", known.uid):
            self._stores.delete_packed(known, begin)
            return
        await self._stores.open_apart(name)
        known = self._stores.catalog.find(name)
        if known is None or uid not in ("", known.uid):
            raise StoreNotFoundError(name=name)
        try:
            store = self._stores.get(name)
        except CorruptDataError:
            store = self._stores.open_damaged(name)
        await self._stores.delete(store, begin)
        wake_followers(self._stores, store.name)

    async def abandon(self, session: int) -> None:
        """Deletes the stores that a session, which has ended, has not finished filling."""
        for store in self._stores.loading.list_of(session):
            await self._stores.delete(store)


def find_or_refuse(stores: Stores, wanted: StoreRecord, spec: Spec, *, exists_ok: bool) -> OpenedStore | None:
    """Returns the existing store if the caller accepts it; None if the name is free.

    Args:
        spec: Requested structure; of one row for a replay table.

    Raises:
        StoreExistsError: The store exists, and ``exists_ok`` is false or the error has the difference.
    """
    store = stores.find(wanted.name)
    if store is None:
        return None
    if not exists_ok:
        raise StoreExistsError(name=wanted.name)
    reason = explain_difference(store.record, wanted) or explain_structure(store, wanted, spec)
    if reason is not None:
        raise StoreExistsError(name=wanted.name, reason=reason)
    return store


def explain_structure(store: OpenedStore, wanted: StoreRecord, spec: Spec) -> str | None:
    """Returns how the structure of a store differs from the requested one; None if it does not."""
    if KINDS[wanted.kind].has_versions or store.record.fingerprint == wanted.fingerprint:
        return None
    named = _drop_added_leaves(store, spec)
    return None if named.fingerprint == spec.fingerprint else describe_difference(named.root, spec.root)


def _drop_added_leaves(store: OpenedStore, wanted: Spec) -> Spec:
    """Returns the structure of a store, or of a row of a table, without leaves that came later and that a caller does
    not name: a program that has created the table finds it again."""
    spec = store.row_spec or store.spec
    unnamed = set(store.record.added_leaves).difference(wanted.leaf_paths)
    return spec.select([path for path in spec.leaf_paths if path not in unnamed]) if unnamed else spec
