"""Records which rows of a store have reached the disk, and finds out after a loss of power whether they are whole.

After a loss of power any subset of the pages that were written since the last sync may be on the disk. So a row may be
torn although its generation is even, or be half overwritten under its old generation. Therefore this file has, for
every row, its generation at the last sync and a checksum of its content (``row_sums``). A row whose content still
matches is whole; no other evidence counts. Each entry is checked on its own, so it does not matter which of them, or of
other files' pages, had reached the disk.

Layout, little-endian: 8 bytes magic, 32 bytes store uid (hexadecimal digits), int64 number of entries, 32 bytes SHA-256
of the description of what the checksums cover, zeros up to 4096; then int64 generation and uint64 checksum per row, and
one more entry for the store's own number.

``server/README.md`` has a reading order of syncs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from tdserve.base.errors import CorruptDataError
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.files import FRESH_SUFFIX, sync_file
from tdserve.store.disk.mapped import map_shared
from tdserve.store.rows import restructuring
from tdserve.store.rows.format import Folder, plan
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.rows.row_columns import FOLDER as COLUMNS_FOLDER
from tdserve.store.rows.row_sums import Sums, compute_factor, sum_rows
from tdserve.store.values.value_copy import ValueCopy, ValueLeafRows
from tdserve.structure.trees.tree import Spec

FILE_NAME = "synced.memmap"

_HEADER_BYTES = 4096
_MAGIC = b"TDSSYN\x00\x01"
_HEADER = struct.Struct("<8s32sq32s")
_ENTRY = np.dtype([("generation", "<i8"), ("sum", "<u8")])
_CHANGING = -1
"""Generation of a record while it changes; no row has it."""

_MAX_ROWS_AT_ONCE = 1 << 20
_PIECE_BYTES = 1 << 22

SUMMED_COLUMNS = ("sequence", "written")
"""Columns of a row that control never changes without changing its generation. The others may be some writes old. The
last one comes to a table with the first row that is written in part."""

Column = tuple[Path, int]
"""File of a column, and its bytes per row."""


@dataclass(frozen=True)
class SyncedStore:
    """The description of a store that is needed to sync its rows.

    Attributes:
        uid: Incarnation.
        folder: Absolute folder of the store.
        num_rows: Number of rows, without the store's own number.
        structure: Number of the structure that the other fields describe.
        leaves: File of each tensor leaf, below the folder, and its bytes per row.
        values: Path of each non-tensor leaf, and its values per row.
    """

    uid: str
    folder: str
    num_rows: int
    structure: int
    leaves: tuple[tuple[str, int], ...]
    values: tuple[ValueLeafRows, ...] = ()

    @classmethod
    def from_spec(cls, spec: Spec, *, uid: str, folder: str, structure: int) -> SyncedStore:
        """Returns the description of a store with files of its own; ``spec`` is as stored, rows included."""
        planned = plan(spec)
        num_rows = spec.num_rows
        tops = [top for top in (planned.rows, planned.extra) if top is not None]
        leaves = [each for top in tops for each in _list_files(top, top.name, num_rows)]
        values = tuple((path, math.prod(leaf.batch_size) // max(num_rows, 1)) for path, leaf in spec.values)
        return cls(uid, folder, num_rows, structure, tuple(leaves), values)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> SyncedStore:
        """Returns the description that ``dataclasses.asdict`` and JSON have encoded."""
        leaves = tuple((str(name), int(nbytes)) for name, nbytes in fields["leaves"])
        values = tuple((tuple(path), int(num_each)) for path, num_each in fields["values"])
        return cls(**{**fields, "leaves": leaves, "values": values})

    def compute_digest(self, columns: Sequence[Column] | None = None) -> bytes:
        """Returns the digest of all that the checksums of its rows cover.

        Args:
            columns: The columns among it; None: those that are there.
        """
        columns = self.list_columns() if columns is None else columns
        # In place of the number of the structure, which changes with a lock too: it was part of the digest once.
        made_of = [0, self.leaves, self.values, [path.name for path, _ in columns]]
        return hashlib.sha256(json.dumps(made_of).encode()).digest()

    def sum_rows(
        self, rows: NDArray[np.int64], values: ValueCopy | None, columns: Sequence[Column] | None = None
    ) -> Sums:
        """Returns the checksums of some rows, as their files are now.

        Args:
            rows: Their numbers, sorted.
            values: The copy of their values.
            columns: As for ``compute_digest``.

        Raises:
            CorruptDataError: A file is missing or truncated.
        """
        columns = self.list_columns() if columns is None else columns
        sums: Sums = np.zeros(len(rows), np.uint64)
        for seed, column in enumerate((*self._list_leaf_files(), *columns)):
            self._add_sums(sums, rows, seed, column)
        if values is not None:
            values.add_sums(sums, rows, self.values)
        return sums

    def add_last_column(self, sums: Sums, rows: NDArray[np.int64]) -> None:
        """Adds, to checksums of rows that do not cover the last column yet, what it contributes."""
        columns = self.list_columns()
        self._add_sums(sums, rows, len(self.leaves) + len(columns) - 1, columns[-1])

    def _add_sums(self, sums: Sums, rows: NDArray[np.int64], seed: int, column: Column) -> None:
        path, nbytes = column
        if nbytes and len(rows):
            table = map_table(path, self.num_rows, nbytes)
            for part, chosen in _iter_pieces(table, rows):
                sums[part] += sum_rows(chosen, seed) * compute_factor(seed)

    def sync_files(self, *, with_folders: bool) -> None:
        """Syncs the store's files to the disk, except for values and the watermark.

        Args:
            with_folders: Syncs the folders too.
        """
        columns = Path(self.folder, COLUMNS_FOLDER)
        others = sorted(columns.iterdir()) if columns.is_dir() else []
        for path in (*(path for path, _ in self._list_leaf_files()), *others, Path(self.folder, GENERATION_FILE)):
            sync_file(path)
        if with_folders:
            for folder, folders, names in os.walk(self.folder):
                # Files of keys that are being added may move at any moment; they are synced once they have their place.
                folders[:] = [each for each in folders if not each.startswith(restructuring.PREFIX)]
                sync_file(Path(folder))
                for name in names:
                    if name.endswith(".json"):
                        sync_file(Path(folder, name))
            sync_file(Path(self.folder).parent)

    def _list_leaf_files(self) -> list[tuple[Path, int]]:
        return [(Path(self.folder, name), nbytes) for name, nbytes in self.leaves]

    def list_columns(self) -> list[Column]:
        """Returns the columns that the checksums of the next sync cover."""
        found = []
        for name in SUMMED_COLUMNS:
            path = Path(self.folder, COLUMNS_FOLDER, f"{name}.memmap")
            with suppress(FileNotFoundError):
                found.append((path, path.stat().st_size // max(self.num_rows, 1)))
        return [(path, nbytes) for path, nbytes in found]


class Watermark:
    """The mapped file of one store.

    Attributes:
        columns: The columns that its checksums cover.
        is_new: Whether the file was made when it was opened.
    """

    def __init__(self, path: Path, entries: NDArray[Any], *, columns: Sequence[Column], is_new: bool) -> None:
        self.path = path
        self.columns = columns
        self.is_new = is_new
        self._entries = entries

    @classmethod
    def open(cls, store: SyncedStore, *, makes: bool) -> Watermark:
        """Maps the file.

        Args:
            makes: Whether to create a new, empty one if it is missing or of another structure; or one of all columns,
                with what is known of the rows, if a column has come since.

        Raises:
            CorruptDataError: It is missing, or of another store or structure.
            CapacityError: The disk is full.
        """
        path = Path(store.folder, FILE_NAME)
        nbytes = _compute_nbytes(store.num_rows)
        all_columns = store.list_columns()
        with convert_os_errors(path, asked=nbytes):
            columns = _find_covered(store, path, all_columns)
            if columns is None and not makes:
                raise CorruptDataError(path=str(path), expected="a record of its rows", actual="none")
            is_new = makes and columns != all_columns
            if is_new:
                entries = None if columns is None else _carry_entries(store, path)
                columns = all_columns
                _make(path, _make_header(store, columns), nbytes, entries)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                mapping = map_shared(fd, nbytes, writable=True, path=path)
            finally:
                os.close(fd)
        entries = np.ndarray((store.num_rows + 1,), _ENTRY, buffer=mapping, offset=_HEADER_BYTES)
        return cls(path, entries, columns=columns or (), is_new=is_new)

    @property
    def generations(self) -> NDArray[np.int64]:
        """Generations of the rows, then the store's own number."""
        found: NDArray[np.int64] = self._entries["generation"]
        return found

    @property
    def sums(self) -> Sums:
        """Checksums of the rows' content."""
        found: Sums = self._entries["sum"]
        return found

    def put(self, rows: NDArray[np.int64], generations: NDArray[np.int64], sums: Sums | int) -> None:
        """Records rows as they are from now on; the caller syncs the file."""
        self._entries["generation"][rows] = _CHANGING  # a reader that compares must not take one of them alone
        self._entries["sum"][rows] = sums
        self._entries["generation"][rows] = generations


