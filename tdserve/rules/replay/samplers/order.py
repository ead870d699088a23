"""First in, first out, and last in, first out: rows in the order in which they were inserted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.row_indexes.ordered_rows import OrderedRows
from tdserve.rules.replay.samplers.epochs import NumberOrder
from tdserve.rules.replay.samplers.sampler import Sampler
from tdserve.rules.replay.samplers.selector import Drawn, Selector, check_distinct


@dataclass(frozen=True)
class Fifo(Sampler):
    """First in, first out.

    As a sampler: the oldest rows that may be drawn, each once per sample, oldest first; a sample waits until there are
    enough. As a remover: the oldest rows are overwritten.
    """

    kind: ClassVar[str] = "fifo"
    is_ordered: ClassVar[bool] = True
    is_ring: ClassVar[bool] = True

    def make_selector(self, columns: RowColumns, capacity: int) -> OrderSelector:
        """See :class:`~tdserve.rules.replay.samplers.sampler.Sampler`."""
        return OrderSelector(columns, capacity, is_newest_first=False)

    def make_epoch_order(self, num_rows: int, epoch: int) -> NumberOrder:
        """Returns the order of row numbers, whatever the epoch."""
        return NumberOrder()

    def make_evictor(self, columns: RowColumns, capacity: int) -> None:
        """Returns None: the ring itself is this rule."""


@dataclass(frozen=True)
class Lifo(Sampler):
    """Last in, first out.

    As a sampler: the newest rows that may be drawn, each once per sample, newest first; a sample waits until there are
    enough. As a remover: the newest rows are overwritten, so that the first rows of a table stay.
    """

    kind: ClassVar[str] = "lifo"
    is_ordered: ClassVar[bool] = True
    is_ring: ClassVar[bool] = False

    def make_selector(self, columns: RowColumns, capacity: int) -> OrderSelector:
        """See :class:`~tdserve.rules.replay.samplers.sampler.Sampler`."""
        return OrderSelector(columns, capacity, is_newest_first=True)

    def make_evictor(self, columns: RowColumns, capacity: int) -> OrderSelector:
        """See :class:`~tdserve.rules.replay.remover.Remover`."""
        return OrderSelector(columns, capacity, is_newest_first=True)


class OrderSelector(Selector):
    """The selector of :class:`Fifo` and :class:`Lifo`, and the evictor of the latter; methods as in
    :class:`~tdserve.rules.replay.samplers.selector.Selector` and :class:`~tdserve.rules.replay.remover.Evictor`.

    A row that was drawn stays a member. One that was removed and comes back takes its old place.
    """

    def __init__(self, columns: RowColumns, capacity: int, *, is_newest_first: bool) -> None:
        self._sequence = columns.sequence
        self._rows = OrderedRows(columns.sequence)
        self._capacity = capacity
        self._is_newest_first = is_newest_first
        self._last = 0  # sequence of the last row that was drawn

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<OrderSelector {len(self)} rows, {'newest' if self._is_newest_first else 'oldest'} first>"

    def add(self, rows: Rows) -> None:
        """Adds rows.

        Raises:
            LocalProtocolError: A row is already a member. Nothing was changed.
        """
        self._rows.add(rows)

    def remove(self, rows: Rows) -> None:
        """Removes those rows that are members."""
        self._rows.remove(rows)

    def update(self, rows: Rows) -> None:
        """Does nothing: the order does not depend on priorities."""

    def find_first(self, num_rows: int) -> Rows:
        """Returns the first rows in this order; all members if there are fewer."""
        return self._find_first_beyond(num_rows, beyond=None)

    def draw(self, num_rows: int, *, rng: np.random.Generator, num_drawn: int = 0, num_total: int = 0) -> Drawn | None:
        """Returns the first rows in this order; None if there are fewer.

        Raises:
            InvalidRequestError: The sample has more rows than the capacity.
        """
        num_total = max(num_total, num_rows)
        check_distinct(num_total, self._capacity)
        if num_total - num_drawn > len(self):
            return None
        rows = self._find_first_beyond(num_rows, beyond=self._last if num_drawn else None)
        if len(rows) < num_rows:
            return None
        self._last = int(self._sequence[rows[-1]]) if num_rows else 0
        return Drawn(rows, {})

    def _find_first_beyond(self, num_rows: int, *, beyond: int | None) -> Rows:
        """Returns the first rows behind this sequence; None: behind none."""
        find = self._rows.find_newest if self._is_newest_first else self._rows.find_oldest
        return find(num_rows, beyond=beyond)
