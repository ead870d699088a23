"""Stores that leave for another server: their files are read, they are sealed, and released once they are there.

``server/README.md`` has a reading order of moves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    NotSupportedError,
    StoreNotFoundError,
    WrongStateError,
)
from tdserve.base.failpoints import reach
from tdserve.rules.placement import PlacementRecord
from tdserve.server.catalog.seals import Seal
from tdserve.server.catalog.stores import Stores
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.kinds.placement_kind import find_forward, make_placement
from tdserve.server.kv.keyed_entries import KeyedEntries
from tdserve.server.moves.file_lists import FileLists
from tdserve.server.moves.sealing import Sealing
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.weights.relays import Relays
from tdserve.store.roots import moved_files
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2

MAX_CONTENT_BYTES = 1 << 20
"""Most bytes of one answer: the event loop handles it at once."""


class LeavingStores:
    """The stores of a server that leave it.

    Args:
        stores: All stores of the server.
        entries: Keeps the answers to changes of keyed stores.
        relays: Pass on versions of weights.
    """

    def __init__(self, stores: Stores, entries: KeyedEntries, relays: Relays) -> None:
        self._stores = stores
        self._relays = relays
        self._entries = entries
        self._sealing = Sealing(stores)
        self._lists = FileLists()

    def restore(self) -> None:
        """Removes what a crash has left of stores that have moved."""
        root = self._stores.root
        for record in self._stores.catalog:
            if record.packed and find_forward(record) is not None and root.store_folder(record.name).exists():
                root.move_to_trash(record.name, record.uid)
                root.empty_trash(record.uid)

    def find(self, name: str, uid: str = "") -> OpenedStore:
        """Returns a store that may move.

        Args:
            uid: Its incarnation; "" for any.

        Raises:
            StoreNotFoundError: There is none, or another incarnation.
            WrongStateError: It has moved.
            NotSupportedError: It cannot move, for the reason given.
        """
        record = self._stores.catalog.get(name)
        if find_forward(record) is not None:
            raise WrongStateError(state=f"store {name!r} has moved meanwhile", event="moving it from here")
        store = self._stores.get(name)
        if uid not in ("", store.record.uid):
            raise StoreNotFoundError(name=name)
        reason = KINDS[store.record.kind].find_obstacle(store.record)
        if reason:
            raise NotSupportedError(feature=f"moving store {name!r} to another server", reason=reason)
        return store

    async def list_files(self, store: OpenedStore, by: Seal) -> control_pb2.FileSizes:
        """Returns the files that move, and which of their blocks may have changed since the list before of this
        move."""
        return await self._lists.list_files(store, by)

    async def seal(self, store: OpenedStore, seal: Seal, deadline: Deadline) -> control_pb2.MoveAnswer:
        """Seals a store against all use, waits for what is under way, and returns all that the other server needs.

        The store serves again after ``unseal``, or when the session ends.

        Raises:
            StoreMovedError: Another move has sealed it.
            DeadlineExceededError: A client is still writing, or was stopped while it did. The store serves again.
            StoreNotFoundError: A request that had begun before has deleted it.
        """
        self._sealing.begin(store, seal)
        try:
            store = await self._sealing.wait_at_rest(store, seal, deadline)
            reach("move.sealed")
            if store.keyed is not None:
                self._entries.record_answers(store)
            files = await self._lists.list_files(store, seal, is_at_rest=True)
            return control_pb2.MoveAnswer(uid=store.record.uid, files=files, store=describe_store(self._stores, store))
        except BaseException:
            self.unseal(store.name, seal)
            raise

    def unseal(self, name: str, seal: Seal) -> None:
        """Lets a store serve again. Does nothing unless this very move has sealed it."""
        self._lists.forget(seal, name)
        self._sealing.end(name, seal)

    def on_session_ended(self, session: int) -> None:
        """Lets the stores serve again that a session had sealed, and forgets what it has listed."""
        self._lists.forget_session(session)
        self._sealing.end_all(session)

    async def release(self, name: str, uid: str, seal: Seal, server: int) -> None:
        """Leaves a sealed store to another server, which has all of it; only a record of where it is stays here.

        Raises:
            WrongStateError: This move has not sealed it (any more). Nothing was changed.
        """
        record = self._stores.catalog.get(name)
        forward = find_forward(record)
        if forward is not None and forward.move == seal.operation:
            return  # a retry
        if record.uid != uid or self._stores.seals.find(name) != seal:
            raise WrongStateError(state=f"store {name!r} was not sealed by this move", event="releasing it")
        store = self._stores.get(name)
        self._lists.forget(seal, name)
        await self._hand_over(store, PlacementRecord.make_forward(server, seal.operation))

    async def _hand_over(self, store: OpenedStore, forward: PlacementRecord) -> None:
        """Replaces a store by the record of where it is now."""
        stores = self._stores
        record, spec = make_placement(store.name, forward)
        last = KINDS[store.record.kind].find_last_version(store, stores.db)
        begun = record.begin_incarnation(0, former_version=last)
        packed = replace(begun, packed=True, order=stores.specs.learn(spec))
        with stores.db.begin_transaction(uses_reserve=True) as txn:
            stores.former.note(store.name, last, txn)
            stores.forget_rules(store.record, txn)
            stores.packed.put(packed, None, txn)
        reach("move.released")
        # In the same turn: the end of the session would let the store serve again.
        stores.seals.unseal(store.name)
        stores.give_way(store.record)
        self._relays.forget_deleted(store)
        stores.catalog.add(packed)
        await asyncio.to_thread(stores.db.sync)  # before the content goes
        await stores.free(store.record.uid)


async def read_blocks(folder: Path, asked: Iterable[control_pb2.FileBlock]) -> control_pb2.FileBlocks:
    """Returns the digests of the first of some blocks, and the content of those that have changed."""
    wanted = [moved_files.Block(each.path, each.offset, each.nbytes, each.digest) for each in asked]
    found = await asyncio.to_thread(moved_files.read_blocks, folder, wanted, max_bytes=MAX_CONTENT_BYTES)
    blocks = control_pb2.FileBlocks()
    for digest, content in found:
        blocks.blocks.add(digest=digest, content=content)
    return blocks


def describe_store(stores: Stores, store: OpenedStore) -> control_pb2.MovedStore:
    """Returns what is on record of a store at rest."""
    record, kind = store.record, KINDS[store.record.kind]
    state = kind.get_state(store)
    moved = control_pb2.MovedStore(record=record.to_bytes(), state=json.dumps(state).encode() if state else b"")
    named = {(record.fingerprint, record.order)} if record.fingerprint else set()
    for fingerprint, order in sorted(named | (store.versions.structures if store.versions else set())):
        moved.specs.append(codec.encode(stores.specs.get(fingerprint, order)))
        moved.orders.append(order)
    if store.table is None:  # a table gives such rows up
        moved.lost.extend(overwrite.moved for overwrite in store.lost.overwrites)
    moved.draws.extend(draw for _, draw in stores.db.scan("draws", record.uid.encode()))
    return moved