def compute_checksum(store: SyncedStore, generations: NDArray[np.int64], sums: Sums) -> int:
    """Returns the CRC-32C of the file of a store whose rows were all synced.

    Args:
        generations: Generations of the rows, then the store's own number.
        sums: Checksums of the rows; 0 where a generation is odd, or nothing was written.
    """
    entries = np.zeros(store.num_rows + 1, _ENTRY)
    entries["generation"], entries["sum"][:-1] = generations, sums
    return crc32c(entries.tobytes(), crc32c(_make_header(store).ljust(_HEADER_BYTES, b"\0")))


def _make_header(store: SyncedStore, columns: Sequence[Column] | None = None) -> bytes:
    return _HEADER.pack(_MAGIC, store.uid.encode(), store.num_rows + 1, store.compute_digest(columns))


def _find_covered(store: SyncedStore, path: Path, columns: Sequence[Column]) -> Sequence[Column] | None:
    """Returns the columns that the checksums of a record cover: all, or all but one that has come since; None: it is
    missing, or of another structure."""
    nbytes = _compute_nbytes(store.num_rows)
    is_last = bool(columns) and columns[-1][0].stem == SUMMED_COLUMNS[-1]
    for found in (columns, columns[:-1]) if is_last else (columns,):
        if _has_header_and_size(path, _make_header(store, found), nbytes):
            return found
    return None


