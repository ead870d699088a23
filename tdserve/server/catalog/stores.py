"""The stores of a root: created, found, waited for and deleted; kept in the catalog on disk and restored from it.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CorruptDataError,
    StoreNotFoundError,
    TDServeError,
)
from tdserve.base.failpoints import reach
from tdserve.base.ids import check_store_name
from tdserve.rules.catalog import Catalog, StoreRecord
from tdserve.rules.weights import Versions
from tdserve.server.catalog.deleted_memory import DeletedMemory
from tdserve.server.catalog.former_versions import FormerVersions
from tdserve.server.catalog.later_records import check_folder
from tdserve.server.catalog.loading_stores import LoadingStores
from tdserve.server.catalog.opened_stores import OpenedStores
from tdserve.server.catalog.opening import LongOpening, begin_opening, open_new
from tdserve.server.catalog.packed_stores import PackedStores
from tdserve.server.catalog.removed_stores import RemovedStores
from tdserve.server.catalog.seals import SealedStores
from tdserve.server.catalog.store_waiters import StoreWaiters
from tdserve.server.execution.garbage import Garbage
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.kinds.policies import end_following
from tdserve.server.kinds.row_files import list_dotted
from tdserve.server.kinds.weights_kind import load_versions
from tdserve.server.mutations.unfinished_writes import UnfinishedWrites
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import Specs, make_keys
from tdserve.server.processes.workers import DataWorker, drop_store
from tdserve.server.recovery.departure_records import make_departure_key
from tdserve.server.recovery.draw_records import forget_draw_records
from tdserve.server.recovery.process_watch import ProcessWatch
from tdserve.server.recovery.redo_log import RedoEntry
from tdserve.store.database.catalog_db import CatalogDB, Transaction
from tdserve.store.roots.root import Root
from tdserve.store.rows.adopted import Adopted
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.rows.leaf_folders import find_extra_paths
from tdserve.structure.trees.tree import Node, Spec

_log = logging.getLogger("tdserve.server")

MAX_FREED_LATER_BYTES = 1 << 20
"""Size up to which the deletion of a store is answered before its files are gone, which takes milliseconds."""


class Stores:
    """All stores of a root.

    Args:
        root: The acquired root.
        db: Its catalog.
        process_watch: Finds out which local writers may still write.
        workers: Data workers, which release deleted stores.

    Attributes:
        packed: Stores that were never used.
        opened: Stores that are open.
        loading: Stores that sessions fill for the first time.
        former: The last versions of those that were deleted.
        seals: Which of them serve no request, because they move to another server.
        followers: By name of a weights store: names of the tables that follow its versions and have been used.
    """

    def __init__(self, root: Root, db: CatalogDB, process_watch: ProcessWatch, workers: Sequence[DataWorker]) -> None:
        self.process_watch = process_watch
        self.unfinished_writes = UnfinishedWrites(db, process_watch)
        self.root = root
        self.db = db
        self.catalog = Catalog()
        self.specs = Specs(db, self._iter_specs_in_use)
        self.former = FormerVersions(db)
        self.packed = PackedStores(root, db, self.specs, self.former)
        self._removed = RemovedStores(root, db, self.catalog)
        self.seals = SealedStores(self.catalog)
        self._waiters = StoreWaiters()
        self.followers: dict[str, set[str]] = {}
        self._workers = workers
        self._garbage = Garbage()
        self._memory = DeletedMemory()
        self._freeing: set[asyncio.Task[None]] = set()
        self._opening: dict[str, LongOpening] = {}  # stores that a thread is opening
        self.opened = OpenedStores()
        self.loading = LoadingStores(self.opened)

    def restore(self) -> None:
        """Reads the catalog, and removes stores that never became visible. Files are opened when a store is first used.

        Raises:
            CorruptDataError: The catalog has no stores, but the root contains some.
        """
        if not self.db.count_records("stores"):
            self.root.check_empty("a catalog without stores")
        for _, content in self.db.scan("stores"):
            record = StoreRecord.from_bytes(content)
            if record.loading:
                self._removed.restore(record)
            else:
                self.catalog.add(record)
        self.packed.restore(self.catalog)
        self.root.empty_trash()
        self._garbage.settle()
        for redo in RedoEntry.load(self.db):
            if self._repair(redo) and redo.is_long:
                redo.forget(self.db)

    def find(self, name: str) -> OpenedStore | None:
        """Returns the visible store of this name, opened; None if there is none.

        Raises:
            CorruptDataError: Its files are damaged; other stores are not affected.
        """
        store = self.opened.get(name)
        if store is None and name in self.catalog:
            check_folder(self.root.store_folder(name), self.catalog.get(name), self.db)
            opening, record = self._opening.pop(name, None), self._unpack(self.catalog.get(name))
            is_open = opening is not None and opening.record.uid == record.uid
            store = opening.get_store() if is_open and opening else KINDS[record.kind].open(record, self, checks=True)
            self.opened.put(store)
            self._garbage.note_store(len(self.catalog))
        return None if store is None or store.record.loading else store

    def _unpack(self, record: StoreRecord) -> StoreRecord:
        if record.packed:
            record = self.packed.unpack(record)
            self.catalog.replace(record)
        return record

    def is_long_to_open(self, name: str) -> bool:
        """Returns whether ``open_apart`` has something to do, so that ``find`` takes no time afterwards."""
        record = None if name in self.opened else self.catalog.find(name)
        return record is not None and KINDS[record.kind].is_long_to_open(record)

    async def open_apart(self, name: str) -> None:
        """Opens a table of very many rows in a thread, if it is not open.

        Callers that come in the meantime wait for the same thread. If the table is damaged, ``find`` raises the error.
        """
        if not self.is_long_to_open(name):
            return
        record, opening = self.catalog.get(name), self._opening.get(name)
        if opening is None or opening.record.uid != record.uid:
            with suppress(TDServeError):
                opening = self._opening[name] = begin_opening(record, self)
        if opening is not None:
            await opening.wait()

    def find_if_open(self, name: str) -> OpenedStore | None:
        """Returns the store of this name if it is open now, visible or not. That counts as a use, other than
        ``opened.peek``."""
        return self.opened.get(name)

    def find_uid(self, uid: str) -> OpenedStore | None:
        """Returns the visible store of this incarnation."""
        name = self.catalog.find_name(uid)
        return None if name is None else self.find(name)

    def get(self, name: str) -> OpenedStore:
        """Returns the store of this name. Raises StoreNotFoundError."""
        store = self.find(name)
        if store is None:
            raise StoreNotFoundError(name=name)
        return store

    def open_damaged(self, name: str) -> OpenedStore:
        """Returns a store that cannot be opened, for deletion; its readers see that it is deleted, if that is
        possible."""
        record, folder, generations = self.catalog.get(name), self.root.store_folder(name), None
        with suppress(TDServeError):
            generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
        return OpenedStore(record, Spec(Node((), None, None, None, ())), folder, generations=generations)

    def find_unpublished(self, name: str) -> OpenedStore | None:
        """Returns the weights store of this name that is invisible before its first version; None if there is none."""
        store = self.opened.get(name)
        return store if store is not None and store.record.loading and store.versions is not None else None

    async def wait(self, name: str, deadline: Deadline) -> OpenedStore:
        """Returns the store of this name; waits until it exists.

        Raises:
            StoreNotFoundError: It does not exist, and the timeout is 0.
            StoreNotCreatedError: It was not created in time.
        """
        check_store_name(name)
        await self.open_apart(name)
        return await self._waiters.wait_created(name, partial(self.find, name), deadline)

    async def wait_visible(self, name: str, deadline: Deadline) -> StoreRecord:
        """Returns the record of the store of this name without opening it; waits and raises as ``wait`` does."""
        return await self._waiters.wait_created(check_store_name(name), partial(self.catalog.find, name), deadline)

    async def wait_settled(self, name: str, deadline: Deadline) -> None:
        """Waits while a store of this name is being created or filled; afterwards it exists, or the name is free."""

        def is_settled() -> bool | None:
            return name in self.catalog or not self.catalog.is_taken(name) or None

        await self._waiters.wait_for(name, is_settled, deadline)

    async def create(
        self,
        record: StoreRecord,
        spec: Spec,
        *,
        owner_session: int = 0,
        adopted: Adopted | None = None,
        check: Callable[[], object] = lambda: None,
        begin: Callable[[OpenedStore], AbstractContextManager[Transaction]] | None = None,
    ) -> OpenedStore:
        """Creates a store's files and, unless it is ``loading``, makes it visible.

        Args:
            record: Record of the store; its uid and created_s are set here.
            spec: Structure as stored, rows included, for tensordict; of one row for replay; any for weights.
            owner_session: With ``loading``: the session that fills it; the store is deleted if the session ends first.
            adopted: Folder that has its tensors; None if it has files of its own.
            check: Called right before the name is taken, with no wait between; raises if the store must not be.
            begin: Opens the transaction that commits the store.

        Raises:
            StoreExistsError: The name is taken. Nothing was created.
            InvalidSpecError, CapacityError: Nothing stays behind.
        """
        await self.seals.wait_for_creation()
        name, kind = check_store_name(record.name), KINDS[record.kind]
        stored = kind.make_stored_spec(record, spec)
        hidden = record.begin_incarnation(stored.nbytes, former_version=self.former.find(name), loading=True)
        check()
        self.catalog.add(hidden)  # reserves the name
        if record.loading:
            self.loading.add(name, owner_session)
        folder = self.root.store_folder(hidden.name)
        try:
            self.db.put("stores", name.encode(), hidden.to_bytes())  # so a crash leaves no unknown folder
            reach("creation.begun")
            extra = await kind.make_files(folder, stored, hidden, adopted)
            order = self.specs.learn(spec)
            final = replace(hidden, extra=tuple(extra), loading=record.loading, order=order)
            store = await open_new(final, self)
            reach("creation.filled")
            with self.db.begin_transaction() if begin is None else begin(store) as txn:
                txn.put("stores", name.encode(), final.to_bytes())
            reach("creation.recorded")
            self.opened.put(store)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            self.db.delete("stores", name.encode())
            self.loading.discard(name, owner_session)
            self.catalog.remove(name)  # last: the next store of this name uses the same folder
            self._waiters.wake(name)
            raise
        self._garbage.note_store(len(self.catalog))
        store.owner_session = owner_session
        if not record.loading:
            self._show(store)
        return store

    def make_packed(self, record: StoreRecord, spec: Spec) -> StoreRecord:
        """Returns the record of a new store whose files are made when it is first used; ``pack`` creates it.

        Args:
            record: As for ``create``, of a tensordict store or a table.
            spec: As for ``create``.

        Raises:
            StoreExistsError: The name is taken.
        """
        self.catalog.check_free(record.name)
        stored = KINDS[record.kind].make_stored_spec(record, spec)
        order, extra = self.specs.learn(spec), tuple(list_dotted(find_extra_paths(stored)))
        begun = record.begin_incarnation(stored.nbytes, former_version=self.former.find(record.name))
        return replace(begun, packed=True, order=order, extra=extra)

    def pack(self, record: StoreRecord, content: bytes | None, txn: Transaction) -> None:
        """Creates a store without files as part of a transaction; ``content`` as for ``PackedStores.put``."""
        self.packed.put(record, content, txn)

        def show() -> None:
            reach("creation.packed")
            self.catalog.add(record)
            self.announce(record.name)

        txn.show(show)

    def publish_loaded(self, store: OpenedStore, txn: Transaction) -> None:
        """Makes a loading store visible as part of the transaction that commits its first content."""
        record = replace(store.record, loading=False)
        txn.put("stores", store.name.encode(), record.to_bytes())

        def show() -> None:
            store.record = record
            self.loading.discard(store.name, store.owner_session)
            store.owner_session = 0
            self._show(store)

        txn.show(show)

    async def delete(
        self, store: OpenedStore, begin: Callable[[], AbstractContextManager[Transaction]] | None = None
    ) -> None:
        """Deletes a store and frees its space, that of a small one a little later; readers under way keep what they
        have mapped.

        Does nothing if the store is already deleted, even if another one has its name now.

        Args:
            begin: Opens the transaction that commits the deletion.

        Raises:
            CapacityError: Not even the reserve of the catalog has room for that. Nothing was changed.
            StoreMovedError: It is sealed, or is elsewhere now. Nothing was changed.
        """
        if store.waiters.is_deleted:
            return
        store.check_present()
        if store.table is not None:
            store.table.state.take_back_claims()
        with self.db.begin_transaction(uses_reserve=True) if begin is None else begin() as txn:
            self.former.note(store.name, KINDS[store.record.kind].find_last_version(store, self.db), txn)
            self._decide_removal(store.record, txn)
        reach("deletion.recorded")
        end_following(self, store)
        is_small = store.versions is None and store.count_bytes() <= MAX_FREED_LATER_BYTES
        self.opened.pop(store.name)
        self.loading.discard(store.name, store.owner_session)
        if store.generations is not None:
            store.generations.mark_deleted()
        self._removed.remove(store.record)
        reach("deletion.moved")
        store.waiters.delete(store.name)
        self._waiters.wake(store.name)
        self._garbage.note_deletion()
        freeing = asyncio.create_task(self._free_deleted(store.record))
        self._freeing.add(freeing)
        freeing.add_done_callback(self._freeing.discard)
        if not is_small:
            await freeing
        self._memory.release(store, store.generations, store.table)

    async def _free_deleted(self, record: StoreRecord) -> None:
        await self._removed.finish(record)
        self._waiters.wake(record.name)
        await self.free(record.uid)

    async def free(self, uid: str) -> None:
        """Frees the space of a deleted store."""
        await asyncio.to_thread(self.root.empty_trash, uid)
        await drop_store(self._workers, uid)

    def delete_packed(self, record: StoreRecord, begin: Callable[[], AbstractContextManager[Transaction]]) -> None:
        """Deletes a store that has no files. Arguments and errors as in ``delete``."""
        with begin() as txn:
            self.packed.delete(record, txn)
            txn.show(lambda: self.catalog.remove(record.name))
        self._waiters.wake(record.name)

    def discard(self, record: StoreRecord) -> None:
        """Deletes, at once, a store that was never visible and holds next to nothing."""
        with self.db.begin_transaction(uses_reserve=True) as txn:
            self._decide_removal(record, txn)
        store = self.opened.pop(record.name)
        if store is not None:
            self.loading.discard(store.name, store.owner_session)
        self._removed.remove(record)
        self._removed.finish_now(record)
        self.root.empty_trash(record.uid)
        self._waiters.wake(record.name)

    def save_state(self, store: OpenedStore, txn: Transaction, state: object) -> None:
        """Saves what a store's rules need after a restart: counters and cursor, or versions."""
        txn.put("states", store.record.uid.encode(), json.dumps(state).encode())

    def announce(self, name: str) -> None:
        """Counts a store that has become visible, and wakes those that wait for it."""
        self._garbage.note_store(len(self.catalog))
        self._waiters.wake(name)

    def _iter_specs_in_use(self) -> Iterator[bytes]:
        """Yields the keys of the structures that stores and versions have."""
        for known in self.catalog:
            # The record of an open store that is being created is newer than the catalog's.
            store = self.opened.get(known.name)
            for record in {known, known if store is None else store.record}:
                yield from make_keys(record.fingerprint, record.order)
                if KINDS[record.kind].has_versions:
                    for fingerprint, order in self.get_versions(record).structures:
                        yield from make_keys(fingerprint, order)

    def get_versions(self, record: StoreRecord) -> Versions:
        """Returns the versions of a weights store, opened or not."""
        store = self.opened.get(record.name)
        if store is not None and store.versions is not None:
            return store.versions
        return load_versions(self.db, record)

    def _show(self, store: OpenedStore) -> None:
        self.catalog.replace(store.record)
        self._waiters.wake(store.name)

    def _repair(self, redo: RedoEntry) -> bool:
        """Completes the last commit before a crash; returns whether nothing is left to do."""
        try:
            store = self.find_uid(redo.uid)
        except CorruptDataError as error:  # reported again when the store is requested
            _log.error("the last commit before the crash cannot be looked at: %s", error)
            return False
        if store is not None and store.generations is not None and redo.repair(store.generations.values):
            _log.warning("store %r: the last commit before the crash was completed", store.name)
            self.opened.retire(store.name)  # its rules were restored from the old generations
        return True

    def _decide_removal(self, record: StoreRecord, txn: Transaction) -> None:
        """Records a store as never visible, so that it is removed even if a crash follows."""
        txn.put("stores", record.name.encode(), replace(record, loading=True).to_bytes())
        self.forget_rules(record, txn)

    def forget_rules(self, record: StoreRecord, txn: Transaction) -> None:
        """Deletes all that is on record of a store's rules and of its unfinished writes."""
        txn.delete("states", record.uid.encode())
        txn.delete("packed", record.uid.encode())
        self.unfinished_writes.forget(record.uid, txn)
        forget_draw_records(self.db, record.uid, txn)
        txn.delete("pending", make_departure_key(record.uid))

    def give_way(self, record: StoreRecord) -> None:
        """Removes a store in whose place another one, or the record of where it is now, has just been recorded. Its
        space is not free before ``free``."""
        store = self.opened.retire(record.name)
        if store is not None and store.generations is not None:
            store.generations.mark_deleted()
        self._removed.move_away(record)  # else what comes in its place fails, or has no files, until the next start
        self.catalog.remove(record.name)
