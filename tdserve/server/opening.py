"""Opens stores: maps their files, and restores their rules from the catalog."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import islice
from pathlib import Path as FilePath
from typing import Any

from tdserve.base.errors import InvalidSpecError
from tdserve.messages.content import POLICY_VERSION_KEY, RESERVED_KEYS
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.shared_numbers import SharedNumbers
from tdserve.rules.replay.table import Table
from tdserve.rules.weights import Versions
from tdserve.server.keyed_stores import open_keyed_state
from tdserve.server.opened_store import OpenedStore
from tdserve.server.recovery.claim_records import find_unfilled_claims
from tdserve.server.specs import Specs
from tdserve.server.unfinished_writes import UnfinishedWrites
from tdserve.store.adopted import Adopted, check_adopted
from tdserve.store.catalog_db import CatalogDB
from tdserve.store.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.leaf_folders import create
from tdserve.store.root import Root
from tdserve.store.row_columns import open_column
from tdserve.store.version_names import remove_leftovers
from tdserve.structure.tree import Path, Spec

FILLED = 2
"""Generation of each row of a tensordict store, and twice its content version, after its first content."""

LONG_ROWS = 1 << 15
"""Capacity from which on a thread restores the rules of a table. For smaller ones it takes a few milliseconds at most,
less than waiting for a thread."""


class TableOpening:
    """A table whose rules a thread is restoring. Nobody else has its entry meanwhile, so nothing in it changes.

    Args:
        record: Record of the table.
        make: Restores the rules, which takes long; reads only files of the table.
        finish: Makes the entry from the rules, on the event loop.
    """

    def __init__(self, record: StoreRecord, make: Callable[[], Table], finish: Callable[[Table], OpenedStore]) -> None:
        self.record = record
        self._finish = finish
        self._made: Future[Table] = Future()
        asyncio.get_running_loop().run_in_executor(None, self._make, make)

    def _make(self, make: Callable[[], Table]) -> None:
        try:
            self._made.set_result(make())
        except BaseException as fault:  # noqa: BLE001 (``entry`` raises it)
            self._made.set_exception(fault)

    async def wait(self) -> None:
        """Waits until the thread has ended, with or without an error. Callers resume in the order of their calls."""
        await asyncio.wait({asyncio.wrap_future(self._made)})

    async def outlast(self) -> None:
        """Like ``wait``, but a caller that is cancelled still waits to the end: the thread is reading the files."""
        try:
            await self.wait()
        except asyncio.CancelledError:
            await self.wait()
            raise

    def get_entry(self) -> OpenedStore:
        """Returns the open store; call it once. Blocks the event loop if the thread is not done.

        Raises:
            CorruptDataError: Its files are damaged.
        """
        return self._finish(self._made.result())


class Opener:
    """The opener of a root's stores.

    Args:
        root: The acquired root.
        db: Its catalog.
        specs: Structures of the stores.
        unfinished_writes: Rows that local writers left unfinished before a restart.
    """

    def __init__(self, root: Root, db: CatalogDB, specs: Specs, unfinished_writes: UnfinishedWrites) -> None:
        self._root = root
        self._db = db
        self._specs = specs
        self._unfinished_writes = unfinished_writes

    def is_long(self, record: StoreRecord) -> bool:
        """Returns whether opening this store takes so long that a thread should do it."""
        return record.kind == "replay" and record.capacity >= LONG_ROWS

    def begin(self, record: StoreRecord) -> TableOpening:
        """Starts to open a table in a thread. Raises CorruptDataError."""
        return TableOpening(record, *self._load_table_parts(record))

    def open(self, record: StoreRecord, *, checks: bool = False) -> OpenedStore:
        """Opens a store.

        Args:
            checks: Whether to check the user's folder of an adopted store too.

        Raises:
            CorruptDataError: Its files are damaged.
        """
        if record.kind == "replay":
            make, finish = self._load_table_parts(record)
            return finish(make())
        folder = self._root.store_folder(record.name)
        if record.kind == "weights":
            state = self._load_state(record)
            versions = Versions.restore(state) if state else Versions()
            kept = {version.version for version in versions.kept}
            remove_leftovers(folder / "versions", kept=kept, free=set(versions.files) - kept)
            newest = versions.newest
            named = record if newest is None else newest
            spec = self._specs.get(named.fingerprint, named.order)
            entry = OpenedStore(record, spec, folder, versions=versions)
            entry.hold_newest()
            return entry
        spec = self._specs.get(record.fingerprint, record.order)
        if record.adopted and checks:
            check_adopted(folder, spec)
        generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
        if record.kind == "keyed":
            keyed, stored = open_keyed_state(record, folder), make_stored_spec(record, spec)
            return OpenedStore(record, stored, folder, row_spec=spec, generations=generations, keyed=keyed)
        entry = OpenedStore(record, spec, folder, generations=generations)
        self._unfinished_writes.restore(entry)
        return entry

    def _load_table_parts(self, record: StoreRecord) -> tuple[Callable[[], Table], Callable[[Table], OpenedStore]]:
        """Returns two functions: one restores the rules of a table, in any thread, the other makes its entry from
        them."""
        folder, state = self._root.store_folder(record.name), self._load_state(record)
        spec = self._specs.get(record.fingerprint, record.order)
        generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
        stored = make_stored_spec(record, spec)
        reserved = self._unfinished_writes.find_reserved(record.uid)
        claimed = find_unfilled_claims(self._db, folder, record, generations.values)
        make = partial(
            Table.restore,
            record.name,
            generations.values[:-1],
            Settings.from_json(state.get("settings", record.settings)),
            state,
            now_reserved=[*(rows.rows for rows in reserved), *(rows for _, several in claimed for rows in several)],
            held=self._unfinished_writes.find_overwritten(record.uid, stored),
            make_column=partial(open_column, folder),
            num_keys=len(spec.tensors) + len(spec.values),
            shared=SharedNumbers(generations.numbers),
            first_generation=2 + 2 * int(record.uid[:7], 16),  # below 2**30: requests carry the lower 32 bits
        )

        def finish(table: Table) -> OpenedStore:
            entry = OpenedStore(record, stored, folder, row_spec=spec, generations=generations, table=table)
            entry.group_keys.extend(tuple(path) for path in state.get("group_keys", ()))
            entry.known_groups.update(entry.group_keys)
            left = iter(self._unfinished_writes.restore(entry, reserved))
            entry.unfilled.extend((writer, list(islice(left, len(several)))) for writer, several in claimed)
            return entry

        return make, finish

    def _load_state(self, record: StoreRecord) -> dict[str, Any]:
        content = self._db.get("states", record.uid.encode())
        state: dict[str, Any] = json.loads(content) if content else {}
        return state


def make_stored_spec(record: StoreRecord, spec: Spec) -> Spec:
    """Returns the structure on disk; that of a replay table has the capacity in front of one row's batch size.

    Raises:
        InvalidSpecError: A row of a replay table has a key that sampling adds.
    """
    if record.kind == "keyed":
        return KeyedSettings.from_json(record.settings).make_stored_spec(spec.fingerprint)
    if record.kind != "replay":
        return spec
    own = (POLICY_VERSION_KEY,) if Settings.from_json(record.settings).policy else ()
    taken = [key for key, _ in spec.root.entries if key in (*RESERVED_KEYS, *own)]
    if taken:
        raise InvalidSpecError(store=record.name, reason=f"key {taken[0]!r} is added by sample(); rename it")
    return spec.prepend((record.capacity,))


def make_files(
    folder: FilePath,
    spec: Spec,
    record: StoreRecord,
    adopted: Adopted | None = None,
    contents: Mapping[Path, bytes] | None = None,
) -> list[str]:
    """Creates the files of a store; returns the dotted names of the leaves that lie in ``extra/``.

    Args:
        adopted: Folder that has its tensors; None if it has files of its own.
        contents: First content of all its leaves; None if it has none yet.
    """
    if adopted is None:
        extra = create(folder, spec, contents or {})
    else:
        adopted.link(folder)
        extra = []
    num_rows = spec.num_rows
    # One more than rows: the last is the store's own number, twice its content version.
    generations = Generations.create(folder / GENERATION_FILE, uid=record.uid, num_rows=num_rows + 1)
    if contents is not None:
        generations.values.fill(FILLED)
    generations.close()
    return list_dotted(extra)


def list_dotted(paths: Iterable[Path]) -> list[str]:
    """Returns the names of leaves as a store's record has them."""
    return [".".join(path) for path in paths]
