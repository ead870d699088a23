"""Rows in the order of their priorities: which of them are drawn first, or make room first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import LocalProtocolError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.row_indexes.priorities import MinTree
from tdserve.rules.replay.samplers.sampler import Sampler
from tdserve.rules.replay.samplers.selector import Drawn, Selector, check_distinct


@dataclass(frozen=True)
class _ByPriority(Sampler):
    uses_priority: ClassVar[bool] = True
    is_ordered: ClassVar[bool] = True
    is_ring: ClassVar[bool] = False
    sign: ClassVar[int]

    def make_selector(self, columns: RowColumns, capacity: int) -> PriorityOrder:
        """See :class:`~tdserve.rules.replay.samplers.sampler.Sampler`."""
        return PriorityOrder(columns, capacity, sign=self.sign)

    def make_evictor(self, columns: RowColumns, capacity: int) -> PriorityOrder:
        """See :class:`~tdserve.rules.replay.remover.Remover`."""
        return PriorityOrder(columns, capacity, sign=self.sign)


@dataclass(frozen=True)
class HighestPriority(_ByPriority):
    """The rows of the highest priority first, and of equal ones the oldest.

    As a sampler: the first rows that may be drawn, each once per sample; a sample waits until there are enough. A queue
    with it serves the most urgent rows first. Over shards, each shard has its own order. As a remover: the first rows
    are overwritten.
    """

    kind: ClassVar[str] = "highest_priority"
    sign: ClassVar[int] = -1


@dataclass(frozen=True)
class LowestPriority(_ByPriority):
    """The rows of the lowest priority first, and of equal ones the oldest; otherwise as :class:`HighestPriority`."""

    kind: ClassVar[str] = "lowest_priority"
    sign: ClassVar[int] = 1


class PriorityOrder(Selector):
    """The selector and the evictor of :class:`HighestPriority` and :class:`LowestPriority`; methods as in
    :class:`~tdserve.rules.replay.samplers.selector.Selector` and :class:`~tdserve.rules.replay.remover.Evictor`.

    Args:
        sign: 1: the lowest priority is first; -1: the highest.
    """

    def __init__(self, columns: RowColumns, capacity: int, *, sign: int) -> None:
        self._priority = columns.priority
        self._sequence = columns.sequence
        self._sign = sign
        self._tree = MinTree(capacity)
        self._is_member = np.zeros(capacity, np.bool_)
        self._num_rows = 0
        self._last: Any = None  # key of the last row that was drawn

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        return f"<PriorityOrder {self._num_rows} rows, {'lowest' if self._sign > 0 else 'highest'} first>"

    def add(self, rows: Rows) -> None:
        """Adds rows.

        Raises:
            LocalProtocolError: A row is already a member. Nothing was changed.
        """
        if self._is_member[rows].any():
            raise LocalProtocolError(reason="a row that may be drawn was made so again")
        self._is_member[rows] = True
        self._num_rows += len(rows)
        self._tree.set(rows, self._make_order_keys(rows))

    def remove(self, rows: Rows) -> None:
        """Removes those rows that are members, each named once."""
        rows = rows[self._is_member[rows]]
        self._is_member[rows] = False
        self._num_rows -= len(rows)
        self._tree.drop(rows)

    def update(self, rows: Rows) -> None:
        """Reads the priorities of those rows that are members again."""
        rows = rows[self._is_member[rows]]
        self._tree.set(rows, self._make_order_keys(rows))

    def find_first(self, num_rows: int) -> Rows:
        """Returns the first rows in this order; all members if there are fewer."""
        return self._tree.find_lowest(num_rows)

    def draw(self, num_rows: int, *, rng: np.random.Generator, num_drawn: int = 0, num_total: int = 0) -> Drawn | None:
        """Returns the first rows in this order; None if there are fewer.

        Raises:
            InvalidRequestError: The sample has more rows than the capacity.
        """
        num_total = max(num_total, num_rows)
        check_distinct(num_total, len(self._is_member))
        if num_total - num_drawn > len(self):
            return None
        rows = self._find_behind_last(num_rows, num_drawn) if num_drawn else self.find_first(num_rows)
        if len(rows) < num_rows:
            return None
        self._last = self._make_order_keys(rows[-1:])
        return Drawn(rows, {})

    def _find_behind_last(self, num_rows: int, num_drawn: int) -> Rows:
        """Returns the first rows behind the last one that was drawn."""
        num_found = num_drawn + num_rows
        while True:
            rows = self.find_first(num_found)
            behind: Rows = rows[self._make_order_keys(rows) > self._last]
            if len(behind) >= num_rows or num_found >= len(self):
                return behind[:num_rows]
            num_found *= 2  # that many rows have come in front of it

    def _make_order_keys(self, rows: Rows) -> NDArray[np.complex128]:
        keys = np.empty(len(rows), np.complex128)
        keys.real, keys.imag = self._sign * self._priority[rows], self._sequence[rows]
        return keys
