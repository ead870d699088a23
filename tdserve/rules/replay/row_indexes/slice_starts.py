"""Rows where slices of one length begin."""

from __future__ import annotations

from collections import deque

from tdserve.messages.row_numbers import Rows, sort_unique
from tdserve.rules.replay.row_indexes.live_rows import LiveRows


class Starts(LiveRows):
    """Rows where slices of one length begin."""

    def include(self, rows: Rows) -> None:
        """Adds those of the rows that are missing; a row may be named twice."""
        rows = sort_unique(rows)
        self.add(rows[~self.contains(rows)])

    def discard(self, rows: Rows) -> None:
        """Removes those of the rows that are members; a row may be named twice."""
        self.remove(self.select_members(sort_unique(rows)))


class StartChanges:
    """What has happened to the starts of slices of one length since a search for them began.

    Attributes:
        length: Rows of a slice.
        steps: Rows that became starts or stopped being starts, in order.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.steps: deque[tuple[Rows, bool]] = deque()

    def include(self, rows: Rows) -> None:
        """Notes that rows became starts, or are some already."""
        self.steps.append((rows, True))

    def discard(self, rows: Rows) -> None:
        """Notes that rows are no starts."""
        self.steps.append((rows, False))
