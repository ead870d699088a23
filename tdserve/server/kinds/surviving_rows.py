"""The rows of a store after a loss of power, and new generations for them.

``server/README.md`` has a reading order of syncs.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as FilePath

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import TDServeError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.replay.allocation.ring import ROW_ID_MASK
from tdserve.rules.replay.draws.kept_draw import Rename
from tdserve.store.durability.watermark import SyncedStore, find_whole
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.values.value_copy import ValueCopy
from tdserve.structure.trees.tree import Spec

NO_ROW_ID = -1
"""The id of a row that is lost."""

_log = logging.getLogger("tdserve.server")


@dataclass
class SurvivingRows:
    """The rows of a store after a loss of power.

    Attributes:
        generations: Generations of all rows at the last sync, then the store's own.
        seen: As they are in the file: also those of an earlier recovery that was cut off.
        is_whole: Whether the content of each is that of the last sync.
        was_written: Whether each had any content, then or later.
    """

    generations: NDArray[np.int64]
    seen: NDArray[np.int64]
    is_whole: NDArray[np.bool_]
    was_written: NDArray[np.bool_]

    @classmethod
    def find(cls, folder: FilePath, record: StoreRecord, stored: Spec) -> SurvivingRows:
        """Looks at the files of a store of this structure. All rows of an adopted one count unless a write was cut."""
        seen = _read_generations(folder, record, stored)
        if record.adopted:
            is_whole, generations = seen[:-1] & 1 == 0, seen
        else:
            is_whole, generations = _find_synced_rows(folder, record, stored)
        return cls(generations, seen, is_whole, (generations[:-1] > 0) | (seen[:-1] > 0))

    def replace_generations(
        self, folder: FilePath, record: StoreRecord, lost: NDArray[np.int64], *, marks_store: bool
    ) -> Rename:
        """Gives all rows generations that no client has seen: a remote client may know a lost row by its generation.
        Returns what gives the new ids of rows that are not lost.

        Args:
            lost: Rows that get an odd one.
            marks_store: Whether the store's own number becomes odd too.
        """
        moved = _raise_generations(self.generations, _to_step(secrets.randbits(64))) & ~1
        moved[:-1][~self.was_written] = 0
        moved[lost] |= 1
        moved[-1] |= marks_store
        Generations.replace(
            folder / GENERATION_FILE,
            uid=record.uid,
            values=moved,
            structure=record.structure,
            former_version=record.former_version,
        )

        def rename(rows: Rows, row_ids: Rows) -> Rows:
            is_same = (self.generations[rows] & ROW_ID_MASK == row_ids) | (self.seen[rows] & ROW_ID_MASK == row_ids)
            return np.where(is_same & (moved[rows] & 1 == 0), moved[rows] & ROW_ID_MASK, NO_ROW_ID)

        return rename


def rename_for_copy(uid: str) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Returns what gives rows of a copy generations that no client has seen, or their ids, of those of the original;
    the same for the same copy.

    Args:
        uid: Uid of the copy, chosen at random.
    """
    step = _to_step(int.from_bytes(hashlib.sha256(uid.encode()).digest()[:8], "big"))
    return lambda generations: _raise_generations(generations, step)


def _to_step(number: int) -> int:
    """Returns by how much generations are raised: more than any that clients may know differ."""
    return 2 * (number % (1 << 33) + (1 << 22))


def _raise_generations(generations: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """Returns generations raised by a step; odd ones stay odd."""
    return ((generations & ROW_ID_MASK) + step) & ROW_ID_MASK


def _find_synced_rows(
    folder: FilePath, record: StoreRecord, stored: Spec
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    store = SyncedStore.from_spec(stored, uid=record.uid, folder=str(folder), structure=record.structure)
    if store.values:
        ValueCopy(folder).restore()
    try:
        return find_whole(store)
    except TDServeError as error:
        _log.warning("store %r: it is unknown which rows had reached the disk: %s", record.name, error)
        return np.zeros(store.num_rows, np.bool_), np.zeros(store.num_rows + 1, np.int64)


def _read_generations(folder: FilePath, record: StoreRecord, stored: Spec) -> NDArray[np.int64]:
    """Returns the content of the generation file, correct or not; zeros if it is unusable."""
    num_rows = stored.num_rows
    try:
        values = Generations.open(folder / GENERATION_FILE, uid=record.uid).values
    except TDServeError:
        values = np.zeros(0, np.int64)
    return values.copy() if len(values) == num_rows + 1 else np.zeros(num_rows + 1, np.int64)
