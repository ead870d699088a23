"""Non-tensor values of a store: an LMDB environment by (row, key). Values are opaque bytes here and never decoded.

One process writes (a data worker); any process of the same machine and PID namespace may read. There are two tables,
which other tools may read too. The keys of ``values`` have 16 bytes that name the path, then 8 bytes big-endian row + 1
(0 is the value for all rows); its records are sealed: they end with a checksum (``sealed``). ``paths`` maps each such
16 bytes to the path, as a JSON list of strings. Values of several paths may be stored together: see ``bundles``.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lmdb

from tdserve.base.errors import CapacityError, ClosedError, CorruptDataError
from tdserve.rules.catalog import DEFAULT_MAX_OBJECT_BYTES
from tdserve.store.database import environments
from tdserve.store.database.catalog_room import CatalogRoom
from tdserve.store.disk.faults import lmdb_faults
from tdserve.store.disk.sealed import seal, unseal, unseal_all
from tdserve.store.values.bundles import Bundle, Bundles
from tdserve.store.values.object_rows import (
    COMMON,
    NAME_BYTES,
    KeyPath,
    Rows,
    clear,
    has_rows,
    make_name,
    make_tails,
    read_all,
)
from tdserve.values.value_bundles import Unbundled
from tdserve.values.value_columns import Buffer, JoinedValues, ValueColumn, join

COMMITS_PER_CHECK = 256
"""Commits between two checks for killed readers: a reader that was killed inside a read keeps pages from being reused
until the check."""

VALUES = "non-tensor values"
"""First words of the ``what`` of a CapacityError if they have no room."""

_NUM_META_PAGES = 2

_COUNTED_ROWS = 1024
"""Values that are read between two counts."""

Count = Callable[[int], None]
"""Called with the size of each part of a read, in bytes; what it raises ends the read."""

_NONE: Mapping[KeyPath, int] = MappingProxyType({})


class ObjectColumn(NamedTuple):
    """Values of one path: one for every row of ``rows``, or one for all of these; if ``rows`` is None, one value that
    is common to all rows without one of their own."""

    path: KeyPath
    rows: Rows | None
    values: Sequence[Buffer]

    @classmethod
    def from_block(cls, path: KeyPath, column: ValueColumn, rows: Rows, *, is_every_row: bool) -> ObjectColumn:
        """Returns a column of a ValueBlock as it is stored for these rows, which may be every row of the path.

        Raises:
            RemoteProtocolError: It has another number of values.
        """
        is_common = is_every_row and not column.per_row
        return cls(path, None if is_common else rows, column.get_views(path, len(rows)))


class FoundColumn(NamedTuple):
    """Values found for a path: one per requested row, or one for all of them; None if there is none."""

    per_row: bool
    values: Sequence[bytes | None]


class Objects:
    """The open non-tensor values of one store.

    Threads: safe; writing transactions wait for one another.

    Attributes:
        path: The folder, for messages.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, writable: bool = False, max_bytes: int = DEFAULT_MAX_OBJECT_BYTES
    ) -> None:
        """Opens the environment in ``folder``; a writer creates it if it is missing.

        Args:
            folder: The result of ``object_folders.get_folder``.
            writable: Only one process of all may pass True.
            max_bytes: Size of the map, for a writer; readers take the writer's. It is address space only: the file
                grows with use.

        Raises:
            CorruptDataError: The folder is missing or has other content.
            WrongStateError: This process has it open for reading and now asks to write.
            CapacityError, InvalidRequestError: The folder cannot be used.
        """
        self._folder = Path(folder)
        self.path = str(folder)
        environment = environments.acquire(self._folder, writable=writable, max_bytes=max_bytes if writable else 0)
        self._environment: environments.Environment | None = environment
        # also without close: a reader in another thread must not lose the mapping meanwhile
        self._release = weakref.finalize(self, environments.release, environment)
        self._release.atexit = False
        self._max_bytes = int(environment.env.info()["map_size"])
        self._num_commits = 0
        try:
            with lmdb_faults(self._folder, max_bytes=self._max_bytes):
                self._values: Any = environment.env.open_db(b"values", create=writable)
                self._paths: Any = environment.env.open_db(b"paths", create=writable)
            self._bundles = Bundles(self._values, self._paths, str(self._folder))
        except BaseException:
            self.close()
            raise

    @staticmethod
    def exists(folder: str | os.PathLike[str]) -> bool:
        """Returns whether a writer has ever created the environment in ``folder``."""
        return os.path.isfile(os.path.join(folder, environments.DATA_FILE))

    def close(self) -> None:
        """Closes the environment. Idempotent. No other thread may be reading."""
        self._environment = None
        self._release()

    def __enter__(self) -> Objects:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put_many(self, columns: Sequence[ObjectColumn], *, clear: Iterable[KeyPath] = ()) -> None:
        """Stores values in one atomic commit, replacing older ones.

        A path without values of single rows stays so if its rows are given the value that is already common to all.

        Args:
            columns: The values, each path once.
            clear: Paths whose values of single rows are dropped first, in the same commit.

        Raises:
            CapacityError: The map or the disk is full. Nothing was stored.
        """
        self._commit(lambda txn: self._put_columns(txn, columns, clear), _count_bytes(columns))

    def put_bundles(self, paths: Sequence[KeyPath], rows: Rows, bundles: Sequence[Buffer]) -> None:
        """Stores the values of rows under several paths in one atomic commit, replacing older ones.

        Args:
            paths: Each once; as far as possible always the same ones if rows are given all their values.
            rows: Each once.
            bundles: Bundles of ``tdserve.values.value_bundles``, one per row; opaque here.

        Raises:
            CapacityError: The map or the disk is full. Nothing was stored.
        """
        column = ObjectColumn((), rows, bundles)
        self._commit(lambda txn: self._bundles.put(txn, paths, make_tails(rows), bundles), _count_bytes([column]))

    def move(
        self, moves: Sequence[tuple[KeyPath, KeyPath]], *, cleared: Iterable[KeyPath] = (), cleared_below: str = ""
    ) -> None:
        """Copies all values of paths to other paths, replacing those, and then clears paths; in one commit.

        ``cleared_below`` also clears all paths that begin with this key. A path without values is not copied, so
        repeating the call after the sources were cleared changes nothing.

        Raises:
            CapacityError: The map or the disk is full. Nothing was changed.
        """
        with lmdb_faults(self._folder, max_bytes=self._max_bytes), self._open_env().begin(write=True) as txn:
            cursor = txn.cursor(db=self._values)
            for source, target in moves:
                self._bundles.unbundle_path(txn, source, frozenset())
                found = read_all(cursor, make_name(source), self.path)
                if found:
                    name = make_name(target)
                    self._bundles.unbundle_path(txn, target, frozenset())
                    clear(cursor, name, with_common=True)
                    cursor.putmulti([(key := name + tail, seal(key, value)) for tail, value in found])
                    txn.put(name, json.dumps(target).encode(), db=self._paths)
            found_below = self._list_paths_below(txn, cleared_below) if cleared_below else []
            going = frozenset((*cleared, *found_below))
            for path in going:
                self._bundles.unbundle_path(txn, path, going)
                clear(cursor, make_name(path), with_common=True)
                txn.delete(make_name(path), db=self._paths)

    def drop(self, wanted: Sequence[tuple[KeyPath, Rows]]) -> int:
        """Deletes the values of single rows in one atomic commit, also those in bundles; returns how many there were.

        Args:
            wanted: Paths, and rows of each. Other values in the same bundles are deleted too.

        Raises:
            CapacityError: Even that needs more room than there is. Nothing was deleted.
        """
        num_dropped = 0

        def delete(txn: lmdb.Transaction) -> None:
            nonlocal num_dropped
            bundled = [(self._bundles.find_bundle(txn, path), rows) for path, rows in wanted]
            found = [(bundle.name, rows) for bundle, rows in bundled if bundle is not None]
            found += [(make_name(path), rows) for path, rows in wanted]
            num_dropped = sum(
                txn.delete(name + tail, db=self._values) for name, rows in found for tail in make_tails(rows)
            )

        self._commit(delete, 0)
        return num_dropped

    def get_many(
        self,
        wanted: Sequence[tuple[KeyPath, Rows]],
        *,
        joined: Mapping[KeyPath, int] = _NONE,
        count: Count | None = None,
    ) -> list[FoundColumn]:
        """Reads values as of one moment.

        Args:
            wanted: Paths, and the requested rows of each, in any order.
            joined: Paths whose values are large, and are copied into one buffer (``JoinedValues``) if all rows have
                one; and the number of bytes at the front of each that are returned apart.
            count: Called before more than some values have been copied.
        """
        with (
            lmdb_faults(self._folder, max_bytes=self._max_bytes),
            self._open_env().begin(db=self._values, buffers=True) as txn,
        ):
            reader = _ObjectReader(txn, self._bundles, wanted, joined, count, self.path)
            return [reader.read_column(path, rows) for path, rows in wanted]

    def free_bytes(self) -> int:
        """Returns the bytes of the map that no value takes. Values of over two kilobytes need contiguous whole
        pages."""
        return max(self._max_bytes - self._compute_used_bytes(), 0)

    def copy(self, folder: str | os.PathLike[str]) -> None:
        """Writes an environment with only these values into a folder; it survives a loss of power.

        Args:
            folder: Created here.

        Raises:
            CapacityError: The disk is full.
            CorruptDataError: The folder exists, or this environment is damaged.
        """
        target = Path(folder)
        with lmdb_faults(target, max_bytes=self._max_bytes, asked=self._compute_used_bytes()):
            target.mkdir()
            self._require_environment().write_copy(target / environments.DATA_FILE)

    def open_table(self, name: str) -> Any | None:
        """Returns another table of this environment, created by the writer; None if no writer has created it yet."""
        env = self._open_env()
        writable = not env.flags()["readonly"]
        try:
            with lmdb_faults(self._folder, max_bytes=self._max_bytes):
                return env.open_db(name.encode(), create=writable)
        except CorruptDataError as error:
            if isinstance(error.__cause__, lmdb.NotFoundError):
                return None
            raise

    def open_room(self, tables: Sequence[Any]) -> CatalogRoom:
        """Returns what reserves disk space for these tables; for the writer."""
        path = self._folder / environments.DATA_FILE
        return CatalogRoom(path, self._open_env(), tables, max_bytes=self._max_bytes, what="the entries in")

    def begin_read(self) -> Any:
        """Returns a transaction that reads all tables as of one moment; its values are views that end with it."""
        return self._open_env().begin(buffers=True)

    def convert_faults(self) -> lmdb_faults:
        """Returns a block that turns LMDB's errors into ours."""
        return lmdb_faults(self._folder, max_bytes=self._max_bytes)

    def commit(self, change: Callable[[Any], None], *, asked_bytes: int) -> None:
        """Calls ``change`` with a transaction and commits what it does; nothing if it raises. It may be called twice.

        Args:
            asked_bytes: Size of what it puts, for the error.

        Raises:
            CapacityError: The map or the disk is full. Nothing was changed.
        """
        self._commit(change, asked_bytes)

    @property
    def last_commit(self) -> int:
        """Number of the last commit; each commit raises it."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            return int(self._open_env().info()["last_txnid"])

    def sync(self) -> None:
        """Makes everything committed so far survive a loss of power too. Blocks for the disk."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            self._open_env().sync(True)

    def _commit(self, put: Callable[[lmdb.Transaction], None], asked_bytes: int) -> None:
        """Commits a transaction; retries once if there was no room and free pages were found."""
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            try:
                self._try(put)
            except lmdb.MapFullError:
                try:
                    self._reclaim()
                    self._try(put)
                except lmdb.MapFullError as fault:
                    raise self._make_full_error(asked_bytes) from fault
        self._num_commits += 1
        if self._num_commits % COMMITS_PER_CHECK == 0:
            self._open_env().reader_check()

    def _try(self, put: Callable[[lmdb.Transaction], None]) -> None:
        with self._open_env().begin(write=True) as txn:
            put(txn)

    def _put_columns(self, txn: lmdb.Transaction, columns: Sequence[ObjectColumn], clears: Iterable[KeyPath]) -> None:
        cursor = txn.cursor(db=self._values)
        tails: dict[int, list[bytes]] = {}  # many paths get values of the same rows
        cleared = set(clears)
        for path in cleared:
            self._bundles.unbundle_path(txn, path, cleared)
            clear(cursor, make_name(path))
        replaced: dict[tuple[Bundle, int], set[KeyPath]] = {}
        for path, rows, values in columns:
            name = make_name(path)
            bundle = self._bundles.find_bundle(txn, path)
            if bundle is not None and rows is not None:
                replaced.setdefault((bundle, id(rows)), set()).add(path)
            if rows is None:
                txn.put(name + COMMON, seal(name + COMMON, values[0]), db=self._values)
            elif bundle or path in cleared or has_rows(cursor, name) or not self._is_common(txn, name, values):
                if id(rows) not in tails:
                    tails[id(rows)] = make_tails(rows)
                keys = list(map(name.__add__, tails[id(rows)]))
                each = list(values) * len(keys) if len(values) == 1 else values
                cursor.putmulti(list(zip(keys, map(seal, keys, each), strict=True)))
            txn.put(name, json.dumps(path).encode(), overwrite=False, db=self._paths)
        for (bundle, rows_id), paths in replaced.items():
            if paths.issuperset(bundle.paths):
                self._bundles.delete(txn, bundle, tails[rows_id])

    def _list_paths_below(self, txn: lmdb.Transaction, key: str) -> list[KeyPath]:
        paths = [json.loads(bytes(path)) for name, path in txn.cursor(db=self._paths) if len(name) == NAME_BYTES]
        return [tuple(path) for path in paths if path[:1] == [key]]

    def _compute_used_bytes(self) -> int:
        with lmdb_faults(self._folder, max_bytes=self._max_bytes):
            env = self._open_env()
            with env.begin() as txn:  # the unnamed table lists the others
                names = [bytes(name) for name in txn.cursor().iternext(values=False)]
                tables = [env.stat(), *(txn.stat(env.open_db(name, txn=txn, create=False)) for name in names)]
        num_pages = sum(table["branch_pages"] + table["leaf_pages"] + table["overflow_pages"] for table in tables)
        return (num_pages + _NUM_META_PAGES) * int(tables[0]["psize"])

    def _reclaim(self) -> None:
        """Makes pages usable that the last commit freed, or that a killed reader could still see."""
        env = self._open_env()
        env.reader_check()
        with env.begin(write=True) as txn:  # LMDB keeps what the last commit freed until the next one is done
            for name, path in txn.cursor(db=self._paths):
                txn.put(name, path, db=self._paths)

    def _make_full_error(self, asked_bytes: int) -> CapacityError:
        name = self._folder.parent.name
        return CapacityError(
            what=(
                f"{VALUES} of store {name!r} (delete rows, or create it with more than max_object_bytes="
                f"{self._max_bytes}; overwriting takes about three times the content)"
            ),
            asked=asked_bytes,
            free=self.free_bytes(),
        )

    def _is_common(self, txn: lmdb.Transaction, name: bytes, values: Sequence[Buffer]) -> bool:
        record = txn.get(name + COMMON, db=self._values)
        if record is None:
            return False
        held = unseal(name + COMMON, record, self.path)
        return all(value == held for value in values)

    def _open_env(self) -> lmdb.Environment:
        return self._require_environment().env

    def _require_environment(self) -> environments.Environment:
        if self._environment is None:
            raise ClosedError(what=f"objects {self._folder}")
        return self._environment


