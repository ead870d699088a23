from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.allocation.shared_numbers import NUM_NUMBERS, FoundRows, SharedNumbers
from tdserve.rules.replay.allocation.uncommitted_rows import OwnUncommittedRows
from tests import chi_square

CAPACITY = 64
FIRST_GENERATION = 1000


@dataclass
class Ring:
    """A ring with one writer, which fills rows by itself, and a control process that commits them later."""

    numbers: Rows = field(default_factory=lambda: np.zeros(NUM_NUMBERS, np.int64))
    generations: Rows = field(default_factory=lambda: np.zeros(CAPACITY, np.int64))
    num_filled: int = 0
    num_committed: int = 0

    def __post_init__(self) -> None:
        self.control, self.writer = SharedNumbers(self.numbers), SharedNumbers(self.numbers)
        self.control.permit(reads=True, min_live=1)
        self.own = OwnUncommittedRows(FIRST_GENERATION)
        self.rng = np.random.default_rng(3)

    def fill(self, num_rows: int) -> None:
        """Fills the next rows."""
        rows = np.arange(self.num_filled, self.num_filled + num_rows) % CAPACITY
        before = self.generations[rows]
        self.generations[rows] |= 1
        self.own.mark_filled(self.writer, rows, before, self.generations[rows])
        self.num_filled += num_rows

    def commit(self, num_rows: int | None = None) -> None:
        """Commits all rows, or so many that were filled before a mark that control saw earlier."""
        rows = np.arange(self.num_committed, self.num_filled if num_rows is None else self.num_committed + num_rows)
        where = rows % CAPACITY
        after = self.generations[where] + 1
        after[after == 2] = FIRST_GENERATION
        self.generations[where] = after
        self.num_committed += len(rows)
        self.control.num_live = min(self.num_committed, CAPACITY)
        self.control.set_used(self.control.num_live)

    def draw(self, num_rows: int) -> FoundRows | None:
        """Draws rows as the writer's process does."""
        return self.writer.draw(self.generations, num_rows, rng=self.rng, find_uncommitted=self.own.find)


class CommittedInBetween(SharedNumbers):
    """Numbers that control shows as all committed, just after they were read."""

    @property
    def uncommitted_mark(self) -> int | None:
        mark = super().uncommitted_mark
        if mark is not None and self.committed_mark == 0:
            self.note_committed(mark)
        return mark


@pytest.fixture
def ring() -> Ring:
    """One with 16 rows that are committed."""
    made = Ring()
    made.fill(16)
    made.commit()
    made.control.note_committed(made.control.read_mark())
    return made


def check_uniform(found: FoundRows, live: set[int]) -> None:
    assert set(found.rows.tolist()) == live
    assert chi_square.statistic(np.bincount(found.rows)[sorted(live)]) < chi_square.limit(len(live))


def test_draw_when_own_rows_are_not_committed_then_each_live_row_is_equally_likely(ring: Ring) -> None:
    for num_rows in (1, 5, 2):
        ring.fill(num_rows)
        found = ring.draw(20_000)
        assert found is not None
        check_uniform(found, set(range(ring.num_filled)))


def test_draw_when_own_rows_have_taken_the_place_of_others_then_those_are_not_drawn_and_the_rest_equally(
    ring: Ring,
) -> None:
    ring.fill(CAPACITY - 16)
    ring.commit()
    ring.control.note_committed(ring.control.read_mark())
    for _ in range(6):
        ring.fill(5)
    found = ring.draw(50_000)
    assert found is not None
    check_uniform(found, set(range(CAPACITY)))


def test_draw_when_some_were_committed_meanwhile_then_each_live_row_is_equally_likely(ring: Ring) -> None:
    ring.fill(4)
    mark = ring.control.read_mark()
    ring.fill(6)
    ring.commit(4)
    ring.control.note_committed(mark)
    found = ring.draw(20_000)
    assert found is not None
    check_uniform(found, set(range(26)))


def test_draw_when_some_were_committed_and_control_has_not_shown_that_then_each_live_row_is_equally_likely(
    ring: Ring,
) -> None:
    ring.fill(8)
    ring.commit(6)
    found = ring.draw(20_000)
    assert found is not None
    check_uniform(found, set(range(24)))


