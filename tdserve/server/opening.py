"""Opening stores: files are mapped, and rules made of them and of what the catalog remembers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import islice
from pathlib import Path as FilePath
from typing import Any

from tdserve.base.errors import InvalidSpecError
from tdserve.messages.content import POLICY_VERSION_KEY, RESERVED_KEYS
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table
from tdserve.rules.weights import Versions
from tdserve.server.opened_store import OpenedStore
from tdserve.server.recovery.claim_records import unfilled_claims
from tdserve.server.specs import Specs
from tdserve.server.unfinished import Unfinished
from tdserve.store.adopted import Adopted, check_adopted
from tdserve.store.catalog_db import CatalogDB
from tdserve.store.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.root import Root
from tdserve.store.row_columns import open_column
from tdserve.store.rows import create
from tdserve.store.version_names import tidy
from tdserve.structure.tree import Spec

LONG_ROWS = 1 << 15
"""The rules of a table of so many rows are made in a thread: below, that takes a few milliseconds at most, and less
than a thread's turn."""


class TableOpening:
    """A table whose rules are being made in a thread. Nobody else has its entry meanwhile, so nothing of it changes.

    Args:
        record: Of the table.
        make: What takes long; it looks at files of the table alone.
        finish: Makes the entry of it, on the event loop.
    """

    def __init__(self, record: StoreRecord, make: Callable[[], Table], finish: Callable[[Table], OpenedStore]) -> None:
        self.record = record
        self._finish = finish
        self._made: Future[Table] = Future()
        asyncio.get_running_loop().run_in_executor(None, self._make, make)

    def _make(self, make: Callable[[], Table]) -> None:
        try:
            self._made.set_result(make())
        except BaseException as fault:  # noqa: BLE001 (it is raised where the entry is wanted)
            self._made.set_exception(fault)

    async def wait(self) -> None:
        """Waits for the thread, however it ends. Who comes first goes on first."""
        await asyncio.wait({asyncio.wrap_future(self._made)})

    async def outlast(self) -> None:
        """As ``wait``; a caller that is cancelled meanwhile waits too: the thread still looks at the files."""
        try:
            await self.wait()
        except asyncio.CancelledError:
            await self.wait()
            raise

    def entry(self) -> OpenedStore:
        """The open store; to be called once. It keeps the event loop waiting where the thread is not done.

        Raises:
            CorruptDataError: Its files are damaged.
        """
        return self._finish(self._made.result())


class Opener:
    """Opens the stores of a root.

    Args:
        root: The acquired root.
        db: Its catalog.
        specs: Structures of the stores.
        unfinished: What local writers of before a restart have left.
    """

    def __init__(self, root: Root, db: CatalogDB, specs: Specs, unfinished: Unfinished) -> None:
        self._root = root
        self._db = db
        self._specs = specs
        self._unfinished = unfinished

    def is_long(self, record: StoreRecord) -> bool:
        """Whether to open this store takes so long that a thread should do it."""
        return record.kind == "replay" and record.capacity >= LONG_ROWS

    def begin(self, record: StoreRecord) -> TableOpening:
        """Begins to open a table in a thread. Raises CorruptDataError."""
        return TableOpening(record, *self._table_parts(record))

    def open(self, record: StoreRecord, *, checks: bool = False) -> OpenedStore:
        """Opens a store.

        Args:
            checks: Whether the user's folder of an adopted store is looked at too.

        Raises:
            CorruptDataError: Its files are damaged.
        """
        if record.kind == "replay":
            make, finish = self._table_parts(record)
            return finish(make())
        folder = self._root.store_folder(record.name)
        if record.kind == "weights":
            state = self._state(record)
            versions = Versions.restore(state) if state else Versions()
            kept = {version.version for version in versions.kept}
            tidy(folder / "versions", kept=kept, free=set(versions.files) - kept)
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
        entry = OpenedStore(record, spec, folder, generations=generations)
        self._unfinished.restore(entry)
        return entry

    def _table_parts(self, record: StoreRecord) -> tuple[Callable[[], Table], Callable[[Table], OpenedStore]]:
        """What makes the rules of a table, in any thread, and what makes its entry of them."""
        folder, state = self._root.store_folder(record.name), self._state(record)
        spec = self._specs.get(record.fingerprint, record.order)
        generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
        stored = stored_spec(record, spec)
        reserved = self._unfinished.find_reserved(record.uid)
        claimed = unfilled_claims(self._db, folder, record, generations.values)
        make = partial(
            Table.restore,
            record.name,
            generations.values[:-1],
            Settings.from_json(state.get("settings", record.settings)),
            state,
            now_reserved=[*(rows.rows for rows in reserved), *(rows for _, several in claimed for rows in several)],
            held=self._unfinished.overwritten(record.uid, stored),
            make_column=partial(open_column, folder),
            num_keys=len(spec.tensors) + len(spec.values),
            first_generation=2 + 2 * int(record.uid[:7], 16),  # below 2**30: requests carry the lower 32 bits
        )

        def finish(table: Table) -> OpenedStore:
            entry = OpenedStore(record, stored, folder, row_spec=spec, generations=generations, table=table)
            entry.group_keys.extend(tuple(path) for path in state.get("group_keys", ()))
            entry.known_groups.update(entry.group_keys)
            left = iter(self._unfinished.restore(entry, reserved))
            entry.unfilled.extend((writer, list(islice(left, len(several)))) for writer, several in claimed)
            return entry

        return make, finish

    def _state(self, record: StoreRecord) -> dict[str, Any]:
        content = self._db.get("states", record.uid.encode())
        state: dict[str, Any] = json.loads(content) if content else {}
        return state


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


def make_files(folder: FilePath, spec: Spec, record: StoreRecord, adopted: Adopted | None) -> list[str]:
    """Makes the files of a store; returns the leaves that lie in ``extra/``, dotted.

    Args:
        adopted: Where its tensors lie, if not in files of its own.
    """
    if adopted is None:
        extra = create(folder, spec)
    else:
        adopted.link(folder)
        extra = []
    num_rows = spec.num_rows
    # One more than rows: the last number is the store's own, its content version doubled.
    Generations.create(folder / GENERATION_FILE, uid=record.uid, num_rows=num_rows + 1).close()
    return [".".join(path) for path in extra]
