"""Compares rows with their checksums of the last sync, for readers of stores that were created with ``checksum=True``.

A row that was written since that sync has another generation than its record, and is not compared. So writers of
whole rows, in any process, need not do anything. The server compares rows before a part of them is written, and
before keys change (:mod:`tdserve.server.mutations.damage_checks`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import DamagedRowError, TDServeError
from tdserve.store.durability.watermark import FILE_NAME as SYNCED_FILE, SyncedStore, Watermark, map_table
from tdserve.store.rows.format import plan
from tdserve.store.rows.generations import Generations
from tdserve.store.rows.row_sums import Sums, compute_factor, sum_rows
from tdserve.store.values.objects import Objects
from tdserve.store.values.value_copy import add_value_sums
from tdserve.structure.trees.tree import Path, Spec

FILE_NAME = "compared"
"""Empty file in the folder of a store whose rows are compared."""

LOOK_AGAIN_S = 1.0
"""Time between two looks for a new record of the sync; it is rebuilt when the keys of the store change."""

_BYTES_AT_ONCE = 1 << 22
_NUM_LOOKS = 3
_PAUSE_S = 0.002
"""A difference counts if it is there at each of some looks: the sync may be changing the record."""

_Row = NDArray[np.int64]


def mark_compared(folder: FilePath) -> None:
    """Marks a new store as one whose rows are compared."""
    (folder / FILE_NAME).touch()


def is_compared(folder: FilePath) -> bool:
    """Returns whether the rows of a store are compared."""
    return (folder / FILE_NAME).exists()


class RowComparison:
    """Compares the rows of one mapped store. Threads: safe.

    Args:
        spec: Structure of its files.
        folder: Its folder.
        generations: Its generations.
        structure: Number of its structure.
    """

    def __init__(self, spec: Spec, folder: FilePath, generations: Generations, structure: int) -> None:
        self._store = SyncedStore.from_spec(spec, uid=generations.uid, folder=str(folder), structure=structure)
        planned = plan(spec)
        tops = [top for top in (planned.rows, planned.extra) if top is not None]
        self._paths = [path for top in tops for each in top.walk() for _, path, _ in each.files]
        self._path = folder / SYNCED_FILE
        self._name = folder.name
        self._generations = generations
        self._looked_s = -LOOK_AGAIN_S
        self._inode = 0
        self._found: tuple[Watermark, list[NDArray[np.uint8]]] | None = None

    def compare(
        self,
        rows: _Row,
        tables: Mapping[Path, NDArray[np.uint8]],
        objects: Objects | None,
        *,
        looks_again: bool = False,
    ) -> None:
        """Compares rows that were not written since the last sync.

        Args:
            rows: Their numbers, in any order.
            tables: The bytes of each leaf by rows.
            objects: The store's values; None if it has none.
            looks_again: Looks for a new record of the sync in any case: what the caller does next can make a damaged
                row seem whole.

        Raises:
            DamagedRowError: One is damaged.
        """
        if looks_again:
            self._looked_s = -LOOK_AGAIN_S
        found = self._find()
        if found is None:
            return
        for look in range(_NUM_LOOKS):
            rows, expected, actual = self._list_damaged(rows, *found, tables, objects)
            if not len(rows):
                return
            if look < _NUM_LOOKS - 1:
                time.sleep(_PAUSE_S)
        raise DamagedRowError(
            store=self._name,
            row=int(rows[0]),
            expected=f"{int(expected[0]):016x}",
            actual=f"{int(actual[0]):016x}",
        )

    def _find(self) -> tuple[Watermark, list[NDArray[np.uint8]]] | None:
        """Returns the record of the last sync and the columns that it covers; None before the first one."""
        now_s = time.monotonic()
        if self._found is None or now_s - self._looked_s >= LOOK_AGAIN_S:  # the first record may come at any time
            self._looked_s = now_s
            try:
                inode = os.stat(self._path).st_ino
                if inode != self._inode or self._found is None:
                    watermark = Watermark.open(self._store, makes=False)
                    columns = [map_table(path, self._store.num_rows, nbytes) for path, nbytes in watermark.columns]
                    self._found = watermark, columns
                    self._inode = inode
            except (OSError, TDServeError):  # no sync yet, or none since its keys have changed
                self._found = None
        return self._found

    def _list_damaged(
        self,
        rows: _Row,
        watermark: Watermark,
        columns: list[NDArray[np.uint8]],
        tables: Mapping[Path, NDArray[np.uint8]],
        objects: Objects | None,
    ) -> tuple[_Row, Sums, Sums]:
        """Returns the rows that differ, with their checksums of the last sync and those of now."""
        before = self._generations.values[rows]
        is_synced = (before & 1 == 0) & (before > 0) & (watermark.generations[rows] == before)
        rows, before = rows[is_synced], before[is_synced]
        expected = watermark.sums[rows].copy()
        actual: Any = np.zeros(len(rows), np.uint64)
        all_tables = [*(tables[path] for path in self._paths), *columns]
        for seed, table in enumerate(all_tables):
            step = max(1, _BYTES_AT_ONCE // max(table.shape[1], 1))
            for first in range(0, len(rows), step) if table.shape[1] else ():
                some = slice(first, first + step)
                actual[some] += sum_rows(table[rows[some]], seed) * compute_factor(seed)
        if objects is not None and self._store.values:
            add_value_sums(objects, actual, rows, self._store.values)
        differs = (actual != expected) & (self._generations.values[rows] == before)
        return rows[differs], expected[differs], actual[differs]
