"""The catalog on disk: an LMDB environment with named tables of bytes. Written by the control process only.

Every record is sealed (:mod:`tdserve.store.disk.sealed`): a damaged one raises CorruptDataError where it is read.

A commit is not synced: once :meth:`CatalogDB.begin_transaction` has left its block, its content survives ``kill -9`` of
the process, but not a loss of power; :meth:`CatalogDB.sync` adds that. One commit costs about 5 microseconds, a sync
some 200.

A transaction that decides something may find no room: then nothing has changed, and the caller reports that. One that
only records the consequence of a decision (a record that is over, the answer to a finished request) may use a reserve
of space. If even the reserve is full, its changes are *owed*: they stay in memory, every read sees them, and the next
transaction that finds room writes them. So nothing that is acknowledged later is on disk without them. In the same way
a record that is over and does no harm may wait for the next transaction.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args

import lmdb

from tdserve.base.errors import CapacityError, ClosedError, CorruptDataError
from tdserve.base.failpoints import reach
from tdserve.store.database import environments
from tdserve.store.database.catalog_room import CatalogRoom, count_page_bytes
from tdserve.store.disk.faults import lmdb_faults
from tdserve.store.disk.sealed import seal, unseal

Table = Literal["stores", "specs", "states", "packed", "requests", "pending", "draws", "arriving"]

TABLES: tuple[Table, ...] = get_args(Table)

MAX_CATALOG_BYTES = 1 << 30
"""Size of the map. The file grows with use; a million records of 500 bytes need half of it."""

MAX_KEY_BYTES = 511
"""LMDB's own limit. Keys must not be empty either."""


_SMALL_NUM_CHANGES = 4
_SMALL_BYTES = 1 << 15
"""Limits of a small transaction: more than the counters and settings of a table take, together with an answer."""

_Changes = dict[tuple[Table, bytes], bytes | None]
"""New values by table and key; None deletes."""

_log = logging.getLogger("tdserve.store")


class Transaction:
    """One atomic change of the catalog, yielded by :meth:`CatalogDB.begin_transaction`. It collects changes, which are
    made when it ends.

    Attributes:
        changes: New values by table and key; None deletes.
        shown: Calls to make once the changes are on record.
    """

    def __init__(self, db: CatalogDB) -> None:
        self._db = db
        self.changes: _Changes = {}
        self.shown: list[Callable[[], object]] = []

    def show(self, what: Callable[[], object]) -> None:
        """Registers a call to make right after the commit, such as showing what was decided; it is not made if the
        commit fails."""
        self.shown.append(what)

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Stores ``value``, replacing an older one."""
        self.changes[table, key] = value

    def delete(self, table: Table, key: bytes) -> None:
        """Removes a record, if there is one."""
        self.changes[table, key] = None

    def update(self, table: Table, changes: Mapping[bytes, bytes | None]) -> None:
        """Puts several records by key; None removes one."""
        self.changes.update({(table, key): value for key, value in changes.items()})

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Returns the value as this transaction leaves it, or None."""
        if (table, key) in self.changes:
            return self.changes[table, key]
        return self._db.get(table, key)