def _count_bytes(columns: Sequence[ObjectColumn]) -> int:
    return sum(len(value) for column in columns for value in column.values)


class _ObjectReader:
    """Reads in one transaction. It returns copies, since the buffers of a transaction end with it.

    Args:
        wanted, joined, count: As in ``Objects.get_many``.
    """

    def __init__(
        self,
        txn: lmdb.Transaction,
        bundles: Bundles,
        wanted: Sequence[tuple[KeyPath, Rows]],
        joined: Mapping[KeyPath, int],
        count: Count | None,
        path: str,
    ) -> None:
        self._txn = txn
        self._path = path
        self._cursor = txn.cursor()
        self._bundles = bundles
        self._wanted = wanted
        self._joined = joined
        self._count = count
        self._tails: dict[int, list[bytes]] = {}  # many paths are read for the same rows
        self._unbundled: dict[tuple[bytes, int], Unbundled] = {}
        self._copied: dict[tuple[bytes, int], dict[int, JoinedValues]] = {}

    def read_column(self, path: KeyPath, rows: Rows) -> FoundColumn:
        """Returns the values of a path; joined if that was requested or if it is bundled with others."""
        txn, name = self._txn, make_name(path)
        bundle = self._bundles.find_bundle(txn, path)
        has_own = has_rows(self._cursor, name)
        if bundle is not None and not has_own and not self._in_bundles(bundle, rows).has_gaps:
            return FoundColumn(True, self._list_copies(bundle, rows)[bundle.paths.index(path)])
        (held,) = self._get_all(name, [COMMON])
        common = None if held is None else bytes(held)
        found: Any = None if bundle is None else self._in_bundles(bundle, rows).iter_column(bundle.paths.index(path))
        if has_own:
            own = self._get_all(name, self._list_tails(rows))
            found = own if found is None else [b if a is None else a for a, b in zip(own, found, strict=True)]
        if found is None:
            return FoundColumn(False, [common])
        if path in self._joined:
            found = [common if value is None else value for value in found]
            if common is not None or None not in found:
                self._count_sizes(found)
                return FoundColumn(True, join(found, head_nbytes=self._joined[path]))
        values: list[bytes | None] = []
        found = iter(found)
        # Each buffer is released at once: hundreds that live together wake the garbage collector.
        while part := [common if value is None else bytes(value) for value in islice(found, _COUNTED_ROWS)]:
            self._count_sizes(part)
            values += part
        return FoundColumn(True, values)

    def _get_all(self, name: bytes, tails: Sequence[bytes]) -> list[Any]:
        """Returns the values under a name, as views; None for those that are absent."""
        keys = list(map(name.__add__, tails))
        return unseal_all(keys, list(map(self._txn.get, keys)), self._path)

    def _in_bundles(self, bundle: Bundle, rows: Rows) -> Unbundled:
        unbundled = self._unbundled.get((bundle.name, id(rows)))
        if unbundled is None:
            found = self._get_all(bundle.name, self._list_tails(rows))
            self._count_sizes(found)
            unbundled = self._unbundled[bundle.name, id(rows)] = self._bundles.unbundle(bundle, found)
        return unbundled

    def _list_copies(self, bundle: Bundle, rows: Rows) -> dict[int, JoinedValues]:
        """Copies all requested values of the bundles of these rows together; returns them by number of the path in the
        bundle."""
        copied = self._copied.get((bundle.name, id(rows)))
        if copied is None:
            numbers = {path: number for number, path in enumerate(bundle.paths)}
            wanted = {path for path, each in self._wanted if each is rows and path in numbers}
            copied = self._in_bundles(bundle, rows).join_columns(
                {numbers[path]: self._joined.get(path) for path in wanted}
            )
            self._copied[bundle.name, id(rows)] = copied
        return copied

    def _count_sizes(self, values: Iterable[Buffer | None]) -> None:
        if self._count is not None:
            self._count(sum(map(len, filter(None, values))))

    def _list_tails(self, rows: Rows) -> list[bytes]:
        tails = self._tails.get(id(rows))
        if tails is None:
            tails = self._tails[id(rows)] = make_tails(rows)
        return tails
