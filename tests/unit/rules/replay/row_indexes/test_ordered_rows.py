from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tdserve.base.errors import LocalProtocolError
from tdserve.rules.replay.row_indexes.ordered_rows import OrderedRows
from tests.memory import count_bytes
from tests.state_machines import make_tests

_CAPACITY = 200


class _AgainstASortedList(RuleBasedStateMachine):
    """Rows are overwritten, taken from an end, given back, or come late, as in a ring with consumers."""

    chunk_rows = 16_384

    def __init__(self) -> None:
        super().__init__()
        self.sequence = np.zeros(_CAPACITY, np.int64)
        self.ordered = OrderedRows(self.sequence, chunk_rows=self.chunk_rows)
        self.members: set[int] = set()
        self.away: list[list[int]] = []
        self.next_sequence = 0
        self.cursor = 0

    @rule(num_rows=st.integers(1, 40), is_late=st.booleans(), seed=st.integers(0, 99))
    def write(self, num_rows: int, is_late: bool, seed: int) -> None:
        rows = (self.cursor + np.arange(num_rows)) % _CAPACITY
        self.cursor = (self.cursor + num_rows) % _CAPACITY
        self.ordered.remove(rows)
        self.members -= set(rows.tolist())
        self.away = [[row for row in batch if row not in set(rows.tolist())] for batch in self.away]
        self.sequence[rows] = self.next_sequence + np.arange(num_rows)
        self.next_sequence += num_rows
        rows = np.random.default_rng(seed).permutation(rows)
        if is_late:
            self.away.append(rows.tolist())
        else:
            self.ordered.add(rows)
            self.members |= set(rows.tolist())

    @precondition(lambda self: self.members)
    @rule(data=st.data(), is_back=st.booleans())
    def take(self, data: st.DataObject, is_back: bool) -> None:
        num_rows = data.draw(st.integers(1, len(self.members)))
        rows = self.ordered.find_newest(num_rows) if is_back else self.ordered.find_oldest(num_rows)
        self.ordered.remove(rows)
        self.members -= set(rows.tolist())
        self.away.append(rows.tolist())

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        batch = self.away.pop(data.draw(st.integers(0, len(self.away) - 1)))
        cut = data.draw(st.integers(0, len(batch)))
        self.away.append(batch[cut:])
        self.ordered.add(np.array(batch[:cut], np.int64))
        self.members |= set(batch[:cut])

    @rule(seed=st.integers(0, 99), num_rows=st.integers(0, _CAPACITY))
    def delete(self, seed: int, num_rows: int) -> None:
        rows = np.random.default_rng(seed).choice(_CAPACITY, num_rows, replace=False)
        self.ordered.remove(rows)
        self.members -= set(rows.tolist())
        self.away = [[row for row in batch if row not in set(rows.tolist())] for batch in self.away]

    @rule(data=st.data(), is_back=st.booleans())
    def look_beyond(self, data: st.DataObject, is_back: bool) -> None:
        num_rows, beyond = data.draw(st.integers(1, _CAPACITY)), data.draw(st.integers(0, self.next_sequence))
        expected = sorted(self.members, key=lambda row: self.sequence[row], reverse=is_back)
        if is_back:
            expected = [row for row in expected if self.sequence[row] < beyond]
            assert self.ordered.find_newest(num_rows, beyond=beyond).tolist() == expected[:num_rows]
        else:
            expected = [row for row in expected if self.sequence[row] > beyond]
            assert self.ordered.find_oldest(num_rows, beyond=beyond).tolist() == expected[:num_rows]

    @rule(data=st.data(), is_back=st.booleans())
    def look(self, data: st.DataObject, is_back: bool) -> None:
        num_rows = data.draw(st.integers(0, len(self.members)))
        expected = sorted(self.members, key=lambda row: self.sequence[row])
        if is_back:
            assert self.ordered.find_newest(num_rows).tolist() == expected[::-1][:num_rows]
        else:
            assert self.ordered.find_oldest(num_rows).tolist() == expected[:num_rows]

    @invariant()
    def has_as_many(self) -> None:
        # Looking at rows takes dead entries out, so it is no part of this.
        assert len(self.ordered) == len(self.members)

    def teardown(self) -> None:
        expected = sorted(self.members, key=lambda row: self.sequence[row])
        assert self.ordered.find_newest(len(expected)).tolist() == expected[::-1]
        assert self.ordered.find_oldest(len(expected)).tolist() == expected


class _InShortChunks(_AgainstASortedList):
    """The same of rows that lie in many chunks, and in runs that are too long to be joined at once."""

    chunk_rows = 3


TestAgainstASortedList, TestAgainstASortedListWithAllExamples = make_tests(_AgainstASortedList, num_examples=40)
TestInShortChunks, TestInShortChunksWithAllExamples = make_tests(_InShortChunks, num_examples=40)


def _count_entries(ordered: OrderedRows) -> int:
    return int(re.findall(r"\d+", repr(ordered))[1])


def _count_runs(ordered: OrderedRows) -> int:
    return int(re.findall(r"\d+", repr(ordered))[2])