class PinnedCatalog:
    """The catalog as it was at one moment; the file grows meanwhile. Threads: one at a time.

    Args:
        txn: Begun at the moment.
        tables: LMDB's, by name.
        owed: Changes that were owed at the moment.
        folder: Folder of the catalog.
        max_bytes: Size of its map.
    """

    def __init__(
        self, txn: lmdb.Transaction, tables: Mapping[str, Any], owed: _Changes, folder: Path, max_bytes: int
    ) -> None:
        self._txn = txn
        self._tables = tables
        self._owed = owed
        self._folder = folder
        self._max_bytes = max_bytes

    def get_many(self, table: Table, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Returns the records of these keys, as far as there are any that are whole."""
        found = {}
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            for key in keys:
                record = self._txn.get(key, db=self._tables[table])
                value = None
                if record is not None:
                    with contextlib.suppress(CorruptDataError):
                        value = bytes(unseal(key, record, str(self._folder)))
                if (value := self._owed.get((table, key), value)) is not None:
                    found[key] = value
        return found

    def scan(self, table: Table, prefix: bytes) -> dict[bytes, bytes]:
        """Returns the records whose keys start with ``prefix``, as far as they are whole."""
        keys = {key for owed, key in self._owed if owed == table and key.startswith(prefix)}
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            cursor = self._txn.cursor(db=self._tables[table])
            if cursor.set_range(prefix):
                keys |= set(takewhile(lambda key: key.startswith(prefix), map(bytes, cursor.iternext(values=False))))
        return self.get_many(table, sorted(keys))

    def close(self) -> None:
        """Lets the moment go."""
        self._txn.abort()


class CatalogDB:
    """The open catalog.

    Threads: reads are safe from any thread; changes belong to one thread.

    Attributes:
        on_owed: Called when decided changes found no room, so that :meth:`settle` is called later.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int = MAX_CATALOG_BYTES, is_read_only: bool = False
    ) -> None:
        """Opens the catalog in folder ``path``, and creates it if it is missing.

        Args:
            path: ``Root.catalog_folder``.
            max_bytes: Size of the map.
            is_read_only: Opens it only to be read: it must exist, and no byte of it changes.

        Raises:
            CorruptDataError: The files are not a catalog.
            CapacityError, InvalidRequestError: The folder cannot be used.
        """
        self._folder = Path(path)
        self._max_bytes = max_bytes
        environment = environments.acquire(self._folder, writable=not is_read_only, max_bytes=max_bytes)
        self._environment: environments.Environment | None = environment
        self._owed: _Changes = {}
        self._is_full = False
        self.on_owed: Callable[[], None] = _do_nothing
        try:
            with lmdb_faults(self._folder, max_bytes=max_bytes):
                self._tables: dict[str, Any] = {
                    name: environment.env.open_db(name.encode(), create=not is_read_only) for name in TABLES
                }
                if not is_read_only:
                    path, tables = self._folder / environments.DATA_FILE, self._tables.values()
                    self._room = CatalogRoom(path, environment.env, tables, max_bytes=max_bytes)
        except BaseException:
            environments.release(environment)
            raise

    def close(self) -> None:
        """Closes the catalog; calling it twice is harmless."""
        environment = self._environment
        if environment is None:
            return
        self.on_owed = _do_nothing
        if not self.settle():
            _log.error("the catalog %s was closed without %d changes that found no room", self._folder, len(self._owed))
        self._environment = None
        environments.release(environment)

    def __enter__(self) -> CatalogDB:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def begin_transaction(self, *, is_decided: bool = False, uses_reserve: bool = False) -> Iterator[Transaction]:
        """A block whose changes become durable together when it ends cleanly, and not at all when it raises.

        Args:
            is_decided: It follows from what is already on record, or was already seen: it may use the reserve, and
                changes that find no room are owed.
            uses_reserve: It may use the reserve, since it frees more room, or records what was acknowledged.

        Raises:
            CapacityError: The map or the disk is full, and it was not decided. Nothing was stored.
            LocalProtocolError: A key is empty or longer than 511 bytes. Nothing was stored.
        """
        txn = Transaction(self)
        yield txn
        self._commit(txn.changes, is_decided=is_decided, takes_room=not (is_decided or uses_reserve))
        for show in txn.shown:
            show()

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Commits one :meth:`Transaction.put`."""
        self._commit({(table, key): value}, takes_room=True)

    def delete(self, table: Table, key: bytes) -> None:
        """Removes a record that is over, if there is one. This is decided, so it never fails for lack of space."""
        self._commit({(table, key): None}, is_decided=True)

    def delete_later(self, table: Table, key: bytes) -> None:
        """Removes a record that is over, together with the next change of any kind, or at close."""
        self._owed[table, key] = None

    def check_room(self) -> None:
        """Raises CapacityError if not even the reserve has room for a small transaction. Call it before an action that
        has to be recorded."""
        self._room.take(_SMALL_NUM_CHANGES, _SMALL_BYTES, uses_reserve=True)

    @property
    def owes(self) -> bool:
        """Whether decided changes wait for room."""
        return self._is_full

    def settle(self) -> bool:
        """Writes owed changes; returns whether none is left."""
        if self._owed:
            self._commit({}, is_decided=True)
        return not self._owed

    def _commit(self, changes: _Changes, *, is_decided: bool = False, takes_room: bool = False) -> None:
        if self._owed:
            changes = {**self._owed, **changes}
        nbytes = sum(len(value) for value in changes.values() if value is not None)
        try:
            if takes_room:
                self._room.take(len(changes), nbytes)
            with lmdb_faults(self._folder, max_bytes=self._max_bytes, asked=nbytes):
                self._write(changes)
        except CapacityError as error:
            if not is_decided:
                raise
            if not self._is_full:
                _log.error("%d changes of the catalog wait for room: %s", len(changes), error)
            self._owed, self._is_full = changes, True
            self.on_owed()
        else:
            if self._owed:
                self._owed = {}
            if self._is_full:
                self._is_full = False
                _log.warning("all changes of the catalog that had waited for room are on record")

    def _write(self, changes: _Changes) -> None:
        txn = self._open_env().begin(write=True)
        try:
            for (table, key), value in changes.items():
                if value is None:
                    txn.delete(key, db=self._tables[table])
                else:
                    txn.put(key, seal(key, value), db=self._tables[table])
            reach("catalog.written")
        except BaseException:
            txn.abort()
            raise
        txn.commit()

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Returns the committed value, or None; also for a key that no record can have."""
        if not 0 < len(key) <= MAX_KEY_BYTES:
            return None
        if (table, key) in self._owed:
            return self._owed[table, key]
        with (
            lmdb_faults(self._folder, max_bytes=self._max_bytes),
            self._open_env().begin(db=self._tables[table]) as txn,
        ):
            record = txn.get(key)
        return None if record is None else bytes(unseal(key, record, str(self._folder)))

    def pin(self) -> PinnedCatalog:
        """Keeps all records as they are now, until the result is closed."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            txn = self._open_env().begin()
        return PinnedCatalog(txn, self._tables, dict(self._owed), self._folder, self._max_bytes)

    def scan(self, table: Table, prefix: bytes = b"") -> list[tuple[bytes, bytes]]:
        """Returns every committed record whose key starts with ``prefix``, in key order, as of one moment."""
        found: dict[bytes, bytes | None] = {}
        with (
            lmdb_faults(self._folder, max_bytes=self._max_bytes),
            self._open_env().begin(db=self._tables[table]) as txn,
        ):
            cursor = txn.cursor()
            if cursor.set_range(prefix) if prefix else cursor.first():
                for key, value in cursor.iternext():
                    if not key.startswith(prefix):
                        break
                    found[bytes(key)] = bytes(unseal(key, value, str(self._folder)))
        if not self._owed:
            return list(found.items())  # type: ignore[arg-type]
        found |= {key: value for (owed, key), value in self._owed.items() if owed == table and key.startswith(prefix)}
        return [(key, value) for key, value in sorted(found.items()) if value is not None]

    def list_keys(self, table: Table) -> list[bytes]:
        """Returns the keys of every committed record, in order, as of one moment."""
        if self._owed:
            return [key for key, _ in self.scan(table)]
        with (
            lmdb_faults(self._folder, max_bytes=self._max_bytes),
            self._open_env().begin(db=self._tables[table]) as txn,
        ):
            return [bytes(key) for key in txn.cursor().iternext(values=False)]

    def count_records(self, table: Table) -> int:
        """Returns how many records a table has on disk; costs the same for any number."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes), self._open_env().begin() as txn:
            found: int = txn.stat(self._tables[table])["entries"]
        return found

    def count_bytes(self, table: Table) -> int:
        """Returns the size of the pages of a table on disk; costs the same for any number."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes), self._open_env().begin() as txn:
            return count_page_bytes(txn.stat(self._tables[table]))

    def check_readers(self) -> None:
        """Releases the read transactions of processes that have ended."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            self._open_env().reader_check()

    def sync(self) -> None:
        """Makes everything committed survive a loss of power too. Blocks for the disk: call it off the event loop."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            self._open_env().sync(True)

    def _open_env(self) -> lmdb.Environment:
        if self._environment is None:
            raise ClosedError(what=f"catalog {self._folder}")
        return self._environment.env


def _do_nothing() -> None:
    """Does nothing: the default of ``on_owed``."""
