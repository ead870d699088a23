"""Non-tensor values of a store: an LMDB environment by (row, key). Values are opaque bytes here; nothing is decoded.

One process writes (a data worker), any process of the same machine and PID namespace may read. Two tables, for other
tools too: ``values`` has as key 16 bytes that name the path, then 8 bytes big-endian row + 1 (0 is the value for all
rows); ``paths`` gives for each such 16 bytes the path as a JSON list of strings.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lmdb

from tdserve.errors import ClosedError, LocalProtocolError
from tdserve.store import environments
from tdserve.store.faults import lmdb_faults

KeyPath = tuple[str, ...]

MAX_OBJECT_BYTES = 1 << 30
"""Size of the map: address space only, the file grows with use. Equal in every process that opens the folder."""

ALL_ROWS = -1
"""The row number of a value that stands for every row without one of its own."""

_ROW = struct.Struct(">Q")
_DIGEST_BYTES = 16


class Objects:
    """The open non-tensor values of one store.

    Threads: safe; writing transactions wait for one another.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, writable: bool = False, max_bytes: int = MAX_OBJECT_BYTES
    ) -> None:
        """Opens the environment in ``folder``; a writer makes it if missing.

        Args:
            folder: ``<store folder>/objects``.
            writable: Only one process of all may pass True.
            max_bytes: Size of the map.

        Raises:
            CorruptDataError: The folder is missing or holds something else.
            WrongStateError: This process has it open for reading and now wants to write.
            CapacityError, InvalidRequestError: The folder cannot be used.
        """
        self._folder = Path(folder)
        self._max_bytes = max_bytes
        environment = environments.acquire(self._folder, writable=writable, max_bytes=max_bytes)
        self._environment: environments.Environment | None = environment
        try:
            with lmdb_faults(self._folder, max_bytes=max_bytes):
                self._values: Any = environment.env.open_db(b"values", create=writable)
                self._paths: Any = environment.env.open_db(b"paths", create=writable)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def exists(folder: str | os.PathLike[str]) -> bool:
        """Whether a writer ever made the environment in ``folder``."""
        return os.path.isfile(os.path.join(folder, "data.mdb"))

    def close(self) -> None:
        """Closes; calling it twice is harmless."""
        environment, self._environment = self._environment, None
        if environment is not None:
            environments.release(environment)

    def __enter__(self) -> Objects:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put_many(self, items: Iterable[tuple[int, KeyPath, bytes]], *, clear: Iterable[KeyPath] = ()) -> None:
        """Stores values in one atomic commit, replacing older ones.

        Args:
            items: (row, path, value); row ``ALL_ROWS`` sets what rows without a value of their own read.
            clear: Paths whose values of single rows are dropped first, in the same commit.

        Raises:
            CapacityError: The map or the disk is full. Nothing was stored.
        """
        digests: dict[KeyPath, bytes] = {}
        with lmdb_faults(self._folder, max_bytes=self._max_bytes), self._env().begin(write=True) as txn:
            for path in clear:
                self._clear(txn, _digest(path))
            for row, path, value in items:
                digest = digests.get(path)
                if digest is None:
                    digest = digests[path] = _digest(path)
                    txn.put(digest, json.dumps(path).encode(), db=self._paths)
                txn.put(digest + _row_bytes(row), value, db=self._values)

    def get_many(self, rows: Sequence[int], paths: Sequence[KeyPath]) -> list[list[bytes | None]]:
        """Reads values as of one moment.

        Args:
            rows: Row numbers, in any order; ``ALL_ROWS`` asks for the common value itself.
            paths: The keys.

        Returns:
            One list per path, with one entry per row: the row's own value, else the common one, else None.
        """
        with lmdb_faults(self._folder, max_bytes=self._max_bytes), self._env().begin(db=self._values) as txn:
            return [self._get_path(txn, rows, _digest(path)) for path in paths]

    def clear_rows(self, path: KeyPath) -> None:
        """Drops the values of single rows of ``path``; the common value stays."""
        self.put_many((), clear=(path,))

    def has_rows(self, path: KeyPath) -> bool:
        """Whether any single row has a value of its own at ``path``."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes), self._env().begin(db=self._values) as txn:
            return _has_rows(txn, _digest(path))

    def sync(self) -> None:
        """Makes everything committed so far survive a power loss too. Blocks for the disk."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            self._env().sync(True)

    def _get_path(self, txn: lmdb.Transaction, rows: Sequence[int], digest: bytes) -> list[bytes | None]:
        common = txn.get(digest + _row_bytes(ALL_ROWS))
        common = None if common is None else bytes(common)
        if not _has_rows(txn, digest):
            return [common] * len(rows)
        found: list[bytes | None] = []
        for row in rows:
            value = txn.get(digest + _row_bytes(row))
            found.append(common if value is None else bytes(value))
        return found

    def _clear(self, txn: lmdb.Transaction, digest: bytes) -> None:
        cursor = txn.cursor(db=self._values)
        more = cursor.set_range(digest + _row_bytes(0))
        while more and bytes(cursor.key()).startswith(digest):
            more = cursor.delete()  # moves on to the next record; False after the last one

    def _env(self) -> lmdb.Environment:
        if self._environment is None:
            raise ClosedError(what=f"objects {self._folder}")
        return self._environment.env


def _has_rows(txn: lmdb.Transaction, digest: bytes) -> bool:
    cursor = txn.cursor()
    return bool(cursor.set_range(digest + _row_bytes(0)) and bytes(cursor.key()).startswith(digest))


def _row_bytes(row: int) -> bytes:
    if row < ALL_ROWS:
        raise LocalProtocolError(reason=f"row {row} of a value")
    return _ROW.pack(row + 1)


def _digest(path: KeyPath) -> bytes:
    # LMDB keys have at most 511 bytes, keys of tensordicts have no limit: 128 bits name a path without collision
    return hashlib.sha256(json.dumps(path).encode()).digest()[:_DIGEST_BYTES]
