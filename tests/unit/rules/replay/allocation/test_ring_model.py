from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from tdserve.base.errors import WrongStateError
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.allocation.promises import must_end
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.allocation.ring import Ring
from tests.state_machines import make_tests

_CAPACITY = 13


class _AgainstALoop(RuleBasedStateMachine):
    """The ring beside the simplest thing that obeys the same rules, one row at a time."""

    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.generations = np.zeros(_CAPACITY, np.int64)
        self.ring = Ring(_CAPACITY, self.generations)
        self.owner: dict[int, Reservation] = {}
        self.live: set[int] = set()
        self.holes: list[int] = []
        self.cursor = 0
        self.inserts = 0
        self.state: dict[int, str] = {}
        self.held: set[int] = set()
        self.hidden: set[int] = set()  # of those that are held
        self.left: set[int] = set()  # while they were held
        self.promised: list[list[int]] = []
        self.overdue: list[int] = []

    def _expected_rows(self, num_rows: int) -> list[int]:
        rows, self.holes = self.holes[:num_rows], self.holes[num_rows:]
        while len(rows) < num_rows and self.overdue:
            row = self.overdue.pop(0)
            if row not in self.held:
                rows.append(row)
        while len(rows) < num_rows:
            if self.cursor not in {*self.owner, *self.holes, *self.held, *self.left, *rows, *self.all_promised}:
                rows.append(self.cursor)
            self.cursor = (self.cursor + 1) % _CAPACITY
        return rows

    @property
    def all_promised(self) -> set[int]:
        return {row for rows in self.promised for row in rows}

    @rule(num_rows=st.integers(1, _CAPACITY // 2))
    def promise(self, num_rows: int) -> None:
        taken = {*self.owner, *self.holes, *self.held, *self.left, *self.all_promised}
        in_line = bool(self.holes or self.overdue)
        rows = [(self.cursor + number) % _CAPACITY for number in range(num_rows)]
        free = next((number for number, row in enumerate(rows) if row in taken), num_rows)
        assert self.ring.count_claimable(num_rows) == (0 if in_line else free)
        if not in_line and free:
            before = self.generations.copy()
            assert self.ring.promise(free).tolist() == rows[:free]
            assert (self.generations == before).all(), "they stay live"
            self.promised.append(rows[:free])
            assert must_end(self.ring, _CAPACITY), "they leave no room for all rows"
            self.cursor = (self.cursor + free) % _CAPACITY

    @rule(target=reservations, which=st.integers(0, 3), num_rows=st.integers(1, _CAPACITY))
    def claim_promised(self, which: int, num_rows: int) -> Any:
        if which >= len(self.promised):
            return None
        rows, rest = self.promised[which][:num_rows], self.promised[which][num_rows:]
        self.promised[which] = rest
        evicted = [row for row in rows if row in self.live]
        reservation = self.ring.claim_promised(np.array(rows, np.int64), np.array(evicted, np.int64))
        if not rest:
            del self.promised[which]
        self.live -= set(rows)
        self.owner.update(dict.fromkeys(rows, reservation))
        self.state[id(reservation)] = "open"
        return reservation

    @rule(which=st.integers(0, 3))
    def end_promise(self, which: int) -> None:
        if which < len(self.promised):
            rows = self.promised.pop(which)
            self.ring.end_promise(np.array(rows, np.int64))
            if (rows[-1] + 1) % _CAPACITY == self.cursor:
                self.cursor = rows[0]
            else:
                self.overdue += rows

    @rule(target=reservations, num_rows=st.integers(1, _CAPACITY))
    def reserve(self, num_rows: int) -> Any:
        before = self.generations.copy()
        reservation = self.ring.reserve(num_rows)
        if num_rows > _CAPACITY - len(self.owner) - len(self.held) - len(self.left) - len(self.all_promised):
            assert reservation is None
            assert (before == self.generations).all()
            return None
        assert reservation is not None
        rows = reservation.rows.tolist()
        assert not set(rows) & (self.owner.keys() | self.held | self.left), "a row was given to two writers"
        assert rows == self._expected_rows(num_rows)
        assert reservation.evicted.tolist() == [row for row in rows if row in self.live]
        self.live -= set(rows)
        self.owner.update(dict.fromkeys(rows, reservation))
        self.state[id(reservation)] = "open"
        return reservation

    def _may(self, reservation: Reservation | None, needed: str, event: str) -> bool:
        """Performs the event if it is legal, else proves that it is refused and changes nothing."""
        if reservation is None:
            return False
        if self.state.get(id(reservation)) == needed:
            return True
        before = (self.generations.copy(), repr(self.ring))
        with pytest.raises(WrongStateError):
            getattr(self.ring, event)(reservation)
        assert (before[0] == self.generations).all()
        assert before[1] == repr(self.ring)
        return False

    def _gone(self, reservation: Reservation) -> None:
        for row in reservation.rows.tolist():
            del self.owner[row]
        self.state[id(reservation)] = "closed"

    @rule(reservation=reservations)
    def commit(self, reservation: Reservation | None) -> None:
        if not self._may(reservation, "open", "commit") or reservation is None:
            return
        before = self.generations[reservation.rows]
        generations = self.ring.commit(reservation)
        assert (generations == self.generations[reservation.rows]).all()
        assert (generations == before + 1).all()
        self._gone(reservation)
        self.live |= set(reservation.rows.tolist())
        self.inserts += len(reservation)

    @rule(reservation=reservations)
    def abort(self, reservation: Reservation | None) -> None:
        if self._may(reservation, "open", "abort") and reservation is not None:
            self.ring.abort(reservation)
            self._gone(reservation)
            self.holes += reservation.rows.tolist()

    @rule(reservation=reservations)
    def quarantine(self, reservation: Reservation | None) -> None:
        if self._may(reservation, "open", "quarantine") and reservation is not None:
            self.ring.quarantine(reservation)
            self.state[id(reservation)] = "quarantined"

    @rule(reservation=reservations)
    def release(self, reservation: Reservation | None) -> None:
        if self._may(reservation, "quarantined", "release") and reservation is not None:
            self.ring.release(reservation)
            self._gone(reservation)
            self.holes += reservation.rows.tolist()

    @rule(numbers=st.lists(st.integers(0, _CAPACITY - 1), unique=True))
    def free(self, numbers: list[int]) -> None:
        rows = [row for row in numbers if row in (self.live | self.held) - self.all_promised]
        self.overdue = [row for row in self.overdue if row not in rows]
        self.ring.free(np.array(rows, np.int64))
        self.holes += [row for row in rows if row in self.live]
        self.left |= self.held & set(rows)
        self.live -= set(rows)
        self.held -= set(rows)
        self.hidden -= set(rows)

    @rule(numbers=st.lists(st.integers(0, _CAPACITY - 1), unique=True))
    def hold(self, numbers: list[int]) -> None:
        rows = [row for row in numbers if row in self.live - self.all_promised]
        self.ring.hold(np.array(rows, np.int64))
        self.live -= set(rows)
        self.held |= set(rows)

    @rule(numbers=st.lists(st.integers(0, _CAPACITY - 1), unique=True))
    def hide(self, numbers: list[int]) -> None:
        rows = [row for row in numbers if row in self.held | self.left]
        names = self.ring.get_row_ids(np.array(rows, np.int64))
        self.ring.hide(np.array(rows, np.int64))
        assert (self.ring.get_row_ids(np.array(rows, np.int64)) == names).all()
        self.hidden |= self.held & set(rows)

    @rule(numbers=st.lists(st.integers(0, _CAPACITY - 1), unique=True))
    def show(self, numbers: list[int]) -> None:
        rows = np.array([row for row in numbers if row in self.hidden], np.int64)
        names, before = self.ring.get_row_ids(rows), self.generations[rows]
        self.ring.show(np.array([row for row in numbers if row in self.hidden | self.left], np.int64))
        assert (self.generations[rows] != before - 1).all()
        assert (self.generations[rows] & ((1 << 44) - 1) == names).all(), "still the same rows"
        assert (self.ring.get_row_ids(rows) == names).all()
        self.hidden -= set(rows.tolist())

    @rule(numbers=st.lists(st.integers(0, _CAPACITY - 1), unique=True))
    def let_go(self, numbers: list[int]) -> None:
        given_up = [row for row in numbers if row in self.left]
        rows = np.array([row for row in numbers if row in self.held - self.hidden], np.int64)
        before = self.generations.copy()
        assert self.ring.let_go(
            np.array([row for row in numbers if row in (self.held - self.hidden) | self.left], np.int64)
        ).tolist() == (rows.tolist())
        assert (self.generations == before).all()
        self.left -= set(given_up)
        self.holes += given_up
        self.held -= set(rows.tolist())
        self.live |= set(rows.tolist())

    @precondition(lambda self: "quarantined" not in self.state.values())
    @rule()
    def restart(self) -> None:
        held = np.array(sorted(self.held), np.int64)
        self.ring = Ring.restore(_CAPACITY, self.generations, self.ring.get_state(), held=held)
        self.holes = sorted([*self.holes, *self.owner, *self.left])
        self.left.clear()
        self.promised.clear()
        self.live |= self.held - self.hidden
        self.held = set(self.hidden)
        circle = [*range(self.cursor, _CAPACITY), *range(self.cursor)]
        self.cursor = next((row for row in circle if row not in {*self.holes, *self.held}), self.cursor)
        self.holes.sort(key=lambda row: (row < self.cursor, row))
        self.overdue = [row for row in range(self.ring.num_used) if self.generations[row] == 0]
        self.owner.clear()
        self.state = dict.fromkeys(self.state, "closed")

    @invariant()
    def agrees(self) -> None:
        live = sorted(self.live)
        readable = sorted(self.live | (self.held - self.hidden))
        assert self.ring.list_live_rows().tolist() == readable
        assert np.flatnonzero((self.generations > 0) & (self.generations % 2 == 0)).tolist() == readable
        assert self.ring.select_held(RowSet.run(0, _CAPACITY)).rows.tolist() == sorted(self.held)
        assert self.ring.list_rows().tolist() == sorted(self.live | self.held)
        odd = {*self.owner, *self.holes, *self.hidden, *self.left}
        assert set(np.flatnonzero(self.generations % 2).tolist()) == odd
        assert (len(self.ring), self.ring.num_held) == (len(live) + len(self.held), len(self.held))
        assert self.ring.num_reserved == len(self.owner) + len(self.left)
        assert self.ring.num_free == _CAPACITY - len(self.ring) - self.ring.num_reserved
        assert self.ring.num_holes == len(self.holes)
        assert self.ring.num_promised == len(self.all_promised)
        assert (self.ring.cursor, self.ring.inserts) == (self.cursor, self.inserts)


TestAgainstALoop, TestAgainstALoopWithAllExamples = make_tests(_AgainstALoop, num_examples=80, num_steps=40)
