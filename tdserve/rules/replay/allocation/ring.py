"""Decides which rows a writer may fill: the ring's cursor, its holes and its reservations. The only writer of
generations, except for rows that a writer claims.

===========  ==========  ========================================================================
state        generation  which writer gets the row next
===========  ==========  ========================================================================
never used   0           the one for which the cursor reaches it
live         even        the one for which the cursor reaches it again: the oldest row goes first
reserved     odd         none, until its writer commits it or gives it up
quarantined  odd         none, until its silent writer is proved gone; then it is a hole
held         both        none, until the write of a part of it has ended
hole         odd         the next one: it was given up incomplete, and comes before the cursor
promised     0 or even   the one to which it is promised, by a claim; the cursor has passed it
overdue      0 or even   the next one behind the holes: its promise has ended
pinned       even        none, until it is unpinned
===========  ==========  ========================================================================

Readers see only the generation: a row is readable while that is even and not 0. A held row is odd only while bytes of
it are written (``hide`` to ``show``); it stays held until its generation is even again, so that no writer takes it in
between.

The lower 44 bits of a generation count commits and are the id of a row: the write of a part changes only the bits
above. They begin at another number in each table, so that rows of a deleted table are not taken for those of the next
of its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import CorruptDataError, InvalidRequestError, TooLargeError
from tdserve.messages.row_numbers import NO_ROWS, PIECE_ROWS, Rows
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.allocation.reservation import Reservation, Reservations
from tdserve.rules.replay.allocation.row_pins import RowPins
from tdserve.rules.replay.allocation.rows_in_line import RowsInLine
from tdserve.rules.replay.allocation.shared_numbers import SharedNumbers
from tdserve.rules.replay.row_indexes.live_rows import compact

_PART_SHIFT = 44
ROW_ID_MASK = (1 << _PART_SHIFT) - 1
"""The part of a generation that identifies the row: a partial write leaves it unchanged."""

_PART_MASK = (1 << 18) - 1
"""Partial writes of a row are counted above the commits, in 18 bits: a reader only has to see a change."""


def compute_first_generation(uid: str) -> int:
    """Returns the generation of a row after its first commit, so that rows of two incarnations of a store differ.

    Args:
        uid: Incarnation of the store.
    """
    return 2 + 2 * int(uid[:7], 16)  # below 2**30: requests carry the lower 32 bits


class Ring:
    """Rows in a circle: the oldest are overwritten first, in the order in which they were reserved.

    Holes are filled before the cursor continues. A row that fills a hole lies among older ones and goes with them, so
    it lives a little shorter than a full round.

    Args:
        capacity: Number of rows, at least 1.
        generations: One int64 per row, written in place; the mapped file that readers see.
        first_generation: Generation of a row after its first commit; even.
        shared: Numbers that readers see.

    Attributes:
        num_left_held: How many rows were given up while they were held, ever.
        num_promised: Rows that single writers may claim.
        pins: Live rows that no writer gets, though they are read and drawn as any other; not promised to any writer.
    """

    def __init__(
        self, capacity: int, generations: Rows, *, first_generation: int = 2, shared: SharedNumbers | None = None
    ) -> None:
        if capacity < 1:
            raise InvalidRequestError(argument="capacity", reason=f"{capacity} is not at least 1")
        if generations.shape != (capacity,) or generations.dtype != np.int64:
            found = f"{generations.dtype} {list(generations.shape)}"
            raise InvalidRequestError(argument="generations", reason=f"int64 [{capacity}] is needed, not {found}")
        self.capacity = capacity
        self.cursor = 0
        self.inserts = 0
        self._has_gone_round = False
        self._shared = SharedNumbers() if shared is None else shared
        self._first_generation = first_generation
        self._generations: Rows = np.asarray(generations)  # the plain array of a memmap: indexing is twice as fast
        self._reservations = Reservations()
        self._in_line = RowsInLine()
        self._is_held = np.zeros(capacity, np.bool_)
        self._num_held = 0
        self._is_promised = np.zeros(capacity, np.bool_)
        self.num_promised = 0
        self.pins = RowPins(capacity)
        self.num_left_held = 0
        self._num_live = 0
        self._num_leaving = 0  # left while they were held
        self._shared.set_used(0)

    @classmethod
    def restore(
        cls,
        capacity: int,
        generations: Rows,
        state: Mapping[str, int],
        *,
        now_reserved: Sequence[Rows] = (),
        held: Rows = NO_ROWS,
        first_generation: int = 2,
        shared: SharedNumbers | None = None,
    ) -> Ring:
        """Restores a ring from the stored generations and state.

        Args:
            capacity: Capacity at creation.
            generations: The stored ones. Even ones above 0 are live, odd ones become holes.
            state: From :meth:`get_state`; it may be some commits old.
            now_reserved: Rows of writers not yet proved gone, one array per writer; the odd ones of each are
                quarantined, in this order in :attr:`quarantined`.
            held: Rows of a partial write that will be completed, see :meth:`hide`; even ones stay live.
            first_generation: First generation at creation.
            shared: As in the constructor.

        Raises:
            CorruptDataError: A generation is negative, or the state contradicts the capacity.
        """
        ring = cls(capacity, generations, first_generation=first_generation, shared=shared)
        ring.cursor, ring.inserts = state.get("cursor", 0), state.get("inserts", 0)
        if not 0 <= ring.cursor < capacity or ring.inserts < 0:
            expected = f"a cursor below {capacity}"
            raise CorruptDataError(path="state of a ring", expected=expected, actual=str(dict(state)))
        if int(generations.min()) < 0:
            raise CorruptDataError(path="generations", expected="0 or more", actual=str(int(generations.min())))
        is_odd = (generations & 1).astype(np.bool_)
        # Rows that were reserved after the state was stored: the cursor had passed them. If it stayed, it would reach
        # them again right after they are filled, and take them for the oldest.
        passed = np.flatnonzero(~np.roll(is_odd, -ring.cursor))
        ring.cursor = (ring.cursor + int(passed[0] if len(passed) else 0)) % capacity
        ring._has_gone_round = bool(generations[ring.cursor :].any())
        ring._shared.set_used(ring.num_used)
        ring._num_live = int(np.count_nonzero(generations)) - int(np.count_nonzero(is_odd))
        for rows in now_reserved:
            kept = rows[is_odd[rows]]
            is_odd[kept] = False
            ring.quarantine(ring._reservations.open(kept, NO_ROWS))
        held = held[is_odd[held]]
        is_odd[held], ring._is_held[held] = False, True
        ring._num_held = len(held)
        ring._in_line.add_holes(np.flatnonzero(is_odd).astype(np.int64, copy=False))
        ring.order_holes()
        never_used = np.flatnonzero(generations[: ring.num_used] == 0).astype(np.int64, copy=False)
        ring._in_line.add_overdue(never_used, generations[never_used])  # they were promised before the restart
        return ring

    def __len__(self) -> int:
        """Returns the number of rows that are live or held."""
        return self._num_live + self._num_held

    def __repr__(self) -> str:
        written = f"{self._num_live} of {self.capacity} live, {self._num_held} held, {self.num_reserved} reserved"
        return f"<Ring {written}, {self.num_holes} holes, cursor {self.cursor}>"

    @property
    def _num_live(self) -> int:
        return self._shared.num_live

    @_num_live.setter
    def _num_live(self, number: int) -> None:
        self._shared.num_live = number

    @property
    def num_held(self) -> int:
        """Number of rows of which a part is written, or is to be."""
        return self._num_held

    @property
    def num_reserved(self) -> int:
        """Number of rows that writers are filling, that are quarantined, or that left while they were held."""
        return self._reservations.num_rows + self._num_leaving

    @property
    def num_holes(self) -> int:
        """Number of rows that were given up, and that the next writer gets."""
        return self._in_line.num_holes

    @property
    def num_free(self) -> int:
        """Number of rows that a writer may have without evicting a live one."""
        return self.capacity - len(self) - self.num_reserved

    @property
    def num_used(self) -> int:
        """Rows from this number on were never used."""
        return self.capacity if self._has_gone_round else self.cursor

    @property
    def quarantined(self) -> tuple[Reservation, ...]:
        """Reservations of writers that are silent and not proved gone, oldest first."""
        return self._reservations.quarantined

    def list_live_rows(self) -> Rows:
        """Returns the row numbers that may be read, sorted."""
        generations = self._generations
        return np.flatnonzero((generations > 0) & (generations & 1 == 0)).astype(np.int64, copy=False)

    def list_rows(self) -> Rows:
        """Returns the numbers of the rows that are live or held, sorted."""
        return np.union1d(self.list_live_rows(), np.flatnonzero(self._is_held))

    def list_piece(self, piece: slice) -> Rows:
        """Returns the numbers of the live or held rows within a piece of all rows, sorted."""
        generations = self._generations[piece]
        is_there = ((generations > 0) & (generations & 1 == 0)) | self._is_held[piece]
        found: Rows = np.flatnonzero(is_there) + piece.start
        return found

    def is_held(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which of these rows are held, and have not left."""
        return np.asarray(self._is_held[rows])

    def select_held(self, rows: RowSet) -> RowSet:
        """Returns those of these rows that are held, and have not left."""
        if not self._num_held:
            return RowSet.run(0, 0)
        if len(rows) > PIECE_ROWS:
            return rows & RowSet.from_mask(self._is_held)
        return RowSet.from_rows((numbers := rows.rows)[self._is_held[numbers]])

    def get_row_ids(self, rows: Rows) -> Rows:
        """Returns the lower parts of the rows' generations, which identify them, as they are when no part is being
        written."""
        return self.get_stamps(rows) & ROW_ID_MASK

    def get_stamps(self, rows: Rows) -> Rows:
        """Returns the rows' generations, which change with every write of a part too, as they are when no part is being
        written."""
        return self._generations[rows] & ~self._is_held[rows].astype(np.int64)

    def get_state(self) -> dict[str, int]:
        """Returns the state that generations do not have and a restart needs."""
        return {"cursor": self.cursor, "inserts": self.inserts}

    def has_room(self, num_rows: int) -> bool:
        """Returns whether a writer could have ``num_rows``, live ones included: others hold or fill the rest, or it is
        promised to them, or pinned. Errors as in :meth:`reserve`."""
        if num_rows < 1:
            raise InvalidRequestError(argument="num_rows", reason=f"{num_rows} is not at least 1")
        if num_rows > self.capacity:
            raise TooLargeError(what="rows of one write", asked=num_rows, free=self.capacity)
        num_taken = self.num_reserved + self._num_held + self.num_promised + len(self.pins)  # held ones perhaps twice
        return num_rows <= self.capacity - num_taken

    def reserve(self, num_rows: int) -> Reservation | None:
        """Reserves rows for one writer and makes them invisible, before it may write a byte of them.

        Returns:
            The rows, or ``None`` if others have reserved so many that the caller must wait. Then nothing was changed.

        Raises:
            InvalidRequestError: ``num_rows`` is below 1.
            TooLargeError: ``num_rows`` is above the capacity: waiting would not help.
        """
        if not self.has_room(num_rows):
            return None
        holes = self._in_line.take_holes(num_rows)
        overdue = self._in_line.take_overdue(num_rows - len(holes), self.get_row_ids, self._is_taken)
        evicted = self._hide_evicted(overdue)
        rows = np.concatenate((holes, overdue)) if len(overdue) else holes
        if len(rows) < num_rows:
            following = self._advance(num_rows - len(rows))
            evicted_too = self._hide_evicted(following)
            evicted = np.concatenate((evicted, evicted_too)) if len(evicted) else evicted_too
            rows = np.concatenate((rows, following)) if len(rows) else following
        self._num_live -= len(evicted)
        return self._reservations.open(rows, evicted)

    def _hide_evicted(self, rows: Rows) -> Rows:
        """Makes rows odd that were live or never used; returns those that were live."""
        where = compact(rows)
        before = self._generations[where]
        is_live = before > 0
        self._generations[where] = before + 1
        return rows if is_live.all() else rows[is_live]

    def join(self, parts: Sequence[Reservation], rows: Rows) -> Reservation:
        """Joins several open reservations to one.

        Args:
            parts: They are not used any more.
            rows: Their rows, concatenated.
        """
        for part in parts:  # thousands of a long extend
            self._reservations.close(part, "joining")
        return self._reservations.open(rows, NO_ROWS)

    def split(self, reservation: Reservation, num_rows: int) -> tuple[Reservation, Reservation | None]:
        """Splits an open reservation in two: its first rows, and the others, if there are any."""
        if num_rows >= len(reservation):
            return reservation, None
        self._reservations.close(reservation, "splitting")
        first, others = np.split(reservation.rows, [num_rows])
        return self._reservations.open(first, NO_ROWS), self._reservations.open(others, NO_ROWS)

    def reserve_holes(self) -> Reservation | None:
        """Reserves all rows that were given up, to clean up after them before :meth:`abort`; None if there are none."""
        holes = self._in_line.take_holes(self.num_holes)
        return self._reservations.open(holes, NO_ROWS) if len(holes) else None

    def count_claimable(self, num_rows: int, *, num_promised: int = 0) -> int:
        """Returns how many rows from the cursor on, up to ``num_rows``, a writer may claim in order.

        It is 0 if there are holes or overdue rows, which are filled first; otherwise the rows before the first that is
        reserved, held, promised or pinned.

        Args:
            num_promised: Rows that it may claim already, and may be claiming now.
        """
        num_rows = min(num_rows, self.capacity)
        if num_rows <= num_promised or not self._in_line.is_empty:
            return num_promised
        num_free = num_promised
        for piece in self._find_slices_at_cursor(num_promised, num_rows):
            is_taken = self._is_taken(piece)
            if np.count_nonzero(is_taken):
                return num_free + int(np.argmax(is_taken))
            num_free += len(is_taken)
        return num_free

    def get_next_rows(self, num_rows: int) -> Rows:
        """Returns the rows at the cursor, whatever their state."""
        pieces = [np.arange(piece.start, piece.stop) for piece in self._find_slices_at_cursor(0, num_rows)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _find_slices_at_cursor(self, start: int, stop: int) -> list[slice]:
        """Returns where the rows from ``start`` to ``stop`` behind the cursor lie; at most ``capacity`` of them."""
        start, stop = self.cursor + start, self.cursor + stop
        if start < self.capacity < stop:
            return [slice(start, self.capacity), slice(0, stop - self.capacity)]
        wrapped = self.capacity if start >= self.capacity else 0
        return [slice(start - wrapped, stop - wrapped)]

    def claim(self, rows: Rows, evicted: Rows) -> Reservation:
        """Reserves the next rows for a writer that has claimed them by itself.

        Args:
            rows: From :meth:`get_next_rows`.
            evicted: Those of them that are live, as far as this process knows: the writer may already have made them
                odd.
        """
        self._generations[rows] |= 1
        self._num_live -= len(evicted)
        self._move_cursor((self.cursor + len(rows)) % self.capacity)
        return self._reservations.open(rows, evicted)

    def promise(self, num_rows: int) -> Rows:
        """Promises the next rows to one writer, and returns them. They stay live until it claims them.

        Args:
            num_rows: At most :meth:`count_claimable`.
        """
        rows = self.get_next_rows(num_rows)
        self._is_promised[rows] = True
        self.num_promised += num_rows
        self._move_cursor((self.cursor + num_rows) % self.capacity)
        return rows

    def claim_promised(self, rows: Rows, evicted: Rows) -> Reservation:
        """Reserves promised rows for the writer that has claimed them; arguments as in :meth:`claim`."""
        self._generations[rows] |= 1
        self._num_live -= len(evicted)
        self._keep_promise(rows)
        return self._reservations.open(rows, evicted)

    def end_promise(self, rows: Rows) -> None:
        """Ends the promise of rows that were not claimed, in their order in the ring. They are next in line."""
        if not len(rows):
            return
        self._keep_promise(rows)
        if (int(rows[-1]) + 1) % self.capacity == self.cursor:
            self.cursor = int(rows[0])
            self._shared.set_used(self.num_used)
        else:
            self._in_line.add_overdue(rows, self.get_row_ids(rows))

    def _keep_promise(self, rows: Rows) -> None:
        self._is_promised[rows] = False
        self.num_promised -= len(rows)

    def resume(self, reservation: Reservation) -> None:
        """Reopens rows that were quarantined since a restart: they were filled before it.

        Raises:
            WrongStateError: The reservation is not quarantined. Nothing was changed.
        """
        self._reservations.resume(reservation)

    def commit(self, reservation: Reservation) -> Rows:
        """Makes the rows live, all of them at once for all users of this object.

        Returns:
            Their new generations.

        Raises:
            WrongStateError: The reservation is not open: committed, aborted or quarantined. Nothing was changed.
        """
        self._reservations.close(reservation, "committing")
        committed = self.compute_generations(reservation)
        self._generations[compact(reservation.rows)] = committed
        self._num_live += len(reservation)
        self.inserts += len(reservation)
        return committed

    def compute_generations(self, reservation: Reservation) -> Rows:
        """Returns the generations that a commit gives these rows."""
        committed: Rows = self._generations[compact(reservation.rows)] + 1
        is_first = committed == 2
        if np.count_nonzero(is_first):
            committed[is_first] = self._first_generation
        return committed

    def abort(self, reservation: Reservation) -> None:
        """Gives the rows up, for a writer that is proved gone or never began. They become holes.

        Raises:
            WrongStateError: The reservation is not open. Nothing was changed.
        """
        self._reservations.close(reservation, "aborting")
        self._in_line.add_holes(reservation.rows)

    def quarantine(self, reservation: Reservation) -> None:
        """Quarantines the rows of a silent writer: it may still write, but not commit.

        Raises:
            WrongStateError: The reservation is not open. Nothing was changed.
        """
        self._reservations.quarantine(reservation)

    def release(self, reservation: Reservation) -> None:
        """Ends a quarantine: the writer is proved gone. Its rows become holes.

        Raises:
            WrongStateError: The reservation is not quarantined. Nothing was changed.
        """
        self._reservations.release(reservation)
        self._in_line.add_holes(reservation.rows)

    def free(self, rows: Rows) -> None:
        """Gives up live or held rows, each named once, that were deleted or consumed. They become holes; held ones when
        the hold ends, since they are still being written."""
        self._generations[rows] |= 1
        self.pins.drop(rows)
        is_held = self._is_held[rows]
        if np.count_nonzero(is_held):
            held, rows = rows[is_held], rows[~is_held]
            self._is_held[held] = False
            self._num_held -= len(held)
            self._num_leaving += len(held)
            self.num_left_held += len(held)
        self._num_live -= len(rows)
        self._in_line.add_holes(rows)

    def order_holes(self) -> None:
        """Has holes filled from the cursor on: so the next round evicts rows in the order in which they came."""
        self._in_line.put_first(self.cursor)

    def hold(self, rows: Rows) -> None:
        """Holds live rows, each named once, a part of which is to be written: no writer gets them until
        :meth:`let_go`, and they are not reserved meanwhile. Call :meth:`hide` before the first byte is written, and
        :meth:`show` behind the last."""
        self._is_held[rows] = True
        self._num_live -= len(rows)
        self._num_held += len(rows)

    def hide(self, rows: Rows) -> None:
        """Makes held rows unreadable, whether they were given up meanwhile or not."""
        self._generations[rows] |= 1

    def show(self, rows: Rows, *, num_parts: int = 1) -> None:
        """Ends :meth:`hide`, except for rows that were given up meanwhile. The generations of the others have changed,
        but not the lower parts: they are still the same rows.

        Args:
            num_parts: Parts of each that were written; 0: none, and they have the generations of before.
        """
        rows = rows[self._is_held[rows]]
        hidden = self._generations[rows]
        parts = ((hidden >> _PART_SHIFT) + num_parts) & _PART_MASK
        self._generations[rows] = ((hidden - 1) & ROW_ID_MASK) | (parts << _PART_SHIFT)

    def let_go(self, rows: Rows) -> Rows:
        """Ends :meth:`hold`.

        Returns:
            Those that are live again: all but the ones that were given up meanwhile.
        """
        is_held = self._is_held[rows]
        if not is_held.all():
            given_up, rows = rows[~is_held], rows[is_held]
            self._num_leaving -= len(given_up)
            self._in_line.add_holes(given_up)
        self._is_held[rows] = False
        self._num_live += len(rows)
        self._num_held -= len(rows)
        return rows

    def _advance(self, num_rows: int) -> Rows:
        """Returns the next free rows from the cursor; the caller took all holes and knows that there are enough."""
        start = self.cursor
        end = start + num_rows
        if end <= self.capacity and not np.count_nonzero(self._is_taken(slice(start, end))):
            self._move_cursor(end % self.capacity)
            return np.arange(start, end)
        found: list[Rows] = []
        missing = num_rows
        step = num_rows
        while missing:
            # Doubling steps: a long stretch of reserved rows costs a few passes, not one per row.
            end = min(start + step, self.capacity)
            free = np.flatnonzero(~self._is_taken(slice(start, end)))[:missing] + start
            found.append(free)
            missing -= len(free)
            start = (int(free[-1]) + 1 if not missing else end) % self.capacity
            step = max(step * 2, 1024)
        self._move_cursor(start)
        return np.concatenate(found)

    def _is_taken(self, piece: slice | Rows) -> NDArray[np.bool_]:
        """Returns which of some rows no other writer may have."""
        is_taken = (self._generations[piece] & 1).astype(np.bool_)
        if self._num_held:
            is_taken |= self._is_held[piece]
        if self.num_promised:
            is_taken |= self._is_promised[piece]
        return is_taken | self.pins.contains(piece) if self.pins else is_taken

    def _move_cursor(self, cursor: int) -> None:
        """Moves the cursor; it never returns to where it was, since there are never that many reserved rows, except at
        the start."""
        self._has_gone_round |= cursor <= self.cursor
        self.cursor = cursor
        self._shared.set_used(self.num_used)
