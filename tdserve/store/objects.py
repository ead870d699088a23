"""Non-tensor values of a store: an LMDB environment by (row, key). Values are opaque bytes here; nothing is decoded.

One process writes (a data worker), any process of the same machine and PID namespace may read. Two tables, for other
tools too: ``values`` has as key 16 bytes that name the path, then 8 bytes big-endian row + 1 (0 is the value for all
rows); ``paths`` gives for each such 16 bytes the path as a JSON list of strings.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt

from tdserve.catalog import DEFAULT_MAX_OBJECT_BYTES
from tdserve.errors import CapacityError, ClosedError, LocalProtocolError
from tdserve.store import environments
from tdserve.store.faults import lmdb_faults
from tdserve.value_columns import Buffer, join

KeyPath = tuple[str, ...]

COMMITS_PER_CHECK = 256
"""A reader that was killed inside a read keeps pages from being used again until somebody looks for such readers."""

_DIGEST_BYTES = 16
_ROW_BYTES = 8
_COMMON = bytes(_ROW_BYTES)
_NUM_META_PAGES = 2
_FIRST_ROW = (1).to_bytes(8, "big")


Rows = Sequence[int] | npt.NDArray[np.int64]

_NONE: Mapping[KeyPath, int] = MappingProxyType({})


class ObjectColumn(NamedTuple):
    """Values of one path: one for every row of ``rows``, or a single one for all of these; where ``rows`` is None, a
    single one that all rows without a value of their own share."""

    path: KeyPath
    rows: Rows | None
    values: Sequence[Buffer]


class FoundColumn(NamedTuple):
    """What a path has: a value for each row that was asked for, else one for all of them; None where there is none."""

    per_row: bool
    values: Sequence[bytes | None]


class Objects:
    """The open non-tensor values of one store.

    Threads: safe; writing transactions wait for one another.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, writable: bool = False, max_bytes: int = DEFAULT_MAX_OBJECT_BYTES
    ) -> None:
        """Opens the environment in ``folder``; a writer makes it if missing.

        Args:
            folder: As ``object_folders.current`` says.
            writable: Only one process of all may pass True.
            max_bytes: Size of the map, for a writer; readers take the writer's. Address space only, the file grows
                with use.

        Raises:
            CorruptDataError: The folder is missing or holds something else.
            WrongStateError: This process has it open for reading and now wants to write.
            CapacityError, InvalidRequestError: The folder cannot be used.
        """
        self._folder = Path(folder)
        environment = environments.acquire(self._folder, writable=writable, max_bytes=max_bytes if writable else 0)
        self._environment: environments.Environment | None = environment
        # also when nobody closes: whoever still reads in another thread is not to lose the mapping meanwhile
        self._release = weakref.finalize(self, environments.release, environment)
        self._release.atexit = False
        self._max_bytes = int(environment.env.info()["map_size"])
        self._digests: dict[KeyPath, bytes] = {}
        self._named: set[KeyPath] = set()
        self._num_commits = 0
        try:
            with lmdb_faults(self._folder, max_bytes=self._max_bytes):
                self._values: Any = environment.env.open_db(b"values", create=writable)
                self._paths: Any = environment.env.open_db(b"paths", create=writable)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def exists(folder: str | os.PathLike[str]) -> bool:
        """Whether a writer ever made the environment in ``folder``."""
        return os.path.isfile(os.path.join(folder, environments.DATA_FILE))

    def close(self) -> None:
        """Closes; calling it twice is harmless. Nobody may be reading in another thread."""
        self._environment = None
        self._release()

    def __enter__(self) -> Objects:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put_many(self, columns: Sequence[ObjectColumn], *, clear: Iterable[KeyPath] = ()) -> None:
        """Stores values in one atomic commit, replacing older ones.

        A path without values of single rows keeps none when its rows are given what all of them have already.

        Args:
            columns: The values, each path once.
            clear: Paths whose values of single rows are dropped first, in the same commit.

        Raises:
            CapacityError: The map or the disk is full. Nothing was stored.
        """
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            try:
                self._put_many(columns, clear)
            except lmdb.MapFullError:
                try:
                    self._reclaim()
                    self._put_many(columns, clear)
                except lmdb.MapFullError as fault:
                    raise self._full(columns) from fault

    def move(
        self, moves: Sequence[tuple[KeyPath, KeyPath]], *, cleared: Iterable[KeyPath] = (), cleared_below: str = ""
    ) -> None:
        """Copies all values of paths to other paths, in place of what these had, then clears paths; in one commit.

        ``cleared_below``: also all paths that begin with this key. A path without values is not copied, so that to do
        it again, when the sources were cleared, changes nothing.

        Raises:
            CapacityError: The map or the disk is full. Nothing was changed.
        """
        with lmdb_faults(self._folder, max_bytes=self._max_bytes), self._env().begin(write=True) as txn:
            cursor = txn.cursor(db=self._values)
            for source, target in moves:
                found = _all_of(cursor, self._digest(source))
                if found:
                    digest = self._digest(target)
                    _clear(cursor, digest, with_common=True)
                    cursor.putmulti([(digest + tail, value) for tail, value in found])
                    txn.put(digest, json.dumps(target).encode(), db=self._paths)
            found_below = self._paths_below(txn, cleared_below) if cleared_below else []
            for path in (*cleared, *found_below):
                _clear(cursor, self._digest(path), with_common=True)
                txn.delete(self._digest(path), db=self._paths)
                self._named.discard(path)

    def get_many(
        self, wanted: Sequence[tuple[KeyPath, Rows]], *, joined: Mapping[KeyPath, int] = _NONE
    ) -> list[FoundColumn]:
        """Reads values as of one moment.

        Args:
            wanted: Paths, and the rows that are asked for of each, in any order.
            joined: Paths whose values are large, and copied into one buffer (``JoinedValues``) where all rows have
                one; and how many bytes at the front of each are to lie apart from the rest.
        """
        with (
            lmdb_faults(self._folder, max_bytes=self._max_bytes),
            self._env().begin(db=self._values, buffers=True) as txn,
        ):
            cursor = txn.cursor()
            tails: dict[int, list[bytes]] = {}  # many paths are asked for with the same rows
            for _, rows in wanted:
                if id(rows) not in tails:
                    tails[id(rows)] = _tails(rows)
            return [_found(txn, cursor, self._digest(path), tails[id(rows)], joined.get(path)) for path, rows in wanted]

    def free_bytes(self) -> int:
        """Bytes of the map that no value takes. Values of over two kilobytes need whole pages that lie in a row."""
        return max(self._max_bytes - self._used_bytes(), 0)

    def unused_bytes(self) -> int:
        """Bytes of the file that no value takes: they are for values to come."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            env = self._env()
            file_bytes = (int(env.info()["last_pgno"]) + 1) * int(env.stat()["psize"])
        return max(file_bytes - self._used_bytes(), 0)

    def copy(self, folder: str | os.PathLike[str]) -> None:
        """Writes an environment with the same values and nothing else into a folder; it survives a power loss.

        Args:
            folder: Made here.

        Raises:
            CapacityError: The disk is full.
            CorruptDataError: The folder exists, or this environment is damaged.
        """
        target = Path(folder)
        with lmdb_faults(target, max_bytes=self._max_bytes, asked=self._used_bytes()):
            target.mkdir()
            fd = os.open(target / environments.DATA_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                self._env().copyfd(fd, compact=True)
                os.fsync(fd)
            finally:
                os.close(fd)

    def sync(self) -> None:
        """Makes everything committed so far survive a power loss too. Blocks for the disk."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            self._env().sync(True)

    def _put_many(self, columns: Sequence[ObjectColumn], clear: Iterable[KeyPath]) -> None:
        named = []
        tails: dict[int, list[bytes]] = {}  # many paths are given values of the same rows
        with self._env().begin(write=True) as txn:
            cursor = txn.cursor(db=self._values)
            cleared = set(clear)
            for path in cleared:
                _clear(cursor, self._digest(path))
            for path, rows, values in columns:
                digest = self._digest(path)
                if rows is None:
                    txn.put(digest + _COMMON, values[0], db=self._values)
                elif path in cleared or _has_rows(cursor, digest) or not self._is_common(txn, digest, values):
                    if id(rows) not in tails:
                        tails[id(rows)] = _tails(rows)
                    keys = list(map(digest.__add__, tails[id(rows)]))
                    each = list(values) * len(keys) if len(values) == 1 else values
                    cursor.putmulti(list(zip(keys, each, strict=True)))
                if path not in self._named:
                    txn.put(digest, json.dumps(path).encode(), db=self._paths)
                    named.append(path)
        self._named.update(named)
        self._num_commits += 1
        if self._num_commits % COMMITS_PER_CHECK == 0:
            self._env().reader_check()

    def _paths_below(self, txn: lmdb.Transaction, key: str) -> list[KeyPath]:
        paths = [tuple(json.loads(bytes(path))) for _, path in txn.cursor(db=self._paths)]
        return [path for path in paths if path[:1] == (key,)]

    def _used_bytes(self) -> int:
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            env = self._env()
            with env.begin() as txn:
                tables = [env.stat(), txn.stat(self._values), txn.stat(self._paths)]
        num_pages = sum(table["branch_pages"] + table["leaf_pages"] + table["overflow_pages"] for table in tables)
        return (num_pages + _NUM_META_PAGES) * int(tables[0]["psize"])

    def _reclaim(self) -> None:
        """Makes pages usable that were freed by the last commit, or that a killed reader could still see."""
        env = self._env()
        env.reader_check()
        with env.begin(write=True) as txn:  # LMDB keeps what the last commit freed until the next one is done
            for path in self._named:
                txn.put(self._digest(path), json.dumps(path).encode(), db=self._paths)

    def _full(self, columns: Sequence[ObjectColumn]) -> CapacityError:
        name = self._folder.parent.name
        return CapacityError(
            what=(
                f"non-tensor values of store {name!r}, whose max_object_bytes is {self._max_bytes} "
                "(overwriting takes about three times the content: what it replaces stays until it is done)"
            ),
            asked=sum(len(value) for column in columns for value in column.values),
            free=self.free_bytes(),
        )

    def _is_common(self, txn: lmdb.Transaction, digest: bytes, values: Sequence[Buffer]) -> bool:
        held = txn.get(digest + _COMMON, db=self._values)
        return held is not None and all(value == held for value in values)

    def _digest(self, path: KeyPath) -> bytes:
        digest = self._digests.get(path)
        if digest is None:
            digest = self._digests[path] = _digest(path)
        return digest

    def _env(self) -> lmdb.Environment:
        if self._environment is None:
            raise ClosedError(what=f"objects {self._folder}")
        return self._environment.env