def _carry_entries(store: SyncedStore, path: Path) -> NDArray[Any]:
    """Returns the entries of a record that does not cover the last column yet, as they are with it. So a row that does
    not match its checksum does not become one that does."""
    with open(path, "rb") as file:
        file.seek(_HEADER_BYTES)
        entries: NDArray[Any] = np.frombuffer(file.read(), _ENTRY).copy()
    sync_file(store.list_columns()[-1][0])  # from now on a row without it would not be whole
    generations = entries["generation"][:-1]
    is_summed = (generations & 1 == 0) & (generations > 0)
    for first in range(0, store.num_rows, _MAX_ROWS_AT_ONCE):
        rows = np.flatnonzero(is_summed[first : first + _MAX_ROWS_AT_ONCE]) + first
        sums = entries["sum"][rows]
        store.add_last_column(sums, rows)
        entries["sum"][rows] = sums
    return entries


def sync_store(store: SyncedStore) -> int:
    """Syncs the rows of a store to the disk, and records which they are. Other processes may write them meanwhile.

    A row that is whole and on record when this begins is whole after a loss of power, unless it is written again.

    Returns:
        Number of rows that had changed.

    Raises:
        CorruptDataError: The store's files are missing or damaged, for example because it was deleted since; or its
            structure is another by now.
        CapacityError: The disk is full.
    """
    generations = Generations.open(Path(store.folder, GENERATION_FILE), uid=store.uid)
    if generations.is_deleted:
        return 0
    if generations.structure != store.structure:  # those who wait for this store must continue waiting
        expected, actual = f"structure {store.structure}", f"structure {generations.structure}"
        raise CorruptDataError(path=str(generations.path), expected=expected, actual=actual)
    watermark = Watermark.open(store, makes=True)
    before = generations.values.copy()
    moved = np.flatnonzero(before != watermark.generations)
    copy = ValueCopy(store.folder) if store.values else None
    if copy is not None:
        copy.refresh(generations.objects_epoch)
    rows = moved[moved < store.num_rows]
    is_odd = before[rows] & 1 == 1
    watermark.put(rows[is_odd], before[rows[is_odd]], 0)
    rows = rows[~is_odd]
    for first in range(0, len(rows), _MAX_ROWS_AT_ONCE):
        some = rows[first : first + _MAX_ROWS_AT_ONCE]
        sums = store.sum_rows(some, copy)
        is_same = generations.values[some] == before[some]
        watermark.put(some[is_same], before[some[is_same]], sums[is_same])
    watermark.put(np.array([store.num_rows]), before[-1:], 0)
    store.sync_files(with_folders=watermark.is_new)
    if len(moved) or watermark.is_new:
        sync_file(watermark.path)
    return len(moved)


