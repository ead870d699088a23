"""Values in memory as a live entry's source, with a count of how often it was read and written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensordict import NonTensorData, NonTensorStack


@dataclass
class Cell:
    """The entry behind a source, with counts of its uses.

    Attributes:
        entry: A plain NonTensorData or NonTensorStack.
        reads: How often it was read.
        writes: How often it was written.
        selects: How often a source of some of its rows was made.
    """

    entry: Any
    reads: int = 0
    writes: int = 0
    selects: int = 0


@dataclass
class MemorySource:
    """A source of the rows of a cell; an index of an index is kept as the chain of both."""

    cell: Cell
    chain: tuple[Any, ...] = field(default=())

    def read(self) -> Any:
        """Returns a copy of the content of the rows."""
        self.cell.reads += 1
        return self._rows(self.cell.entry).clone()

    def write(self, value: Any) -> None:
        """Replaces the content of the rows."""
        self.cell.writes += 1
        if not self.chain:
            self.cell.entry = self._whole(value)
            return
        self.cell.entry = stack = self.cell.entry.maybe_to_stack()
        for index in self.chain[:-1]:
            stack = stack[index]
        stack[self.chain[-1]] = value

    def select(self, index: Any) -> MemorySource:
        """Returns a source of some of the rows."""
        self.cell.selects += 1
        size = self._rows(self.cell.entry).batch_size[0]
        if isinstance(index, int) and not -size <= index < size:
            raise IndexError(index)
        return MemorySource(self.cell, (*self.chain, index))

    def _whole(self, value: Any) -> Any:
        if isinstance(value, NonTensorData):
            return NonTensorData(value.data, batch_size=self.cell.entry.batch_size)
        return value.clone() if isinstance(value, NonTensorStack) else NonTensorStack.from_list(value)

    def _rows(self, entry: Any) -> Any:
        for index in self.chain:
            entry = entry[index]
        return entry