def _found(
    txn: lmdb.Transaction, cursor: lmdb.Cursor, digest: bytes, tails: Sequence[bytes], head_nbytes: int | None
) -> FoundColumn:
    """What it gives are copies: the buffers of a transaction end with it."""
    held: Any = txn.get(digest + _COMMON)
    common = None if held is None else bytes(held)
    if not _has_rows(cursor, digest):
        return FoundColumn(False, [common])
    found: Any = map(txn.get, map(digest.__add__, tails))
    if head_nbytes is not None:
        found = [common if value is None else value for value in found]
        if common is not None or None not in found:
            return FoundColumn(True, join(found, head_nbytes=head_nbytes))
    # each buffer goes at once: hundreds that live together wake the garbage collector
    return FoundColumn(True, [common if value is None else bytes(value) for value in found])


def _has_rows(cursor: lmdb.Cursor, digest: bytes) -> bool:
    return bool(cursor.set_range(digest + _FIRST_ROW)) and cursor.key()[:_DIGEST_BYTES] == digest


def _clear(cursor: lmdb.Cursor, digest: bytes, *, with_common: bool = False) -> None:
    more = cursor.set_range(digest + (_COMMON if with_common else _FIRST_ROW))
    while more and cursor.key()[:_DIGEST_BYTES] == digest:
        more = cursor.delete()  # moves on to the next record; False after the last one


def _all_of(cursor: lmdb.Cursor, digest: bytes) -> list[tuple[bytes, bytes]]:
    """All values of a path, each with the end of its key."""
    found = []
    more = cursor.set_range(digest + _COMMON)
    while more and cursor.key()[:_DIGEST_BYTES] == digest:
        found.append((bytes(cursor.key())[_DIGEST_BYTES:], bytes(cursor.value())))
        more = cursor.next()
    return found


def _tails(rows: Rows) -> list[bytes]:
    """The end of the key of each row."""
    numbers = np.asarray(rows, np.int64)
    if len(numbers) and int(numbers.min()) < 0:
        raise LocalProtocolError(reason=f"row {int(numbers.min())} of a value")
    joined = (numbers + 1).astype(">u8").tobytes()
    return [joined[start : start + _ROW_BYTES] for start in range(0, len(joined), _ROW_BYTES)]


def _digest(path: KeyPath) -> bytes:
    # LMDB keys have at most 511 bytes, keys of tensordicts have no limit: 128 bits name a path without collision
    return hashlib.sha256(json.dumps(path).encode()).digest()[:_DIGEST_BYTES]
