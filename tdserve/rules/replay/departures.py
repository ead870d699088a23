"""Rows that leave a table since they were deleted, acknowledged or sampled for the last time, or are too old; and rows
that are kept in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import WrongStateError
from tdserve.messages.row_numbers import NO_ROWS, PIECE_ROWS, Rows, sort_unique
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.allocation import promises
from tdserve.rules.replay.eligibility.conditional_selectors import MAX_LOOKED_AT
from tdserve.rules.replay.eligibility.conditions import OWN
from tdserve.rules.replay.eligibility.leases import ACKNOWLEDGING, RENEWING, make_not_held_error
from tdserve.rules.replay.eligibility.staleness import UNKNOWN
from tdserve.rules.replay.plans import Departure
from tdserve.rules.replay.table_state import TableState


class Departures(TableState):
    """A table of which rows are deleted, consumed, discarded, spent, or kept for readers.

    Arguments and errors as in ``TableState``.
    """

    def make_way(self, num_rows: int) -> None:
        """Prepares the table for another writer: takes back the claim of a sole writer, and promises too if the others
        would leave no room. Draws that are over are forgotten if their rows are needed."""
        if num_rows <= self.ring.capacity:
            self._forget_draws(num_rows, self._has_room)
        for claim in tuple(self.claims):
            if not claim.is_block or promises.is_far_behind(self.ring, claim.promised):
                claim.take_back()
        if promises.must_end(self.ring, num_rows):
            self.take_back_claims()

    def _forget_draws(self, num_rows: int, has_room: Callable[[int], bool]) -> None:
        """Forgets draws that are over, until there is room for so many rows."""
        while self.ring.pins and not has_room(num_rows):
            if not self.draws.forget_over(self):
                return

    def _has_room(self, num_rows: int) -> bool:
        """Returns whether this many rows may come before a draw is forgotten. Its rows that all consumers have had, or
        that were sampled for the last time, leave with it, and count for the limiter until then."""
        limiter = self.settings.limiter
        may_come = not limiter.keeps_rows or limiter.can_insert(self.counts, num_rows)
        return may_come and self.ring.has_room(num_rows)

    def discard(self, max_lag: int, *, group: str = "") -> int:
        """Removes rows whose lag is above ``max_lag``, and returns how many; as :meth:`discard_in_pieces`."""
        return sum(self.discard_in_pieces(max_lag, group=group)) if self._count_too_old(max_lag) else 0

    def discard_in_pieces(self, max_lag: int, *, group: str = "") -> Iterator[int]:
        """Removes rows whose lag is above ``max_lag``, except rows on lease and those of kept draws, a piece at a time:
        between two pieces rows may come and go.

        Args:
            group: Name of a column: a group with such a row leaves whole. "": the rows leave alone.
        """
        staleness = self.selectors.staleness
        if staleness is None:
            return
        floor = staleness.compute_floor(max_lag)
        old: Iterable[Rows] = staleness.iter_pieces(UNKNOWN, floor, piece_rows=PIECE_ROWS // 4)
        if group:
            ids = self.columns.get_array(group, np.int64)
            found = np.unique(ids[self._drop_kept(staleness.find_between(UNKNOWN, floor))])
            everything = self.iter_steps(RowSet.run(0, self.ring.num_used).iter_pieces())
            old = (self._live.select_members(rows[np.isin(ids[rows], found)]) for rows in everything)
        for rows in old:
            leaving = self._drop_kept(rows)
            if len(leaving):
                self.remove(leaving)
                staleness.num_discarded += len(leaving)
            yield len(leaving)
        self.num_spared = self._count_too_old(max_lag)

    def _drop_kept(self, rows: Rows) -> Rows:
        """Returns those of the rows that are neither on lease nor in a kept draw."""
        if self.ring.pins:
            rows = rows[~self.ring.pins.contains(rows)]
        return rows[~self.selectors.leases.holds(rows)] if self.selectors.leases.num_leased else rows

    def count_too_old(self, max_lag: int) -> int:
        """Returns the number of rows that are too old, minus those that the last :meth:`discard` spared."""
        num_rows = self._count_too_old(max_lag)
        self.num_spared = min(self.num_spared, num_rows)  # others have left since
        return num_rows - self.num_spared

    def _count_too_old(self, max_lag: int) -> int:
        staleness = self.selectors.staleness
        return 0 if staleness is None else staleness.count(UNKNOWN, staleness.compute_floor(max_lag))

    def get_row_ids(self, rows: Rows) -> Rows:
        """See :meth:`Ring.get_row_ids`."""
        return self.ring.get_row_ids(rows)

    def pin(self, rows: Rows) -> None:
        """Keeps live rows, each named once, from being overwritten until :meth:`unpin`; no claims of writers remain."""
        self.take_back_claims()
        self.ring.pins.add(rows)
        if self._evictor is not None:
            self._evictor.remove(rows)

    def unpin(self, rows: Rows) -> None:
        """Ends one :meth:`pin` of rows that have not left since. Those that all consumers have had leave."""
        loose = self.ring.pins.remove(rows)
        self._remove_had_by_all(loose)
        self._renew_evictable(self._live.select_members(loose))

    def _renew_evictable(self, rows: Rows) -> None:
        """Lets live rows make room again, each named once, if nothing else keeps them; some may do so already."""
        if self._evictor is not None:
            self._evictor.remove(rows)
            self._evictor.add(rows[~(self.ring.pins.contains(rows) | self.ring.is_held(rows))])

    def describe_kept(self, consumer: str, *, max_rows: int = MAX_LOOKED_AT) -> str:
        """Returns how many rows a consumer has had that draws keep in the table; "" if none are.

        Args:
            max_rows: Most rows that are looked at.
        """
        if consumer == OWN or not self.ring.pins:
            return ""
        rows = np.concatenate([NO_ROWS, *(draw.rows[: max_rows + 1] for draw in self.draws)])
        more = "at least " if len(rows) > max_rows else ""
        rows = self._live.select_members(sort_unique(rows[:max_rows]))
        num_had = self.selectors.count_had(consumer, rows[self.ring.pins.contains(rows)])
        return f"{more}{num_had} that {consumer!r} has had are kept for the ranks of a step" if num_had else ""

    def consume(self, consumer: str, rows: Rows) -> None:
        """Notes that a named consumer has had rows, each named once."""
        if consumer != OWN:
            self.selectors.consume(consumer, rows)

    def remove_had_by_all(self) -> None:
        """Removes rows that all consumers have had, of which a crash has cut off the departure."""
        for rows in self.iter_steps([self._live.get_rows()] if self.settings.consumers else ()):
            self._remove_had_by_all(rows)

    def _remove_had_by_all(self, rows: Rows) -> None:
        """Removes those of the rows that all consumers have had; rows of kept draws leave with the last of these."""
        rows = self._live.select_members(self.selectors.select_had_by_all(rows))
        if self.ring.pins:
            rows = rows[~self.ring.pins.contains(rows)]
        if len(rows):
            self.remove(rows)

    def spend(self, rows: Rows) -> None:
        """Makes rows unavailable that were sampled for the last time: they are on their way out."""
        self._live.remove(rows)
        self.selectors.leave(rows)
        self.columns.times_sampled[rows] = self.settings.max_times_sampled

    def find_same_in_parts(self, rows: Rows, generations: NDArray[np.uint32]) -> Iterator[Rows]:
        """Yields those of the rows that are in the table and still have their generation, a part at a time. Between two
        parts rows may come and go: plan their departure with ``newest`` as it was before the first part.

        Raises:
            SelectionError: A number is not that of a row.
        """
        for same in self._iter_same_rows(rows, generations, ends_claims=True):
            yield same[self._is_there(same)]

    def plan_departure(self, rows: RowSet, consumer: str = OWN, *, newest: int | None = None) -> Departure:
        """Decides that rows leave the table, or with ``consumer`` that it has had them: then those leave that all have
        had. Claims of writers end; nothing else changes until :meth:`depart_in_pieces`, before which the decision is
        put on record.

        Args:
            newest: Sequence of the newest row that may leave, where the rows were found some turns ago: those that came
                into their places since stay. None: all of them may.
        """
        self.take_back_claims()
        num_leaving = len(rows)
        if consumer != OWN:
            num_leaving = len(self.selectors.select_had_by_all(rows.rows, consumer)) if self.settings.consumers else 0
        newest = self.order.last_sequence if newest is None else newest
        return Departure(rows, len(rows), newest, consumer, num_leaving=num_leaving)

    def depart_in_pieces(self, departure: Departure, *, owner: int = 0) -> Iterator[int]:
        """Carries a departure out, a piece at a time, and yields how many rows; between two pieces rows may come and
        go. Rows that have left by then, or were replaced, are left alone. Those that a sample under way has spent leave
        too: otherwise they would come back if it is undone, or cut short by a crash.

        Args:
            owner: Holder of leases of rows that a consumer has had.
        """
        for named in self.iter_steps(departure.rows.iter_pieces()):
            self.take_back_claims()  # otherwise a row could be another one by the time it leaves
            rows = named[self._is_there(named) if departure.is_final else self.is_live(named)]
            rows = rows[self.columns.sequence[rows] <= departure.newest]
            if len(rows) and departure.is_final:
                self.remove(rows)
            elif len(rows):
                self.selectors.acknowledge(owner, departure.consumer, rows)
                self._remove_had_by_all(rows)
            yield len(rows)
        # Not after a few rows of a queue: it looks at all holes.
        if departure.is_final and not len(self.ring) and 2 * len(departure.rows) >= self.ring.num_holes:
            self.ring.order_holes()

    def _is_there(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which of these rows are live, or would be live again if all samples under way were undone. There are
        no claims of writers."""
        is_there = self.is_live(rows)
        if self._under_way:
            generations = self._generations[rows]
            is_spent = (generations > 0) & (generations & 1 == 0) & ~is_there
            for draw in self.draws:  # these leave with it
                is_spent[is_spent] = np.isin(rows[is_spent], draw.spent, invert=True)
            is_there |= is_spent
        return is_there

    def plan_clear(self, *, resets_counts: bool = False) -> Departure:
        """Decides that all rows leave, as :meth:`plan_departure`, and lets the limiter start again. Rows that come from
        here on stay. All draws are forgotten.

        Args:
            resets_counts: Whether ``inserts`` counts from 0 again, as the limiter does in any case.
        """
        self.take_back_claims()
        self.draws.forget_all(self)
        self._cleared = (self.ring.inserts, self.num_samples)
        self._num_clears += 1
        if resets_counts:
            self._reset_inserts = self.ring.inserts
        everything = self.plan_departure(RowSet.run(0, self.ring.num_used))
        return replace(everything, num_rows=len(self), num_leaving=len(self))

    def find_acknowledged_in_parts(
        self,
        owner: int,
        consumer: str,
        rows: Rows,
        generations: NDArray[np.uint32] | None,
        *,
        request: int = 0,
        event: str = ACKNOWLEDGING,
    ) -> Iterator[Rows]:
        """Yields the rows of an owner's lease among these, a part at a time: those that it may acknowledge. Between two
        parts rows may come and go, but the owner may not give any back, and no lease whose time is over may end.

        Args:
            generations: Lower halves, as in the lease: a row that has another one now is not the row that was leased.
            request: As in ``Leases.find_held``.
            event: What the owner wants to do with them, for errors.

        Raises:
            WrongStateError: After the last part: it does not hold all of them (of a named consumer: any of them).
        """
        num_same = num_held = 0
        for same in self._iter_same_rows(rows, generations):
            is_held = self.selectors.leases.find_held(owner, same, consumer, request=request)
            num_same += len(same)
            num_held += int(np.count_nonzero(is_held))
            yield same[is_held]
        was_over = request > 0 and self.selectors.leases.was_over(owner, request)
        if consumer == OWN and num_same < len(rows):
            why = "after their lease had ended" if was_over else "perhaps acknowledged before"
            state = f"{len(rows) - num_same} of these {len(rows)} rows have left the table, {why}"
            raise WrongStateError(state=state, event=event)
        if not num_same:
            ended = ", and their lease has ended" if was_over else ""
            raise WrongStateError(state=f"none of these rows is held{ended}", event=event)
        if num_held < (num_same if consumer == OWN else 1):
            raise make_not_held_error(num_same - num_held, num_same, event=event, was_over=was_over)

    def renew_in_parts(
        self,
        owner: int,
        consumer: str,
        rows: Rows,
        generations: NDArray[np.uint32] | None,
        end_s: float,
        *,
        request: int = 0,
    ) -> Iterator[int]:
        """Has the leases of these rows end at another time, a part at a time, and yields how many rows each part has;
        arguments and errors as in :meth:`find_acknowledged_in_parts`. In an error nothing was changed."""
        for _ in self.find_acknowledged_in_parts(owner, consumer, rows, generations, request=request, event=RENEWING):
            yield 0
        for same in self._iter_same_rows(rows, generations):
            held = same[self.selectors.leases.find_held(owner, same, consumer, request=request)]
            self.selectors.leases.renew(owner, held, consumer, end_s)
            yield len(held)

    def give_back_in_parts(
        self,
        owner: int,
        consumer: str,
        rows: Rows,
        generations: NDArray[np.uint32] | None,
        *,
        request: int = 0,
        uncounts: bool = False,
    ) -> Iterator[int]:
        """Gives rows of an owner's lease back, a part at a time: they are available to others again. Rows that it does
        not hold (any more), such as overwritten ones, are ignored. Between two parts rows may come and go.

        Args:
            request: As in ``Leases.find_held``.
            uncounts: Whether they do not count as sampled any more.

        Raises:
            SelectionError: A number is not that of a row. Nothing was changed.
        """
        for _ in self._iter_same_rows(rows, generations):
            yield 0
        for same in self._iter_same_rows(rows, generations):
            named = sort_unique(same)
            held = named[self.selectors.leases.find_held(owner, named, consumer, request=request)]
            self.selectors.give_back(owner, consumer, held)
            self.shared.num_sampled -= len(held) * uncounts
            yield len(named)

    def _iter_same_rows(
        self, rows: Rows, generations: NDArray[np.uint32] | None, *, ends_claims: bool = False
    ) -> Iterator[Rows]:
        """Yields those rows that still have their generation.

        Args:
            ends_claims: Whether claims of writers end before each part, so that it is known which rows they have
                filled.
        """
        # What a consumer has had is in a file: each of its rows may need a page that was written to the disk meanwhile.
        step_rows = self.step_rows if self.selectors.is_plain else self.step_rows // 2
        for start in range(0, max(len(rows), 1), step_rows):
            part = slice(start, start + step_rows)
            if ends_claims:
                self.take_back_claims()
            self.check_numbers(rows[part])
            yield rows[part][self._is_same(rows[part], None if generations is None else generations[part])]