def find_whole(store: SyncedStore) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Returns which rows are unchanged since the last sync, and all generations of that sync; for use after a loss of
    power.

    Raises:
        CorruptDataError: Nothing was recorded, or a file is missing: no row is whole.
    """
    watermark = Watermark.open(store, makes=False)
    copy = ValueCopy(store.folder) if store.values else None
    generations = watermark.generations.copy()
    is_whole: NDArray[np.bool_] = generations[:-1] & 1 == 0
    for first in range(0, store.num_rows, _MAX_ROWS_AT_ONCE):
        rows = np.flatnonzero(is_whole[first : first + _MAX_ROWS_AT_ONCE]) + first
        is_whole[rows] = store.sum_rows(rows, copy, watermark.columns) == watermark.sums[rows]
    return is_whole, generations


def has_record(store: SyncedStore) -> bool:
    """Returns whether there is a record of the last sync of a store, of the structure that it has now."""
    path = Path(store.folder, FILE_NAME)
    with convert_os_errors(path):
        return _find_covered(store, path, store.list_columns()) is not None


def begin_copy(
    folder: Path, *, source_uid: str, uid: str, rename: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> None:
    """Makes the record of the last sync, if there is one, that of a copy of the store, another incarnation.

    Args:
        folder: Folder of the copy.
        source_uid: Incarnation that was copied.
        uid: Uid of the copy.
        rename: Returns the generations that rows with these have in the copy.
    """
    path = folder / FILE_NAME
    with convert_os_errors(path):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            header = os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
            magic, found, num_entries, digest = _HEADER.unpack(header)
            nbytes = os.fstat(fd).st_size
            is_own = num_entries > 0 and (magic, found) == (_MAGIC, source_uid.encode())
            if not is_own or nbytes != _compute_nbytes(num_entries - 1):
                return
            mapping = map_shared(fd, nbytes, writable=True, path=path)
            generations = np.ndarray((num_entries,), _ENTRY, buffer=mapping, offset=_HEADER_BYTES)["generation"]
            # An entry that was changing when it was read, or is of a row that was never written, is of no generation.
            generations[:] = np.where(generations > 0, rename(generations), generations)
            os.pwrite(fd, _HEADER.pack(magic, uid.encode(), num_entries, digest), 0)
        finally:
            os.close(fd)


def _compute_nbytes(num_rows: int) -> int:
    return _HEADER_BYTES + (num_rows + 1) * _ENTRY.itemsize


def _list_files(folder: Folder, name: str, num_rows: int) -> list[tuple[str, int]]:
    found = [(f"{name}/{file}", leaf.nbytes // max(num_rows, 1)) for file, _, leaf in folder.files]
    for child in folder.folders:
        found += _list_files(child, f"{name}/{child.name}", num_rows)
    return found


def map_table(path: Path, num_rows: int, nbytes: int) -> NDArray[np.uint8]:
    """Maps a file by rows, to be read. Raises CorruptDataError if it is missing or truncated."""
    with convert_os_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd).st_size
            if found < num_rows * nbytes:
                raise CorruptDataError(path=str(path), expected=f"{num_rows * nbytes} bytes", actual=f"{found} bytes")
            mapping = map_shared(fd, num_rows * nbytes, writable=False, path=path)
        finally:
            os.close(fd)
    table: NDArray[np.uint8] = np.ndarray((num_rows, nbytes), np.uint8, buffer=mapping)
    return table


def _iter_pieces(table: NDArray[np.uint8], rows: NDArray[np.int64]) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
    """Yields sorted rows of a table in pieces: neighbours in place, others copied together."""
    step = max(1, _PIECE_BYTES // table.shape[1])
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        begin, end = int(some[0]), int(some[-1]) + 1
        yield slice(first, first + len(some)), table[begin:end] if end - begin == len(some) else table[some]


def _has_header_and_size(path: Path, header: bytes, nbytes: int) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(header)) == header and os.fstat(file.fileno()).st_size == nbytes
    except FileNotFoundError:
        return False


def _make(path: Path, header: bytes, nbytes: int, entries: NDArray[Any] | None = None) -> None:
    fresh = path.with_name(path.name + FRESH_SUFFIX)
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.pwrite(fd, header, 0)
        if entries is not None:
            with open(fd, "r+b", closefd=False) as file:
                file.seek(_HEADER_BYTES)
                file.write(entries.data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(fresh, path)
