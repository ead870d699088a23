"""Removers: which rows make room when a table is full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.columns import RowColumns
from tdserve.rules.replay.order import Fifo
from tdserve.rules.replay.priorities import MinTree

__all__ = ["Evictor", "Fifo", "LowestPriority", "Remover"]


class Evictor(Protocol):
    """The live rows of a table in the order in which they make room. Every operation is vectorised over its rows."""

    def __len__(self) -> int:
        """Returns the number of members."""

    def add(self, rows: Rows) -> None:
        """Adds rows, each once and none a member; their columns are already written."""

    def remove(self, rows: Rows) -> None:
        """Removes rows; rows that are not members are ignored."""

    def update(self, rows: Rows) -> None:
        """Notes that the priorities of these rows have changed; rows that are not members are ignored."""

    def find_lowest(self, num_rows: int) -> Rows:
        """Returns the rows to overwrite next, in order; all members if there are fewer. They stay members."""


class Remover(Protocol):
    """The interface of all removers: a frozen dataclass whose fields go into JSON.

    Attributes:
        kind: Its name in JSON.
        uses_priority: Whether its evictor reads priorities, as for a sampler.
        is_ring: Whether the oldest rows go: the ring does that itself.
    """

    kind: ClassVar[str]
    uses_priority: ClassVar[bool]
    is_ring: ClassVar[bool]

    def make_evictor(self, columns: RowColumns, capacity: int) -> Evictor | None:
        """Returns the evictor, without rows yet; None if the ring itself is that rule."""


@dataclass(frozen=True)
class LowestPriority:
    """Overwrites the rows of the lowest priority. The order of equal ones is undefined."""

    kind: ClassVar[str] = "lowest_priority"
    uses_priority: ClassVar[bool] = True
    is_ring: ClassVar[bool] = False

    def make_evictor(self, columns: RowColumns, capacity: int) -> LowestEvictor:
        """See :class:`Remover`."""
        return LowestEvictor(columns, capacity)


class LowestEvictor:
    """The evictor of :class:`LowestPriority`; methods as in :class:`Evictor`."""

    def __init__(self, columns: RowColumns, capacity: int) -> None:
        self._priority = columns.priority
        self._tree = MinTree(capacity)
        self._is_member = np.zeros(capacity, np.bool_)
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        return f"<LowestEvictor {self._num_rows} rows>"

    def add(self, rows: Rows) -> None:
        """Adds rows with their priorities."""
        self._is_member[rows] = True
        self._num_rows += len(rows)
        self._tree.set(rows, self._priority[rows])

    def remove(self, rows: Rows) -> None:
        """Removes those rows that are members, each named once."""
        rows = rows[self._is_member[rows]]
        self._is_member[rows] = False
        self._num_rows -= len(rows)
        self._tree.drop(rows)

    def update(self, rows: Rows) -> None:
        """Reads the priorities of those rows that are members again."""
        rows = rows[self._is_member[rows]]
        self._tree.set(rows, self._priority[rows])

    def find_lowest(self, num_rows: int) -> Rows:
        """Returns the members of lowest priority, lowest first; all if there are fewer."""
        return self._tree.find_lowest(num_rows)
