"""Draws rows and counts how often each was sampled, so that none exceeds its limit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.messages.content import ADDED_DTYPES, POLICY_VERSION_KEY
from tdserve.messages.row_numbers import NO_ROWS, Rows, sort_unique
from tdserve.rules.replay.eligibility.conditional_selectors import ConditionalSelectors
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.selector import Drawn, Selector
from tdserve.rules.replay.settings import Settings


class Draw(NamedTuple):
    """The result of a draw.

    Attributes:
        drawn: Rows and their columns.
        spent: Rows that were sampled for the last time; no selector has them any more.
    """

    drawn: Drawn
    spent: Rows


class Drawing:
    """The draws of one table.

    Args:
        settings: Settings of the table.
        columns: RowColumns of the table.
        selectors: Selectors of the table; they drop rows that were sampled for the last time.
    """

    def __init__(self, settings: Settings, columns: RowColumns, selectors: ConditionalSelectors) -> None:
        self._columns = columns
        self._selectors = selectors
        self._max_times = settings.max_times_sampled
        self._counts_samples = settings.counts_samples
        self._uses_priority = settings.uses_priority

    def draw(
        self,
        selector: Selector,
        num_rows: int,
        *,
        num_batches: int,
        rng: np.random.Generator,
        num_drawn: int = 0,
        num_total: int = 0,
    ) -> Draw | None:
        """Draws batches in turn, or a part of one, see :meth:`Selector.draw`; returns ``None``, and changes nothing, if
        not all of them can be drawn."""
        draws: list[Draw] = []
        for _ in range(num_batches):
            try:
                found = self._draw(selector, num_rows, rng, num_drawn=num_drawn, num_total=num_total or num_rows)
            except InvalidRequestError:
                if not draws:
                    raise
                found = None  # too many only after the batches before: one batch alone is possible
            if found is None:
                for draw in draws:
                    self.undo(draw.drawn.rows, draw.spent)
                return None
            draws.append(found)
        return draws[0] if num_batches == 1 else Draw(_join_drawn([each.drawn for each in draws]), _join_spent(draws))

    def draw_distinct(
        self, selector: Selector, num_rows: int, *, rng: np.random.Generator, num_total: int = 0
    ) -> Draw | None:
        """Draws different rows, whatever the sampler, and removes them from the selector; returns ``None``, and changes
        nothing, if there are too few.

        Args:
            selector: Draws them.
            num_rows: How many.
            rng: Source of randomness.
            num_total: Rows that are still needed, these included; if there are fewer, none are drawn.
        """
        drawn = _take_different(selector, num_rows, rng, num_total=max(num_total, num_rows))
        return None if drawn is None else Draw(self._count(drawn), NO_ROWS)

    def draw_apart(self, selector: Selector, num_rows: int, *, rng: np.random.Generator) -> Draw | None:
        """Draws different rows, whatever the sampler, all at once; they stay in the selector, except those that were
        sampled for the last time. Returns ``None``, and changes nothing, if there are too few."""
        drawn = _take_different(selector, num_rows, rng, num_total=num_rows)
        if drawn is None:
            return None
        selector.add(drawn.rows)
        drawn = self._count(drawn)
        if not self._max_times:
            return Draw(drawn, NO_ROWS)
        spent = sort_unique(drawn.rows[self._columns.times_sampled[drawn.rows] >= self._max_times])
        self._selectors.leave(spent)
        return Draw(drawn, spent)

    def undo(self, rows: Rows, spent: Rows) -> None:
        """Undoes a draw. Rows of ``spent``, which must still be live, may be drawn again."""
        if self._counts_samples:
            np.subtract.at(self._columns.times_sampled, rows, 1)
        if len(spent):
            self._selectors.enter(spent)

    def _draw(
        self, selector: Selector, num_rows: int, rng: np.random.Generator, *, num_drawn: int, num_total: int
    ) -> Draw | None:
        if not self._max_times:
            drawn = selector.draw(num_rows, rng=rng, num_drawn=num_drawn, num_total=num_total)
            return None if drawn is None else Draw(self._count(drawn), NO_ROWS)
        pieces: list[Drawn] = []
        spent: list[Rows] = []
        missing = num_rows
        while missing:
            drawn = selector.draw(missing, rng=rng, num_drawn=num_drawn, num_total=num_total) if len(selector) else None
            if drawn is None:
                self.undo(_join_rows(pieces), np.concatenate(spent) if spent else NO_ROWS)
                return None
            allowed = self._columns.times_sampled[drawn.rows] + _count_occurrences(drawn.rows) < self._max_times
            kept = Drawn(drawn.rows[allowed], {key: column[allowed] for key, column in drawn.columns.items()})
            pieces.append(self._count(kept))
            missing -= len(kept.rows)
            num_drawn += len(kept.rows)
            chosen = sort_unique(drawn.rows)
            over = chosen[self._columns.times_sampled[chosen] >= self._max_times]
            self._selectors.leave(over)
            spent.append(over)
        return Draw(pieces[0] if len(pieces) == 1 else _join_drawn(pieces), np.concatenate(spent))

    def _count(self, drawn: Drawn) -> Drawn:
        rows, columns = drawn
        if self._counts_samples:
            np.add.at(self._columns.times_sampled, rows, 1)
            columns["times_sampled"] = self._columns.times_sampled[rows]
        if self._uses_priority and "priority" not in columns:
            columns["priority"] = self._columns.priority[rows].astype(np.float32)
        if self._selectors.staleness is not None:
            columns[POLICY_VERSION_KEY] = self._selectors.staleness.get_versions(rows)
        # In the order in which they travel: the reader derives it from the settings alone.
        return Drawn(rows, {name: columns[name] for name in ADDED_DTYPES if name in columns})


def _take_different(selector: Selector, num_rows: int, rng: np.random.Generator, *, num_total: int) -> Drawn | None:
    """Removes different rows from a selector by its own draws; returns None, and changes nothing, if it has fewer than
    ``num_total``."""
    pieces: list[Drawn] = []
    missing = num_rows
    while missing:
        drawn = selector.draw(missing, rng=rng, num_total=num_total) if len(selector) >= num_total else None
        if drawn is None:
            selector.add(_join_rows(pieces))
            return None
        places = np.sort(np.unique(drawn.rows, return_index=True)[1])
        kept = Drawn(drawn.rows[places], {key: column[places] for key, column in drawn.columns.items()})
        selector.remove(kept.rows)
        num_total -= len(kept.rows)
        pieces.append(kept)
        missing -= len(kept.rows)
    return pieces[0] if len(pieces) == 1 else _join_drawn(pieces)


def _count_occurrences(rows: Rows) -> NDArray[np.int64]:
    """Returns how often each row occurs before its own place."""
    places = np.arange(len(rows))
    num_bits = len(rows).bit_length()
    keys = np.sort((rows << num_bits) | places)  # four times as fast as to find a stable order
    ordered, order = keys >> num_bits, keys & ((1 << num_bits) - 1)
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    found = np.empty(len(rows), np.int64)
    found[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return found


def _join_rows(pieces: list[Drawn]) -> Rows:
    return np.concatenate([piece.rows for piece in pieces]) if pieces else NO_ROWS


def _join_drawn(pieces: list[Drawn]) -> Drawn:
    keys = pieces[0].columns
    return Drawn(_join_rows(pieces), {key: np.concatenate([piece.columns[key] for piece in pieces]) for key in keys})


def _join_spent(draws: list[Draw]) -> Rows:
    return np.concatenate([each.spent for each in draws])
