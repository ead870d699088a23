"""Which rows make room when a table is full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from tdserve.rules.replay.columns import Columns
from tdserve.rules.replay.live_rows import Rows
from tdserve.rules.replay.order import Fifo
from tdserve.rules.replay.priorities import MinTree

__all__ = ["Evictor", "Fifo", "LowestPriority", "Remover"]


class Evictor(Protocol):
    """The live rows of a table in the order in which they make room. Vectorised over the rows it is given."""

    def __len__(self) -> int:
        """Members."""

    def add(self, rows: Rows) -> None:
        """Takes rows in, each once and none a member; their columns are written already."""

    def remove(self, rows: Rows) -> None:
        """Drops rows; those that are no members are ignored."""

    def update(self, rows: Rows) -> None:
        """The priorities of these rows have changed; those that are no members are ignored."""

    def lowest(self, num_rows: int) -> Rows:
        """The rows to overwrite next, the first to go first; all members where there are fewer. They stay members."""


class Remover(Protocol):
    """What every remover has: a frozen dataclass whose fields go into JSON.

    Attributes:
        kind: Its name there.
        columns: Names of the columns that its evictor, where it has one, reads.
        is_ring: Whether the oldest rows go: the ring does that by itself, and keeps no columns for it.
    """

    kind: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    is_ring: ClassVar[bool]

    def evictor(self, columns: Columns, capacity: int) -> Evictor | None:
        """The rule at work, without rows yet; None where the ring is that rule."""


@dataclass(frozen=True)
class LowestPriority:
    """The rows of the lowest priority are overwritten. Which of equal ones goes first is not said."""

    kind: ClassVar[str] = "lowest_priority"
    columns: ClassVar[tuple[str, ...]] = ("priority",)
    is_ring: ClassVar[bool] = False

    def evictor(self, columns: Columns, capacity: int) -> LowestEvictor:
        """As of :class:`Remover`."""
        return LowestEvictor(columns, capacity)


class LowestEvictor:
    """The evictor of :class:`LowestPriority`; methods as of :class:`Evictor`."""

    def __init__(self, columns: Columns, capacity: int) -> None:
        self._priority = columns.priority
        self._tree = MinTree(capacity)
        self._is_member = np.zeros(capacity, np.bool_)
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        return f"<LowestEvictor {self._num_rows} rows>"

    def add(self, rows: Rows) -> None:
        """Takes rows in with their priorities."""
        self._is_member[rows] = True
        self._num_rows += len(rows)
        self._tree.set(rows, self._priority[rows])

    def remove(self, rows: Rows) -> None:
        """Drops those rows that are members, each named once."""
        rows = rows[self._is_member[rows]]
        self._is_member[rows] = False
        self._num_rows -= len(rows)
        self._tree.drop(rows)

    def update(self, rows: Rows) -> None:
        """Reads the priorities of those rows that are members anew."""
        rows = rows[self._is_member[rows]]
        self._tree.set(rows, self._priority[rows])

    def lowest(self, num_rows: int) -> Rows:
        """The members of lowest priority, lowest first; all where there are fewer."""
        return self._tree.lowest(num_rows)
