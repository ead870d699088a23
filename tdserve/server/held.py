"""Rows that are unreadable while a write is applied to them."""

from __future__ import annotations

import numpy as np

from tdserve.server.entry import Entry
from tdserve.server.journal import Journal
from tdserve.spec.tree import Path


class Held:
    """Makes the rows of a journalled write odd, also those of one that a crash has cut short.

    Args:
        entry: The store.
        journal: The write.
    """

    def __init__(self, entry: Entry, journal: Journal) -> None:
        self._entry = entry
        self._journal = journal
        values = entry.generation_values()
        self._rows = journal.rows(entry.spec)
        if entry.table is not None:
            entry.table.hold(self._rows[values[self._rows] & 1 == 0])
        else:
            self._rows = np.append(self._rows, len(values) - 1)  # and the store's own number
            values[self._rows] |= 1

    def let_go(self, *, is_written: bool) -> None:
        """Makes them readable again, under their next generation."""
        entry = self._entry
        if entry.table is None:
            entry.generation_values()[self._rows] += 1
            return
        keys: list[Path] = [tuple(key.parts) for key in self._journal.asked.keys]
        written = [number for key in keys or [()] for number in entry.numbers_of(key)] if is_written else []
        entry.table.let_go(self._rows, written)