def test_find_when_thousands_of_rows_are_not_committed_then_all_are_known() -> None:
    own, shared, generations = OwnUncommittedRows(FIRST_GENERATION), SharedNumbers(), np.zeros(7000, np.int64)
    everything = np.arange(7000)
    for rows in np.split(everything, 500):
        generations[rows] = 5
        own.mark_filled(shared, rows, generations[rows] - 1, generations[rows])
    found = own.find(shared, generations)
    assert found is not None
    assert found.rows.tolist() == everything.tolist()
    assert found.num_evicted == 7000
    shared.note_committed(shared.read_mark() - 300)
    generations[: 200 * 14] = 6
    for rows in np.split(everything[: 100 * 14], 100):
        generations[rows] = 7
        own.mark_filled(shared, rows, generations[rows], generations[rows])
    found = own.find(shared, generations)
    assert found is not None
    assert found.rows.tolist() == [*range(200 * 14, 7000), *range(100 * 14)]
    assert found.num_evicted == 300 * 14


@pytest.mark.parametrize("mark", [1, 1 << 62])
def test_find_when_the_committed_mark_is_of_another_writer_and_rows_need_more_room_then_all_are_known(
    mark: int,
) -> None:
    own, shared, generations = OwnUncommittedRows(FIRST_GENERATION), SharedNumbers(), np.zeros(1200, np.int64)
    shared.show_mark(mark)
    shared.note_committed(mark)
    for rows in np.split(np.arange(1200), 2):
        generations[rows] = 5
        own.mark_filled(shared, rows, generations[rows] - 1, generations[rows])
    found = own.find(shared, generations)
    assert found is not None
    assert found.rows.tolist() == list(range(1200))


def test_find_when_all_were_committed_as_more_room_was_made_then_only_later_ones_are_known() -> None:
    own, shared, generations = OwnUncommittedRows(FIRST_GENERATION), CommittedInBetween(), np.full(1200, 5)
    for rows in np.split(np.arange(1200), 2):
        own.mark_filled(shared, rows, generations[rows] - 1, generations[rows])
    found = own.find(shared, generations)
    assert found is not None
    assert found.rows.tolist() == list(range(600, 1200))


def test_generations_when_rows_were_drawn_before_their_commit_then_those_that_the_commit_gives(ring: Ring) -> None:
    ring.fill(4)
    found = ring.draw(1000)
    assert found is not None
    assert found.read_again(ring.generations, ring.writer).tolist() == found.generations.tolist()
    ring.commit()
    assert found.generations.tolist() == ring.generations[found.rows].tolist()
    assert found.read_again(ring.generations, ring.writer).tolist() == found.generations.tolist()


def test_read_again_when_rows_were_given_up_meanwhile_then_they_are_torn(ring: Ring) -> None:
    ring.fill(4)
    found = ring.draw(1000)
    assert found is not None
    ring.control.count_given_up()
    again = found.read_again(ring.generations, ring.writer)
    assert ((again & 1 == 1) == (found.rows >= 16)).all()
    assert ring.draw(10) is None


@pytest.mark.parametrize("change", ["another writer", "unknown extend", "given up before", "forgotten"])
def test_draw_when_not_all_uncommitted_rows_are_known_then_none_until_they_are_committed(
    ring: Ring, change: str
) -> None:
    if change == "another writer":
        SharedNumbers(ring.numbers).mark_filled()
        ring.fill(1)
    elif change == "unknown extend":
        ring.fill(1)
        ring.writer.mark_filled()
        ring.fill(1)
    elif change == "given up before":
        ring.fill(1)
        ring.control.count_given_up()
        ring.fill(1)
    else:
        ring.fill(1)
        ring.own.forget()
    assert ring.draw(10) is None
    ring.commit()
    ring.control.note_committed(ring.control.read_mark())
    assert ring.draw(10) is not None
    ring.fill(1)
    found = ring.draw(10_000)
    assert found is not None
    check_uniform(found, set(range(ring.num_filled)))
