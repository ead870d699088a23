"""The book of stores: created, found, waited for, deleted; kept in the catalog on disk and restored from it."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path as FilePath

from tdserve.catalog import DEFAULT_MAX_OBJECT_BYTES, Catalog, StoreRecord, matches
from tdserve.content import POLICY_VERSION_KEY, RESERVED_KEYS
from tdserve.deadline import Deadline
from tdserve.errors import CorruptDataError, InvalidSpecError, StoreExistsError, StoreNotFoundError, TDServeError
from tdserve.ids import check_store_name, new_uid
from tdserve.replay.settings import Settings
from tdserve.replay.table import Table
from tdserve.server.entry import Entry
from tdserve.server.recovery.claim_records import unfilled_claims
from tdserve.server.recovery.departures import Departures
from tdserve.server.recovery.redo import Redo
from tdserve.server.specs import Specs, keys_of
from tdserve.server.unfinished import Unfinished
from tdserve.server.waiting import Waiters
from tdserve.server.workers import DataWorker, drop_store
from tdserve.spec.tree import Node, Spec
from tdserve.store import rows as row_files
from tdserve.store.adopted import Adopted, check_adopted
from tdserve.store.catalog_db import CatalogDB, Transaction
from tdserve.store.generations import FILE_NAME as GENERATION_FILE
from tdserve.store.generations import Generations
from tdserve.store.root import Root
from tdserve.store.row_columns import open_column
from tdserve.store.version_names import tidy
from tdserve.weights import Versions

_log = logging.getLogger("tdserve.server")


class Stores:
    """All stores of a root.

    Args:
        root: The acquired root.
        db: Its catalog.
        departures: Tells which local writers may still write.
        workers: Let go of what is deleted.

    Attributes:
        followers: By name of a weights store: tables whose rows are made by its versions, those that were used.
    """

    def __init__(self, root: Root, db: CatalogDB, departures: Departures, workers: Sequence[DataWorker]) -> None:
        self.departures = departures
        self.unfinished = Unfinished(db, departures)
        self.root = root
        self.db = db
        self.catalog = Catalog()
        self.specs = Specs(db, self._specs_in_use)
        self.changed = Waiters()
        self.followers: dict[str, set[str]] = {}
        self._workers = workers
        self._entries: dict[str, Entry] = {}

    def restore(self) -> None:
        """Reads the catalog; files are opened when a store is first used. Stores that never became visible are
        removed."""
        for key, content in self.db.scan("stores"):
            record = StoreRecord.from_bytes(content)
            # Of weights, a local client may still be writing the first version: whoever publishes next must know that.
            if record.loading and not (record.kind == "weights" and self.db.get("states", record.uid.encode())):
                self.root.move_to_trash(record.name, record.uid)
                self.db.delete("stores", key)
            else:
                self.catalog.add(record)
        self.root.empty_trash("*")
        redo = Redo.load(self.db)
        if redo is not None:
            self._repair(redo)

    def find(self, name: str) -> Entry | None:
        """The store of this name, opened; None when there is none.

        Raises:
            CorruptDataError: Its files are damaged; the other stores go on.
        """
        entry = self._entries.get(name)
        if entry is None and name in self.catalog:
            entry = self._entries[name] = self._open(self.catalog.get(name), checks=True)
        return None if entry is None or entry.record.loading else entry

    def opened(self) -> Iterator[Entry]:
        """The stores that somebody has used since the start."""
        return iter(list(self._entries.values()))

    def find_uid(self, uid: str) -> Entry | None:
        """The visible store of this incarnation."""
        name = next((record.name for record in self.catalog if record.uid == uid), None)
        return None if name is None else self.find(name)

    def get(self, name: str) -> Entry:
        """The store of this name. Raises StoreNotFoundError."""
        entry = self.find(name)
        if entry is None:
            raise StoreNotFoundError(name=name)
        return entry

    def damaged(self, name: str) -> Entry:
        """A store that cannot be opened, for being deleted; whoever has it open is told where that is possible."""
        record = self.catalog.get(name)
        folder, generations = self._folder(record), None
        with suppress(TDServeError):
            generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
        return Entry(record, Spec(Node((), None, None, None, ())), folder, generations=generations)

    def get_loading(self, name: str, session: int) -> Entry:
        """A store that this session is still filling for the first time."""
        entry = self._entries.get(name)
        if entry is None or not entry.record.loading or entry.owner_session != session:
            raise StoreNotFoundError(name=name)
        return entry

    def find_unpublished(self, name: str) -> Entry | None:
        """The weights store of this name that nobody sees before its first version; None when there is none."""
        if name not in self._entries and self.catalog.is_taken(name):
            record = self.catalog.get(name, with_loading=True)
            # Without a state it is not one of before a restart, but one whose making has just failed.
            if record.kind == "weights" and self.db.get("states", record.uid.encode()):
                self._entries[name] = self._open(record)
        entry = self._entries.get(name)
        return entry if entry is not None and entry.record.loading and entry.versions is not None else None

    def is_loading(self, name: str, session: int, spec: Spec) -> bool:
        """Whether this session has begun just such a store under this name."""
        return any(
            entry.name == name and entry.spec.fingerprint == spec.fingerprint for entry in self.loading_of(session)
        )

    async def wait(self, name: str, deadline: Deadline) -> Entry:
        """The store of this name, waited for if it does not exist yet.

        Raises:
            StoreNotFoundError: The caller did not want to wait.
            DeadlineExceededError: It did not come in time.
        """
        check_store_name(name)
        if deadline.timeout_s == 0:
            return self.get(name)
        return await self.changed.wait_for(lambda: self.find(name), deadline, lambda: f"the making of store {name!r}")

    async def wait_settled(self, name: str, deadline: Deadline) -> None:
        """Waits while a store of this name is being made or filled; then it is there, or the name is free again."""
        await self.changed.wait_for(
            lambda: True if name in self.catalog or not self.catalog.is_taken(name) else None,
            deadline,
            lambda: f"the creation of store {name!r}",
        )

    async def create(
        self, record: StoreRecord, spec: Spec, *, owner_session: int = 0, adopted: Adopted | None = None
    ) -> Entry:
        """Makes a store's files and, unless it is ``loading``, shows it to everybody.

        Args:
            record: uid and created_s are set here.
            spec: As stored for tensordict (rows included); of one row for a replay; anything for weights.
            owner_session: With ``loading``: the session that fills it, and with which it goes.
            adopted: Where its tensors lie, if not in files of its own.

        Raises:
            StoreExistsError: The name is taken. Nothing was created.
            InvalidSpecError, CapacityError: Nothing stays behind.
        """
        name = check_store_name(record.name)
        stored = stored_spec(record, spec)
        created = time.time()
        hidden = replace(
            record,
            uid=new_uid(),
            created_s=created,
            nbytes=stored.nbytes,
            loading=True,
            max_object_bytes=record.max_object_bytes or DEFAULT_MAX_OBJECT_BYTES,
        )
        self.catalog.add(hidden)  # takes the name
        folder = self._folder(hidden)
        try:
            self.db.put("stores", name.encode(), hidden.to_bytes())  # a crash leaves no folder that nobody knows
            if record.kind == "weights":
                (folder / "versions").mkdir(parents=True)
                extra: list[str] = []
            else:
                extra = await asyncio.to_thread(_make_files, folder, stored, hidden, adopted)
            order = self.specs.learn(spec)
            final = replace(hidden, extra=tuple(extra), loading=record.loading, order=order)
            self.db.put("stores", name.encode(), final.to_bytes())
            entry = self._entries[name] = self._open(final)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            self.db.delete("stores", name.encode())
            self.catalog.remove(name)  # last: whoever takes the name next uses the same folder
            self.changed.wake()
            raise
        entry.owner_session = owner_session
        if not record.loading:
            self._show(entry)
        return entry

    def publish_loaded(self, entry: Entry, txn: Transaction) -> None:
        """Makes a loading store visible, as part of the transaction that commits its first content."""
        entry.record = replace(entry.record, loading=False)
        entry.owner_session = 0
        txn.put("stores", entry.name.encode(), entry.record.to_bytes())
        self._show(entry)

    async def delete(self, entry: Entry) -> None:
        """Removes a store, and frees its space; readers under way end with what they have mapped."""
        if entry.table is not None:
            entry.table.take_back_claims()
            followers = self.followers.get(entry.table.settings.policy, set())
            followers.discard(entry.name)
            if not followers:
                self.followers.pop(entry.table.settings.policy, None)
        self._entries.pop(entry.name, None)
        if entry.generations is not None:
            entry.generations.mark_deleted()
        self._remove(entry.record)
        entry.changed.delete(entry.name)
        self.changed.wake()
        await asyncio.to_thread(self.root.empty_trash, entry.record.uid)
        await drop_store(self._workers, entry.record.uid)

    def discard(self, record: StoreRecord) -> None:
        """Removes, at once, a store that nobody has seen and that holds next to nothing."""
        self._entries.pop(record.name, None)
        self._remove(record)
        self.root.empty_trash(record.uid)
        self.changed.wake()

    def loading_of(self, session: int) -> list[Entry]:
        """Stores that this session has begun and not finished."""
        return [entry for entry in self._entries.values() if entry.record.loading and entry.owner_session == session]

    def existing_or_refuse(self, name: str, wanted: StoreRecord, *, exists_ok: bool) -> Entry | None:
        """The existing store if the caller accepts it; None when the name is free.

        Raises:
            StoreExistsError: It exists, and may not or does not fit.
        """
        entry = self.find(name)
        if entry is None:
            return None
        if not exists_ok:
            raise StoreExistsError(name=name)
        reason = matches(entry.record, wanted)
        if reason is not None:
            raise StoreExistsError(name=name, reason=reason)
        return entry

    def save_state(self, entry: Entry, txn: Transaction, state: object) -> None:
        """Writes what a store's rules need after a restart: counters and cursor, or versions."""
        txn.put("states", entry.record.uid.encode(), json.dumps(state).encode())

    def _specs_in_use(self) -> set[bytes]:
        """Keys of the structures that stores and versions have."""
        found: set[bytes] = set()
        # What an entry knows of a store that is being made is newer than the catalog's record.
        for record in (*self.catalog, *(entry.record for entry in self._entries.values())):
            found.update(keys_of(record.fingerprint, record.order))
            if record.kind == "weights":
                for fingerprint, order in self._versions_of(record).structures:
                    found.update(keys_of(fingerprint, order))
        return found

    def _versions_of(self, record: StoreRecord) -> Versions:
        entry = self._entries.get(record.name)
        if entry is not None and entry.versions is not None:
            return entry.versions
        state = self.db.get("states", record.uid.encode())
        return Versions.restore(json.loads(state)) if state else Versions()

    def _show(self, entry: Entry) -> None:
        self.catalog.replace(entry.record)
        self.changed.wake()

    def _repair(self, redo: Redo) -> None:
        try:
            entry = self.find_uid(redo.uid)
        except CorruptDataError as error:  # found again, and told, when somebody asks for this store
            _log.error("the last commit before the crash cannot be looked at: %s", error)
            return
        if entry is not None and entry.generations is not None and redo.repair(entry.generations.values):
            _log.warning("store %r: the last commit before the crash was completed", entry.name)
            del self._entries[entry.name]  # its rules looked at the generations before

    def _folder(self, record: StoreRecord) -> FilePath:
        return self.root.store_folder(record.name)

    def _open(self, record: StoreRecord, *, checks: bool = False) -> Entry:
        """``checks``: whether the user's folder of an adopted store is looked at too."""
        folder = self._folder(record)
        state_bytes = self.db.get("states", record.uid.encode())
        state = json.loads(state_bytes) if state_bytes else None
        if record.kind == "weights":
            versions = Versions() if state is None else Versions.restore(state)
            kept = {version.version for version in versions.kept}
            tidy(folder / "versions", kept=kept, free=set(versions.files) - kept)
            newest = versions.newest
            named = record if newest is None else newest
            spec = self.specs.get(named.fingerprint, named.order)
            return Entry(record, spec, folder, versions=versions)
        spec = self.specs.get(record.fingerprint, record.order)
        if record.adopted and checks:
            check_adopted(folder, spec)
        generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
        if record.kind == "tensordict":
            entry = Entry(record, spec, folder, generations=generations)
            self.unfinished.restore(entry)
            return entry
        stored = stored_spec(record, spec)
        reserved = self.unfinished.reserved(record.uid)
        claimed = unfilled_claims(self.db, folder, record, generations.values)
        table = Table.restore(
            record.name,
            generations.values[:-1],
            Settings.from_json((state or {}).get("settings", record.settings)),
            state or {},
            now_reserved=[*(rows.rows for rows in reserved), *(rows for _, several in claimed for rows in several)],
            held=self.unfinished.overwritten(record.uid, stored),
            make_column=partial(open_column, folder),
            num_keys=len(spec.tensors) + len(spec.values),
        )
        entry = Entry(record, stored, folder, row_spec=spec, generations=generations, table=table)
        entry.group_keys.extend(tuple(path) for path in (state or {}).get("group_keys", ()))
        entry.known_groups.update(entry.group_keys)
        left = iter(self.unfinished.restore(entry, reserved))
        entry.unfilled.extend((writer, list(islice(left, len(several)))) for writer, several in claimed)
        return entry

    def _remove(self, record: StoreRecord) -> None:
        with self.db.transaction() as txn:  # as one that never became visible: a crash from here on ends in removal too
            txn.put("stores", record.name.encode(), replace(record, loading=True).to_bytes())
            txn.delete("states", record.uid.encode())
            self.unfinished.forget(record.uid, txn)
        self.root.move_to_trash(record.name, record.uid)
        self.db.delete("stores", record.name.encode())
        self.catalog.remove(record.name)


def stored_spec(record: StoreRecord, spec: Spec) -> Spec:
    """The structure on disk: a replay has its capacity in front of one row's.

    Raises:
        InvalidSpecError: A replay's rows may not have keys that sampling adds.
    """
    if record.kind != "replay":
        return spec
    own = (POLICY_VERSION_KEY,) if Settings.from_json(record.settings).policy else ()
    taken = [key for key, _ in spec.root.entries if key in (*RESERVED_KEYS, *own)]
    if taken:
        raise InvalidSpecError(store=record.name, reason=f"key {taken[0]!r} is added by sample(); rename it")
    return spec.prepend((record.capacity,))


def _make_files(folder: FilePath, spec: Spec, record: StoreRecord, adopted: Adopted | None) -> list[str]:
    if adopted is None:
        extra = row_files.create(folder, spec)
    else:
        adopted.link(folder)
        extra = []
    num_rows = spec.batch_size[0] if spec.batch_size else 1
    # One more than rows: the last number is the store's own, its content version doubled.
    Generations.create(folder / GENERATION_FILE, uid=record.uid, num_rows=num_rows + 1).close()
    return [".".join(path) for path in extra]
