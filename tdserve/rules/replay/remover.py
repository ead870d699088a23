"""Removers: which rows make room when a table is full."""

from __future__ import annotations

from typing import ClassVar, Protocol

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.order import Fifo, Lifo
from tdserve.rules.replay.samplers.priority_order import HighestPriority, LowestPriority

__all__ = ["Evictor", "Fifo", "HighestPriority", "Lifo", "LowestPriority", "Remover"]


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

    def find_first(self, num_rows: int) -> Rows:
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