def test_add_when_rows_come_in_order_then_one_run() -> None:
    ordered = OrderedRows(np.arange(10_000))
    for start in range(0, 10_000, 32):
        ordered.add(np.arange(start, min(start + 32, 10_000)))
        ordered.remove(ordered.find_oldest(8))
    assert repr(ordered) == "<OrderedRows 7496 in 7504 entries of 1 runs>"


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_add_when_rows_come_in_any_order_then_runs_stay_few(num_rows: int) -> None:
    ordered = OrderedRows(np.arange(20_000))
    order = np.random.default_rng(0).permutation(20_000)
    most = 0
    for start in range(0, 20_000, num_rows):
        ordered.add(order[start : start + num_rows])
        most = max(most, _count_runs(ordered))
    assert 2 < most < 20
    assert ordered.find_oldest(20_000).tolist() == list(range(20_000))


def test_give_back_when_no_query_came_between_then_no_new_run() -> None:
    ordered = OrderedRows(np.arange(1000))
    ordered.add(np.arange(1000))
    for _ in range(50):
        rows = ordered.find_oldest(100)
        ordered.remove(rows)
        ordered.add(rows)
    assert _count_runs(ordered) == 1
    assert ordered.find_oldest(3).tolist() == [0, 1, 2]


def test_remove_when_rows_go_where_no_query_looks_then_their_entries_do_not_pile_up() -> None:
    capacity = 64
    sequence = np.zeros(capacity, np.int64)
    ordered, sizes = OrderedRows(sequence), []
    for start in range(0, 64 * 200, 8):
        rows = np.arange(start, start + 8) % capacity
        ordered.remove(rows)
        sequence[rows] = np.arange(start, start + 8)
        ordered.add(rows)
        # From the back only, while the oldest are overwritten.
        assert ordered.find_newest(1).tolist() == [int(rows[-1])]
        sizes.append(count_bytes(ordered))
    assert _count_entries(ordered) <= 2 * capacity + 64
    assert max(sizes) <= sizes[0] + 8 * capacity * 2 * sequence.itemsize


def test_operations_when_the_table_is_long_then_none_takes_the_dead_entries_of_all_at_once() -> None:
    capacity, num_rows = 1_000_000, 20_000
    sequence = np.zeros(capacity, np.int64)
    ordered = OrderedRows(sequence)
    most_swept = 0
    for start in range(0, 4 * capacity, num_rows):
        rows = np.arange(start, start + num_rows) % capacity
        before = _count_entries(ordered)
        ordered.remove(rows)
        sequence[rows] = np.arange(start, start + num_rows)
        ordered.add(rows)
        most_swept = max(most_swept, before + num_rows - _count_entries(ordered))
        assert ordered.find_newest(1).tolist() == [int(rows[-1])]
    assert _count_entries(ordered) <= 2.5 * capacity
    assert 0 < most_swept <= 10 * num_rows


def test_give_back_when_the_row_was_overwritten_before_then_it_comes_once() -> None:
    sequence = np.arange(10)
    ordered = OrderedRows(sequence)
    ordered.add(np.arange(10))
    for row in (5, 6):
        ordered.remove(np.array([row]))
        sequence[row] += 5
        ordered.add(np.array([row]))
    expected = [0, 1, 2, 3, 4, 7, 8, 9, 5, 6]
    # Here the entries that the two rows had before are met.
    assert ordered.find_oldest(10).tolist() == expected
    ordered.remove(np.array([5]))
    ordered.add(np.array([5]))
    assert ordered.find_oldest(10).tolist() == expected


def test_add_when_a_row_is_a_member_already_then_our_own_bug() -> None:
    ordered = OrderedRows(np.arange(10))
    ordered.add(np.array([3, 4]))
    with pytest.raises(LocalProtocolError):
        ordered.add(np.array([5, 4]))
    assert ordered.find_oldest(2).tolist() == [3, 4]


def test_oldest_when_the_result_is_changed_then_the_set_is_not() -> None:
    ordered = OrderedRows(np.arange(10))
    ordered.add(np.arange(10))
    ordered.find_oldest(4)[:] = 9
    ordered.find_newest(4)[:] = 9
    assert ordered.find_oldest(10).tolist() == list(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [64, 4_096])
def test_add_when_all_rows_go_and_come_back_in_the_order_of_a_ring_then_runs_stay_few(num_rows: int) -> None:
    """Like a write of all rows of a table that has wrapped around: the newer half of the rows comes back first."""
    capacity = 200_000
    sequence = np.roll(np.arange(capacity), capacity // 2)
    ordered = OrderedRows(sequence, chunk_rows=1_000)
    steps = np.split(np.arange(capacity), range(num_rows, capacity, num_rows))
    for do in (ordered.add, ordered.remove, ordered.add, ordered.remove, ordered.add):
        for rows in steps:
            do(rows)
        assert _count_runs(ordered) <= 3
    assert (sequence[ordered.find_oldest(capacity)] == np.arange(capacity)).all()
    assert (sequence[ordered.find_newest(capacity)] == np.arange(capacity)[::-1]).all()
