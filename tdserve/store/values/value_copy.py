"""A complete copy of a store's non-tensor values as of a sync.

Without a sync per commit, LMDB's files reach the disk in no order: a loss of power may leave an environment that does
not open, or one with pages of different moments. So it is not read after a loss of power; this copy replaces it.

``server/README.md`` has a reading order of syncs.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tdserve.store.database.environments import DATA_FILE, LOCK_FILE, read_last_transaction
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.files import FRESH_SUFFIX, sync_file
from tdserve.store.rows.row_sums import Sums, compute_factor
from tdserve.store.values import object_folders
from tdserve.store.values.object_rows import KeyPath
from tdserve.store.values.objects import Objects

NAME = "synced-values"
"""Name of the folder in a store's."""

_SOURCE_FILE = "source.json"
"""File in it that names the copied commit and the file that has it: a repair replaces that, and commits of the new one
have smaller numbers."""

_FIRST_SEED = 1 << 32
"""First seed of values; tensor leaves have smaller ones."""

_MAX_ELEMENTS_AT_ONCE = 4096

ValueLeafRows = tuple[KeyPath, int]
"""Path of a non-tensor leaf, and its number of values per row."""


class ValueCopy:
    """The copy of one store.

    Args:
        store_folder: Folder of the store.
    """

    def __init__(self, store_folder: str | os.PathLike[str]) -> None:
        self._store_folder = Path(store_folder)
        self.folder = self._store_folder / NAME

    @property
    def exists(self) -> bool:
        """Whether a sync has made it."""
        return Objects.exists(self.folder)

    def is_of(self, folder: Path) -> bool:
        """Returns whether it has all that is in a folder of the store's values, which no process has open."""
        try:
            epoch, commit, inode = json.loads(self._make_source())
            found = os.stat(folder / DATA_FILE)
        except (ValueError, TypeError, OSError):
            return False
        is_same_file = object_folders.get_folder(self._store_folder, epoch) == folder and found.st_ino == inode
        return is_same_file and read_last_transaction(folder / DATA_FILE) == commit

    def refresh(self, epoch: int) -> None:
        """Copies the values again if there were commits since the last copy.

        Args:
            epoch: Number in the generation file that determines the folder of the values.

        Raises:
            CapacityError: There is no room for the copy; the previous one stays.
            CorruptDataError: The values cannot be read, for example because the store was deleted since.
        """
        live = object_folders.get_folder(self._store_folder, epoch)
        if not Objects.exists(live):
            return
        with Objects(live) as objects:
            with convert_os_errors(live):  # the store may have been deleted
                inode = os.stat(live / DATA_FILE).st_ino
            source = json.dumps([epoch, objects.last_commit, inode]).encode()
            if self._make_source() == source:
                return
            fresh = self.folder.with_name(NAME + FRESH_SUFFIX)
            shutil.rmtree(fresh, ignore_errors=True)
            try:
                objects.copy(fresh)
                self._replace(fresh / DATA_FILE, source)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)

    def add_sums(self, sums: Sums, rows: NDArray[np.int64], leaves: Sequence[ValueLeafRows]) -> None:
        """Adds the checksums of its values to each row's."""
        if not Objects.exists(self.folder):
            return
        with Objects(self.folder) as objects:
            add_value_sums(objects, sums, rows, leaves)

    def restore(self) -> None:
        """Replaces the values by the copy, with epoch 0, after a loss of power; without a copy there are no values."""
        with convert_os_errors(self._store_folder):
            (self.folder / _SOURCE_FILE).unlink(missing_ok=True)  # its numbers start again
            for folder in object_folders.list_folders(self._store_folder):
                shutil.rmtree(folder)
            if Objects.exists(self.folder):
                target = object_folders.get_folder(self._store_folder, 0)
                target.mkdir()
                shutil.copyfile(self.folder / DATA_FILE, target / DATA_FILE)
                sync_file(target / DATA_FILE)
                sync_file(target)
        sync_file(self._store_folder)

    def put_back(self, folder: Path) -> str:
        """Replaces damaged values by the copy, which has the same; returns what was done.

        Args:
            folder: Folder of the values, which no process has open.
        """
        fresh = folder / (DATA_FILE + FRESH_SUFFIX)
        with convert_os_errors(folder):
            (self.folder / _SOURCE_FILE).unlink(missing_ok=True)  # the copy counts commits from another number
            shutil.copyfile(self.folder / DATA_FILE, fresh)
            sync_file(fresh)
            os.replace(fresh, folder / DATA_FILE)
        sync_file(folder)
        return "as of the last sync, since which nothing was written: nothing is lost"

    def _make_source(self) -> bytes:
        try:
            return (self.folder / _SOURCE_FILE).read_bytes()
        except OSError:
            return b""

    def _replace(self, data: Path, source: bytes) -> None:
        with convert_os_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
            (self.folder / _SOURCE_FILE).unlink(missing_ok=True)
            (self.folder / LOCK_FILE).unlink(missing_ok=True)
            os.replace(data, self.folder / DATA_FILE)
            (self.folder / _SOURCE_FILE).write_bytes(source)
        sync_file(self.folder)
        sync_file(self._store_folder)


def add_value_sums(objects: Objects, sums: Sums, rows: NDArray[np.int64], leaves: Sequence[ValueLeafRows]) -> None:
    """Adds the checksums of the rows' values, as an environment has them, to each row's."""
    for seed, (path, num_each) in enumerate(leaves, _FIRST_SEED):
        weights = np.array([compute_factor(seed, number) for number in range(num_each)], np.uint64)
        step = max(1, _MAX_ELEMENTS_AT_ONCE // max(num_each, 1))
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            elements = (rows[part, None] * num_each + np.arange(num_each)).reshape(-1)
            (found,) = objects.get_many([(path, elements)])
            each = np.array([0 if value is None else zlib.crc32(value) + 1 for value in found.values], "<u8")
            if not found.per_row:
                each = np.full(len(elements), each[0], np.uint64)
            sums[part] += (each.reshape(-1, num_each) * weights).sum(axis=1, dtype=np.uint64)
