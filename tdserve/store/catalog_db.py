"""The catalog on disk: an LMDB environment with named tables of bytes. Written by the control process only.

A commit is not synced: once :meth:`CatalogDB.transaction` left its block, its content survives ``kill -9`` of the
process, not a power loss; :meth:`CatalogDB.sync` adds that. One commit costs about 5 microseconds, a sync some 200.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import lmdb

from tdserve.errors import ClosedError
from tdserve.store import environments
from tdserve.store.faults import lmdb_faults

Table = Literal["stores", "specs", "states", "requests", "pending"]

TABLES: tuple[Table, ...] = ("stores", "specs", "states", "requests", "pending")

MAX_CATALOG_BYTES = 1 << 30
"""Size of the map. The file grows with use; a million records of 500 bytes need half of it."""

MAX_KEY_BYTES = 511
"""LMDB's own limit. Keys must not be empty either."""


class Transaction:
    """One atomic change of the catalog, given by :meth:`CatalogDB.transaction`. Used by the thread that opened it.

    Attributes:
        nbytes: Bytes put so far.
    """

    def __init__(self, txn: lmdb.Transaction, *, tables: dict[str, Any], folder: Path, max_bytes: int) -> None:
        self._txn = txn
        self._tables = tables
        self._folder = folder
        self._max_bytes = max_bytes
        self.nbytes = 0

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Stores ``value``, replacing an older one.

        Raises:
            CapacityError: The map or the disk is full. The whole transaction is given up.
            LocalProtocolError: The key is empty or longer than 511 bytes.
        """
        with lmdb_faults(self._folder, max_bytes=self._max_bytes, asked=len(value)):
            self._txn.put(key, value, db=self._tables[table])
        self.nbytes += len(key) + len(value)

    def delete(self, table: Table, key: bytes) -> bool:
        """Removes a record; returns whether there was one."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            return bool(self._txn.delete(key, db=self._tables[table]))

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The value as this transaction sees it, or None."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            value = self._txn.get(key, db=self._tables[table])
        return None if value is None else bytes(value)


class CatalogDB:
    """The open catalog.

    Threads: reads are safe from any thread; a writing transaction belongs to one thread, others wait for it.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = MAX_CATALOG_BYTES) -> None:
        """Opens the catalog in folder ``path``, made if missing.

        Args:
            path: ``Root.catalog_folder``.
            max_bytes: Size of the map.

        Raises:
            CorruptDataError: The files are not a catalog.
            CapacityError, InvalidRequestError: The folder cannot be used.
        """
        self._folder = Path(path)
        self._max_bytes = max_bytes
        environment = environments.acquire(self._folder, writable=True, max_bytes=max_bytes)
        self._environment: environments.Environment | None = environment
        try:
            with lmdb_faults(self._folder, max_bytes=max_bytes):
                self._tables: dict[str, Any] = {name: environment.env.open_db(name.encode()) for name in TABLES}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the catalog; calling it twice is harmless."""
        environment, self._environment = self._environment, None
        if environment is not None:
            environments.release(environment)

    def __enter__(self) -> CatalogDB:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A block whose changes become durable together when it ends cleanly, and not at all when it raises.

        Raises:
            CapacityError: The map or the disk is full. Nothing of the transaction was stored.
        """
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            txn = self._env().begin(write=True)
        try:
            open_txn = Transaction(txn, tables=self._tables, folder=self._folder, max_bytes=self._max_bytes)
            yield open_txn
        except BaseException:
            txn.abort()
            raise
        with lmdb_faults(self._folder, max_bytes=self._max_bytes, asked=open_txn.nbytes):
            txn.commit()

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """One :meth:`Transaction.put`, committed."""
        with self.transaction() as txn:
            txn.put(table, key, value)

    def delete(self, table: Table, key: bytes) -> bool:
        """One :meth:`Transaction.delete`, committed."""
        with self.transaction() as txn:
            return txn.delete(table, key)

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The committed value, or None."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes), self._env().begin(db=self._tables[table]) as txn:
            value = txn.get(key)
        return None if value is None else bytes(value)

    def scan(self, table: Table, prefix: bytes = b"") -> list[tuple[bytes, bytes]]:
        """Every committed record whose key starts with ``prefix``, in key order, as of one moment."""
        found: list[tuple[bytes, bytes]] = []
        with lmdb_faults(self._folder, max_bytes=self._max_bytes), self._env().begin(db=self._tables[table]) as txn:
            cursor = txn.cursor()
            if not (cursor.set_range(prefix) if prefix else cursor.first()):
                return found
            for key, value in cursor.iternext():
                if not key.startswith(prefix):
                    break
                found.append((bytes(key), bytes(value)))
        return found

    def keys(self, table: Table) -> list[bytes]:
        """The keys of every committed record, in order, as of one moment."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes), self._env().begin(db=self._tables[table]) as txn:
            return [bytes(key) for key in txn.cursor().iternext(values=False)]

    def num_records(self, table: Table) -> int:
        """How many records a table has; costs the same for any number."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes), self._env().begin() as txn:
            found: int = txn.stat(self._tables[table])["entries"]
        return found

    def sync(self) -> None:
        """Makes everything committed survive a power loss too. Blocks for the disk: call it off the event loop."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            self._env().sync(True)

    def _env(self) -> lmdb.Environment:
        if self._environment is None:
            raise ClosedError(what=f"catalog {self._folder}")
        return self._environment.env
