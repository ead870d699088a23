"""Rows that leave a table since they were deleted or acknowledged, or are too old.

``server/README.md`` has a reading order of leases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import PIECE_ROWS, Rows
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.eligibility.conditions import OWN
from tdserve.rules.replay.eligibility.staleness import UNKNOWN
from tdserve.rules.replay.plans import Departure
from tdserve.rules.replay.table_state import TableState


class Departures:
    """Decides which rows leave a table, and removes them.

    Args:
        state: State of the table, which its parts share.
    """

    def __init__(self, state: TableState) -> None:
        self._state = state
        self._num_spared = 0  # rows that were too old, and were kept, when the last were discarded

    def discard(self, max_lag: int, *, group: str = "") -> int:
        """Removes rows whose lag is above ``max_lag``, and returns how many; as :meth:`discard_in_pieces`."""
        return sum(self.discard_in_pieces(max_lag, group=group)) if self._count_too_old(max_lag) else 0

    def discard_in_pieces(self, max_lag: int, *, group: str = "") -> Iterator[int]:
        """Removes rows whose lag is above ``max_lag``, except rows on lease and those of kept draws, a piece at a time:
        between two pieces rows may come and go.

        Args:
            group: Name of a column: a group with such a row leaves whole. "": the rows leave alone.
        """
        state = self._state
        staleness = state.selectors.staleness
        if staleness is None:
            return
        floor = staleness.compute_floor(max_lag)
        old: Iterable[Rows] = staleness.iter_pieces(UNKNOWN, floor, piece_rows=PIECE_ROWS // 4)
        if group:
            ids = state.columns.get_array(group, np.int64)
            found = np.unique(ids[self._drop_kept(staleness.find_between(UNKNOWN, floor))])
            everything = state.iter_steps(RowSet.run(0, state.ring.num_used).iter_pieces())
            old = (state.live.select_members(rows[np.isin(ids[rows], found)]) for rows in everything)
        for rows in old:
            leaving = self._drop_kept(rows)
            if len(leaving):
                state.remove(leaving)
                staleness.num_discarded += len(leaving)
            yield len(leaving)
        self._num_spared = self._count_too_old(max_lag)

    def _drop_kept(self, rows: Rows) -> Rows:
        """Returns those of the rows that are neither on lease nor in a kept draw."""
        state = self._state
        if state.ring.pins:
            rows = rows[~state.ring.pins.contains(rows)]
        return rows[~state.selectors.leases.is_leased(rows)] if state.selectors.leases.num_leased else rows

    def count_too_old(self, max_lag: int) -> int:
        """Returns the number of rows that are too old, minus those that the last :meth:`discard` spared."""
        num_rows = self._count_too_old(max_lag)
        self._num_spared = min(self._num_spared, num_rows)  # others have left since
        return num_rows - self._num_spared

    def _count_too_old(self, max_lag: int) -> int:
        staleness = self._state.selectors.staleness
        return 0 if staleness is None else staleness.count(UNKNOWN, staleness.compute_floor(max_lag))

    def remove_had_by_all(self) -> None:
        """Removes rows that all consumers have had, of which a crash has cut off the departure."""
        state = self._state
        for rows in state.iter_steps([state.live.get_rows()] if state.settings.consumers else ()):
            state.remove_had_by_all(rows)

    def find_same_in_parts(self, rows: Rows, generations: NDArray[np.uint32]) -> Iterator[Rows]:
        """Yields those of the rows that are in the table and still have their generation, a part at a time. Between two
        parts rows may come and go: plan their departure with ``newest`` as it was before the first part.

        Raises:
            SelectionError: A number is not that of a row.
        """
        for same in self._state.iter_same_rows(rows, generations, ends_claims=True):
            yield same[self._is_there(same)]

    def plan_departure(self, rows: RowSet, consumer: str = OWN, *, newest: int | None = None) -> Departure:
        """Decides that rows leave the table, or with ``consumer`` that it has had them: then those leave that all have
        had. Claims of writers end; nothing else changes until :meth:`depart_in_pieces`, before which the decision is
        put on record.

        Args:
            newest: Sequence of the newest row that may leave, where the rows were found some turns ago: those that came
                into their places since stay. None: all of them may.
        """
        state = self._state
        state.take_back_claims()
        num_leaving = len(rows)
        if consumer != OWN:
            had_by_all = state.selectors.consumers.select_had_by_all
            num_leaving = len(had_by_all(rows.rows, consumer)) if state.settings.consumers else 0
        newest = state.order.last_sequence if newest is None else newest
        return Departure(rows, len(rows), newest, consumer, num_leaving=num_leaving)

    def plan_clear(self, *, resets_counts: bool = False) -> Departure:
        """Decides that all rows leave, as :meth:`plan_departure`, and lets the limiter start again. Rows that come from
        here on stay. All draws are forgotten.

        Args:
            resets_counts: Whether ``inserts`` counts from 0 again, as the limiter does in any case.
        """
        state = self._state
        state.take_back_claims()
        state.draws.forget_all(state)
        state.totals.clear(resets_inserts=resets_counts)
        everything = self.plan_departure(RowSet.run(0, state.ring.num_used))
        return replace(everything, num_rows=len(state), num_leaving=len(state))

    def depart_in_pieces(self, departure: Departure, *, owner: int = 0) -> Iterator[int]:
        """Carries a departure out, a piece at a time, and yields how many rows; between two pieces rows may come and
        go. Rows that have left by then, or were replaced, are left alone. Those that a sample under way has spent leave
        too: otherwise they would come back if it is undone, or cut short by a crash.

        Args:
            owner: Holder of leases of rows that a consumer has had.
        """
        state = self._state
        for named in state.iter_steps(departure.rows.iter_pieces()):
            state.take_back_claims()  # otherwise a row could be another one by the time it leaves
            rows = named[self._is_there(named) if departure.is_final else state.is_live(named)]
            rows = rows[state.columns.sequence[rows] <= departure.newest]
            if len(rows) and departure.is_final:
                state.remove(rows)
            elif len(rows):
                state.selectors.acknowledge(owner, departure.consumer, rows)
                state.remove_had_by_all(rows)
            yield len(rows)
        # Not after a few rows of a queue: it looks at all holes.
        if departure.is_final and not len(state.ring) and 2 * len(departure.rows) >= state.ring.num_holes:
            state.ring.order_holes()

    def _is_there(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which of these rows are live, or would be live again if all samples under way were undone. There are
        no claims of writers."""
        state = self._state
        is_there = state.is_live(rows)
        if state.under_way:
            generations = state.generations[rows]
            is_spent = (generations > 0) & (generations & 1 == 0) & ~is_there
            for draw in state.draws:  # these leave with it
                is_spent[is_spent] = np.isin(rows[is_spent], draw.spent, invert=True)
            is_there |= is_spent
        return is_there
