"""Reads of a table's rows that need no decision of control: by number, and samples in which only liveness counts."""

from __future__ import annotations

from threading import Lock

import numpy as np

from tdserve.data.mapped_stores import MappedStore
from tdserve.messages.row_numbers import Rows
from tdserve.messages.selection.items import is_mask
from tdserve.messages.selection.selection import Selection
from tdserve.rules.replay.allocation.shared_numbers import NO_READER, FoundRows


class OwnReads:
    """The reads of one process: a data worker, or a local client in one session. Threads: safe.

    Args:
        place: Its place among the readers that draw rows; ``NO_READER`` if it may not.
    """

    def __init__(self, place: int) -> None:
        self._place = place
        self._rng = np.random.default_rng()
        self._counting = Lock()

    def find_listed(self, store: MappedStore, selection: Selection) -> FoundRows | None:
        """Returns the rows that a selection lists by number; None if control must be asked."""
        rows = _list_rows(selection)
        return None if rows is None else store.shared.find_listed(store.row_generations, rows)

    def draw(self, store: MappedStore, num_rows: int) -> FoundRows | None:
        """Draws rows, each live row with the same probability; None if control must be asked."""
        if self._place == NO_READER:
            return None
        found = store.uncommitted.find
        return store.shared.draw(store.row_generations, num_rows, rng=self._rng, find_uncommitted=found)

    def count_drawn(self, store: MappedStore, num_rows: int) -> None:
        """Counts rows that were drawn and read as sampled."""
        with self._counting:
            store.writable_shared.count_drawn(self._place, num_rows)


def _list_rows(selection: Selection) -> Rows | None:
    """Returns the row numbers that stand in a selection; None if it is of another kind."""
    only = selection.items[0] if len(selection.items) == 1 else None
    if isinstance(only, int):
        return np.array([only], np.int64)
    if isinstance(only, np.ndarray) and not is_mask(only):
        return only.reshape(-1).astype(np.int64, copy=False)
    return None
