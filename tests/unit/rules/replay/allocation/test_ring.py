from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import CorruptDataError, InvalidRequestError, TooLargeError, WrongStateError
from tdserve.rules.replay.allocation.ring import Ring
from tests.unit.rules.replay.rings import make_ring, reserve


def test_reserve_when_full_then_the_oldest_rows_go_first() -> None:
    ring, generations = make_ring()
    for _ in range(2):
        ring.commit(reserve(ring, 2))
    reservation = reserve(ring, 3)
    assert reservation.rows.tolist() == [0, 1, 2]
    assert reservation.evicted.tolist() == [0, 1, 2]
    assert generations.tolist() == [3, 3, 3, 2]
    assert len(ring) == 1


def test_reserve_when_it_wraps_then_rows_follow_the_circle() -> None:
    ring, _ = make_ring()
    ring.commit(reserve(ring, 3))
    assert reserve(ring, 3).rows.tolist() == [3, 0, 1]


def test_reserve_when_a_write_was_aborted_then_the_next_writer_gets_its_rows() -> None:
    ring, generations = make_ring()
    ring.abort(reserve(ring, 2))
    assert generations.tolist() == [1, 1, 0, 0]
    reservation = reserve(ring, 3)
    assert reservation.rows.tolist() == [0, 1, 2]
    assert ring.commit(reservation).tolist() == [2, 2, 2]


def test_reserve_when_others_hold_too_many_rows_then_none_and_nothing_changes() -> None:
    ring, generations = make_ring()
    held = reserve(ring, 3)
    assert ring.reserve(2) is None
    assert generations.tolist() == [1, 1, 1, 0]
    ring.quarantine(held)
    assert ring.reserve(2) is None
    assert ring.num_reserved == 3
    ring.release(held)
    assert ring.reserve(2) is not None


def test_reserve_when_more_than_the_capacity_then_too_large() -> None:
    ring, _ = make_ring()
    with pytest.raises(TooLargeError) as caught:
        ring.reserve(5)
    assert (caught.value.asked, caught.value.free) == (5, 4)


@pytest.mark.parametrize("num_rows", [0, -1])
def test_reserve_when_nothing_is_asked_then_refused(num_rows: int) -> None:
    with pytest.raises(InvalidRequestError):
        make_ring()[0].reserve(num_rows)


def test_reserve_when_a_long_stretch_is_held_then_goes_past_it() -> None:
    ring, _ = make_ring(1_000_000)
    ring.quarantine(reserve(ring, 900_000))
    ring.commit(reserve(ring, 100_000))
    start_s = time.thread_time()
    assert reserve(ring, 3).rows.tolist() == [900_000, 900_001, 900_002]
    assert time.thread_time() - start_s < 0.5  # some passes over arrays: 2 ms; one step per row: seconds


def test_commit_when_quarantined_then_refused_and_names_the_state() -> None:
    ring, generations = make_ring()
    held = reserve(ring, 2)
    ring.quarantine(held)
    with pytest.raises(WrongStateError, match=r"^committing it is not possible while reservation 1 is quarantined$"):
        ring.commit(held)
    assert generations.tolist() == [1, 1, 0, 0]
    assert ring.quarantined == (held,)


def test_commit_when_the_reservation_is_of_another_ring_then_refused() -> None:
    ring, other = make_ring()[0], make_ring()[0]
    reserve(ring, 1)
    with pytest.raises(WrongStateError):
        ring.commit(reserve(other, 1))


def test_free_when_rows_go_then_the_next_writer_gets_them_in_that_order() -> None:
    ring, generations = make_ring()
    ring.commit(reserve(ring, 4))
    ring.free(np.array([2, 0]))
    assert generations.tolist() == [3, 2, 3, 2]
    assert (len(ring), ring.num_free, ring.num_holes) == (2, 2, 2)
    reservation = reserve(ring, 3)
    assert reservation.rows.tolist() == [2, 0, 1]
    assert reservation.evicted.tolist() == [1]


def test_reserve_holes_when_rows_were_given_up_then_all_of_them_and_no_other_reservation_gets_them() -> None:
    ring, _ = make_ring()
    assert ring.reserve_holes() is None
    ring.commit(reserve(ring, 4))
    ring.free(np.array([2, 0]))
    ring.free(np.array([3]))
    taken = ring.reserve_holes()
    assert taken is not None
    assert taken.rows.tolist() == [2, 0, 3]
    assert (ring.num_holes, ring.num_reserved) == (0, 3)
    assert ring.reserve(2) is None
    ring.abort(taken)
    assert reserve(ring, 3).rows.tolist() == [2, 0, 3]


def test_restore_when_writers_may_live_then_their_rows_are_held_and_the_rest_are_holes() -> None:
    generations = np.array([2, 3, 1, 5, 0, 4], np.int64)
    reserved = [np.array([1, 5]), np.array([3])]  # row 5 was committed before the crash
    ring = Ring.restore(6, generations, {"cursor": 5, "inserts": 7}, now_reserved=reserved)
    assert [held.rows.tolist() for held in ring.quarantined] == [[1], [3]]
    assert (len(ring), ring.num_reserved, ring.num_holes, ring.inserts) == (2, 2, 1, 7)
    assert reserve(ring, 4).rows.tolist() == [2, 4, 5, 0], "a hole, then what was never used, then the oldest"
    ring.release(ring.quarantined[0])
    assert reserve(ring, 1).rows.tolist() == [1]


def test_restore_when_rows_were_reserved_after_the_state_was_stored_then_filling_them_evicts_none() -> None:
    ring, generations = make_ring(8)
    ring.commit(reserve(ring, 2))
    stored = ring.get_state()
    reserve(ring, 2)
    ring = Ring.restore(8, generations, stored)
    assert [reserve(ring, 2).rows.tolist() for _ in range(3)] == [[2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("state", [{"cursor": 4}, {"cursor": -1}, {"inserts": -1}])
def test_restore_when_the_state_contradicts_then_corrupt(state: dict[str, int]) -> None:
    with pytest.raises(CorruptDataError):
        Ring.restore(4, np.zeros(4, np.int64), state)


def test_restore_when_a_generation_is_negative_then_corrupt() -> None:
    with pytest.raises(CorruptDataError):
        Ring.restore(2, np.array([0, -2], np.int64), {})


@pytest.mark.parametrize(("capacity", "num"), [(0, 0), (-1, 0), (3, 4)])
def test_ring_when_it_cannot_be_then_refused(capacity: int, num: int) -> None:
    with pytest.raises(InvalidRequestError):
        Ring(capacity, np.zeros(num, np.int64))


def test_ring_when_generations_are_of_another_dtype_then_refused() -> None:
    wrong: Any = np.zeros(2, np.int32)
    with pytest.raises(InvalidRequestError):
        Ring(2, wrong)


def test_num_used_when_the_ring_goes_round_then_all_rows_are() -> None:
    ring = Ring(8, np.zeros(8, np.int64))
    for num_rows, num_used in ((3, 3), (4, 7), (1, 8)):
        assert ring.reserve(num_rows) is not None
        assert ring.num_used == num_used


@pytest.mark.parametrize(("generations", "num_used"), [([2, 2, 0, 0], 2), ([2, 2, 2, 0], 4), ([2, 2, 1, 0], 3)])
def test_num_used_when_restored_then_the_rows_that_were_ever_used(generations: list[int], num_used: int) -> None:
    ring = Ring.restore(4, np.array(generations), {"cursor": 2, "inserts": 2})
    assert ring.num_used == num_used
    assert all(number == 0 for number in generations[ring.num_used :])
