from __future__ import annotations

import numpy as np
import pytest

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.allocation.shared_numbers import (
    LOCAL_READERS,
    MAX_WORKERS,
    NO_READER,
    NUM_NUMBERS,
    SharedNumbers,
    get_worker_place,
)
from tests import chi_square

CAPACITY = 64
LIVE = np.arange(3, 40, 2)


@pytest.fixture
def numbers() -> Rows:
    """The array that all processes map."""
    return np.zeros(NUM_NUMBERS, np.int64)


@pytest.fixture
def shared(numbers: Rows) -> SharedNumbers:
    """Those of a table of which half of the used rows are live; readers may do anything."""
    made = SharedNumbers(numbers)
    made.permit(reads=True, min_live=1)
    made.set_used(40)
    made.num_live = len(LIVE)
    return made


@pytest.fixture
def generations() -> Rows:
    """Of the rows: live ones, ones that are being written, and ones that were never used."""
    made = np.zeros(CAPACITY, np.int64)
    made[:40] = 7
    made[LIVE] = 8
    return made


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.slow
def test_draw_when_half_of_the_rows_are_live_then_each_live_one_is_equally_likely(
    shared: SharedNumbers, generations: Rows, rng: np.random.Generator
) -> None:
    found = [shared.draw(generations, 100, rng=rng) for _ in range(1000)]
    rows = np.concatenate([each.rows for each in found if each is not None])
    assert len(rows) > 99_000
    assert set(rows.tolist()) == set(LIVE.tolist())
    assert chi_square.statistic(np.bincount(rows)[LIVE]) < chi_square.limit(len(LIVE))


def test_draw_when_done_then_the_generations_are_those_of_the_rows(
    shared: SharedNumbers, generations: Rows, rng: np.random.Generator
) -> None:
    generations[LIVE] = 2 * LIVE
    found = shared.draw(generations, 50, rng=rng)
    assert found is not None
    assert found.generations.tolist() == (2 * found.rows).tolist()


@pytest.mark.parametrize("change", ["forbidden", "too few", "few of many", "not committed", "none live"])
def test_draw_when_control_must_decide_then_none(
    shared: SharedNumbers, generations: Rows, rng: np.random.Generator, change: str
) -> None:
    if change == "forbidden":
        shared.permit(reads=True, min_live=0)
    elif change == "too few":
        shared.permit(reads=True, min_live=len(LIVE) + 1)
    elif change == "few of many":
        shared.set_used(CAPACITY)
        shared.num_live = CAPACITY // 4 - 1
    elif change == "not committed":
        shared.mark_filled()
    else:
        generations[:] |= 1
    assert shared.draw(generations, 10, rng=rng) is None


def test_draw_when_what_writers_have_marked_is_committed_then_drawn_again(
    numbers: Rows, shared: SharedNumbers, generations: Rows, rng: np.random.Generator
) -> None:
    writers = [SharedNumbers(numbers) for _ in range(2)]
    for writer in (writers[0], writers[1], writers[0]):
        writer.mark_filled()
        mark = shared.read_mark()
        assert shared.draw(generations, 10, rng=rng) is None
        shared.note_committed(mark)
        assert shared.draw(generations, 10, rng=rng) is not None


def test_draw_when_a_writer_has_marked_more_since_control_looked_then_none(
    shared: SharedNumbers, generations: Rows, rng: np.random.Generator
) -> None:
    shared.mark_filled()
    mark = shared.read_mark()
    shared.mark_filled()
    shared.note_committed(mark)
    assert shared.draw(generations, 10, rng=rng) is None


def test_find_listed_when_all_rows_are_live_then_found_in_their_order(shared: SharedNumbers, generations: Rows) -> None:
    found = shared.find_listed(generations, np.array([5, 3, 5]))
    assert found is not None
    assert (found.rows.tolist(), found.generations.tolist()) == ([5, 3, 5], [8, 8, 8])


@pytest.mark.parametrize("rows", [[], [4], [3, 50], [-1], [CAPACITY], [3, 2**40]])
def test_find_listed_when_a_row_is_not_live_then_none(
    shared: SharedNumbers, generations: Rows, rows: list[int]
) -> None:
    assert shared.find_listed(generations, np.array(rows, np.int64)) is None


def test_find_listed_when_forbidden_then_none(shared: SharedNumbers, generations: Rows) -> None:
    shared.permit(reads=False, min_live=1)
    assert shared.find_listed(generations, LIVE) is None


def test_num_drawn_when_readers_count_then_the_sum_whatever_else_is_shared(shared: SharedNumbers) -> None:
    shared.mark_filled()
    for place in (get_worker_place(0), get_worker_place(MAX_WORKERS - 1), LOCAL_READERS[0], LOCAL_READERS[-1]):
        shared.count_drawn(place, 10)
        shared.count_drawn(place, 1)
    assert shared.num_drawn == 44


def test_places_when_given_then_no_two_readers_have_one(shared: SharedNumbers) -> None:
    workers = [get_worker_place(number) for number in range(MAX_WORKERS)]
    assert len({*workers, *LOCAL_READERS, NO_READER}) == MAX_WORKERS + len(LOCAL_READERS) + 1
    assert get_worker_place(MAX_WORKERS) == NO_READER
    assert shared.num_drawn == 0


def test_is_table_when_control_has_opened_one_then_true(numbers: Rows) -> None:
    assert not SharedNumbers(numbers).is_table
    SharedNumbers(numbers).permit(reads=False, min_live=0)
    assert SharedNumbers(numbers).is_table
    assert not SharedNumbers(numbers).is_queue
    SharedNumbers(numbers).permit(reads=False, min_live=0, is_queue=True)
    assert SharedNumbers(numbers).is_table
    assert SharedNumbers(numbers).is_queue
