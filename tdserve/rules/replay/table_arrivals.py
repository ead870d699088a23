"""Rows that come to a table: a writer gets rows, fills them, and commits them; or it claims rows by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tdserve.base.errors import WrongStateError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.allocation import promises
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.plans import PLAIN_ARRIVAL, Arrival
from tdserve.rules.replay.row_indexes.live_rows import compact
from tdserve.rules.replay.table_state import TableState


class TableArrivals:
    """Decides which rows of a table a writer gets, and when; makes what it has written visible.

    Args:
        state: State of the table, which its parts share.
    """

    def __init__(self, state: TableState) -> None:
        self._state = state
        settings = state.settings
        self._uses_priority, self._counts_samples = settings.uses_priority, settings.counts_samples
        self._is_reserving = False  # for one writer, in several turns: no other writer gets rows meanwhile

    def reserve(self, num_rows: int) -> Reservation | None:
        """Makes way, and reserves rows for a writer; returns ``None`` if it must wait. The rows are out of every sample
        from now on.

        Raises:
            InvalidRequestError: ``num_rows`` is below 1, or more than the limiter could ever let in at once.
            TooLargeError: ``num_rows`` is above the capacity.
            WrongStateError: The table was closed.
        """
        self.make_way(num_rows)
        return self.reserve_part(num_rows) if self._may_extend(num_rows) else None

    def begin_reserving(self, num_rows: int) -> bool:
        """Makes way, and returns whether a writer may have ``num_rows`` now. If so, it gets them by
        :meth:`reserve_part`, and until :meth:`end_reserving` no other writer gets more. Errors as in
        :meth:`reserve`."""
        self.make_way(num_rows)
        may_extend = self._may_extend(num_rows)
        self._is_reserving |= may_extend
        return may_extend

    def end_reserving(self) -> None:
        """Ends :meth:`begin_reserving`: the writer has its rows, or does not need them any more."""
        self._is_reserving = False

    def make_way(self, num_rows: int) -> None:
        """Prepares the table for another writer: takes back the claim of a sole writer, and promises too if the others
        would leave no room. Draws that are over are forgotten if their rows are needed."""
        state = self._state
        if num_rows <= state.ring.capacity:
            self._forget_draws(num_rows, self._has_room)
        for claim in tuple(state.claims):
            if not claim.is_block or promises.is_far_behind(state.ring, claim.promised):
                claim.take_back()
        if promises.must_end(state.ring, num_rows):
            state.take_back_claims()

    def _forget_draws(self, num_rows: int, has_room: Callable[[int], bool]) -> None:
        """Forgets draws that are over, until there is room for so many rows."""
        state = self._state
        while state.ring.pins and not has_room(num_rows):
            if not state.draws.forget_over(state):
                return

    def _has_room(self, num_rows: int) -> bool:
        """Returns whether this many rows may come before a draw is forgotten. Its rows that all consumers have had, or
        that were sampled for the last time, leave with it, and count for the limiter until then."""
        state = self._state
        limiter = state.settings.limiter
        may_come = not limiter.keeps_rows or limiter.can_insert(state.counts, num_rows)
        return may_come and state.ring.has_room(num_rows)

    def _may_extend(self, num_rows: int) -> bool:
        state = self._state
        if state.is_closed:
            raise WrongStateError(state=f"{state.name!r} is closed", event="an extend")
        has_room = state.ring.has_room(num_rows)
        limiter, counts = state.settings.limiter, state.counts
        limiter.check_insert(counts.capacity, num_rows)
        return has_room and not self._is_reserving and limiter.can_insert(counts, num_rows)

    def reserve_part(self, num_rows: int) -> Reservation | None:
        """Reserves some of the rows that a writer may have; returns ``None`` while others hold or fill too many, or too
        many are kept for ranks. Draws that are over are forgotten if their rows are needed."""
        state = self._state
        self._forget_draws(num_rows, state.ring.has_room)  # others may have been drawn since the first part
        if state.evictor is not None and num_rows > state.ring.num_free:
            missing = num_rows - state.ring.num_free
            if missing > len(state.evictor):  # the others are held
                return None
            state.remove(state.evictor.find_first(missing))
        reservation = state.ring.reserve(num_rows)
        if reservation is not None and len(reservation.evicted):
            state.leave(reservation.evicted)
        return reservation

    def arrive(self, rows: Rows, arrival: Arrival = PLAIN_ARRIVAL, *, is_on_record_later: bool = False) -> None:
        """Records the data of a writer's rows; followed by :meth:`commit` or :meth:`take_back`.

        Args:
            is_on_record_later: Whether their commit comes in another turn; until :meth:`forget_arriving` the state has
                their places in the order of commits.
        """
        state = self._state
        columns = state.columns
        if is_on_record_later:
            before = state.order.last_sequence
            state.arriving.append((before, before + 2 * len(rows)))
        where = compact(rows)
        state.order.append(rows, where, arrival.writers or ((arrival.writer, len(rows)),))
        if self._counts_samples:
            columns.times_sampled[where] = 0
        if self._uses_priority:
            if arrival.priorities is None:
                columns.priority[where] = state.highest_priority
            else:
                columns.priority[where] = arrival.priorities
                state.highest_priority = max(state.highest_priority, float(arrival.priorities.max()))
        for name, ids in arrival.groups.items():
            columns.get_array(name, np.int64)[where] = ids
        if state.selectors.staleness is not None:
            state.selectors.staleness.arrive(rows, arrival.policy_versions)
        state.selectors.arrive(rows, arrival.keys)
        if arrival.keys is not None:
            state.permit_readers()
        if state.columns.trajectories is not None:
            state.columns.trajectories.append(rows, writer=arrival.writer, ends=arrival.ends, ids=arrival.ids)

    def take_back(self, rows: Rows, arrival: Arrival = PLAIN_ARRIVAL) -> None:
        """Undoes what the last :meth:`arrive` of this writer did to its trajectories, for rows that are not committed
        after all."""
        state = self._state
        if state.columns.trajectories is not None:
            state.columns.trajectories.take_back(rows, writer=arrival.writer, ids=arrival.ids)

    def forget_arriving(self) -> None:
        """Drops the arrived rows from the state: they are put on record in this turn, or given up."""
        self._state.arriving.clear()

    def commit(self, reservation: Reservation) -> Rows:
        """Makes a writer's rows visible, and returns their generations.

        Raises:
            WrongStateError: As in :meth:`Ring.commit`.
        """
        state = self._state
        generations = state.ring.commit(reservation)
        state.live.add(reservation.rows)
        state.enter(reservation.rows)
        return generations

    def count_claimable(self, num_rows: int, *, num_promised: int = 0) -> int:
        """Like :meth:`Ring.count_claimable`; 0 unless new rows only have to be the next ones."""
        state = self._state
        if state.is_closed or self._is_reserving or not state.settings.is_plain_ring:
            return num_promised
        return state.ring.count_claimable(min(num_rows, state.ring.capacity // 2), num_promised=num_promised)

    def claim(self, num_rows: int) -> Reservation:
        """Like :meth:`Ring.claim`. The rows are left out of every sample from now on."""
        state = self._state
        rows = state.ring.get_next_rows(num_rows)
        return self._leave_evicted(state.ring.claim(rows, state.live.select_members(rows)))

    def claim_promised(self, rows: Rows) -> Reservation:
        """Like :meth:`Ring.claim_promised`, and as :meth:`claim`."""
        state = self._state
        return self._leave_evicted(state.ring.claim_promised(rows, state.live.select_members(rows)))

    def _leave_evicted(self, reservation: Reservation) -> Reservation:
        if len(reservation.evicted):
            self._state.leave(reservation.evicted)
        return reservation

    def explain_extend(self, num_rows: int) -> str:
        """Returns what a writer waits for now, for the error when it has waited too long."""
        state = self._state
        counts = state.counts
        if not state.settings.limiter.can_insert(counts, num_rows):
            waiting = [f"{consumer!r} has not had {n} rows" for consumer, n in state.selectors.count_backlog().items()]
            reason = state.settings.limiter.explain_insert(counts, state.name, num_rows)
            return f"{reason} ({', '.join(waiting)})" if waiting else reason
        kept = f", {len(state.ring.pins)} are kept for the ranks of a step" if state.ring.pins else ""
        return f"room for {num_rows} rows in {state.name!r} ({counts.reserved} are being written{kept})"
