"""Rows of a ring that are held while a part of them is written."""

from __future__ import annotations

import numpy as np
import pytest

from tdserve.rules.replay.allocation.ring import Ring
from tests.unit.rules.replay.rings import make_ring, reserve


def test_hold_when_a_part_of_a_row_is_written_then_no_writer_gets_it() -> None:
    ring, generations = make_ring()
    ring.commit(reserve(ring, 4))
    row = np.array([0])
    ring.hold(row)
    assert (len(ring), ring.num_held, ring.num_reserved) == (4, 1, 0)
    assert generations.tolist() == [2, 2, 2, 2]
    assert ring.reserve(4) is None
    assert ring.count_claimable(4) == 0
    assert reserve(ring, 1).rows.tolist() == [1]
    ring.hide(row)
    assert generations.tolist() == [3, 3, 2, 2]
    ring.show(row)
    assert ring.reserve(3) is None
    ring.let_go(row)
    assert generations.tolist() == [2 + (1 << 44), 3, 2, 2]
    assert ring.list_live_rows().tolist() == [0, 2, 3]


@pytest.mark.parametrize("is_hidden", [False, True])
def test_free_when_a_row_is_being_overwritten_then_the_next_writer_gets_it_after_that(is_hidden: bool) -> None:
    ring, generations = make_ring()
    ring.commit(reserve(ring, 4))
    written = np.array([0, 1])
    ring.hold(written)
    if is_hidden:
        ring.hide(written)
    ring.free(np.array([0, 2]))
    assert (len(ring), ring.num_held, ring.num_reserved, ring.num_holes) == (2, 1, 1, 1)
    assert ring.num_left_held == 1
    assert reserve(ring, 1).rows.tolist() == [2]
    ring.hide(written)
    ring.show(written)
    assert generations.tolist() == [3, 2 + (1 << 44), 3, 2]
    assert ring.let_go(written).tolist() == [1]
    assert reserve(ring, 1).rows.tolist() == [0]


def test_names_when_a_part_of_a_row_is_written_then_the_same_and_another_for_the_next_row() -> None:
    ring, _ = make_ring(1)
    ring.commit(reserve(ring, 1))
    row = np.array([0])
    name = ring.get_row_ids(row).tolist()
    for step in (ring.hold, ring.hide, ring.show, ring.let_go):
        step(row)
        assert ring.get_row_ids(row).tolist() == name
    reservation = reserve(ring, 1)
    assert ring.get_row_ids(row).tolist() != name
    ring.commit(reservation)
    assert ring.get_row_ids(row).tolist() != name


def test_let_go_when_a_row_was_written_very_often_then_it_is_still_the_same_row_and_its_generation_moves() -> None:
    generations = np.array([6], np.int64)
    ring = Ring.restore(1, generations, {})
    generations[0] |= ((1 << 18) - 1) << 44  # as many partial writes as are counted
    for expected in (6, 6 + (1 << 44)):
        for step in (ring.hold, ring.hide, ring.show, ring.let_go):
            step(np.array([0]))
        assert generations.tolist() == [expected]


def test_restore_when_rows_are_held_then_they_are_no_holes_and_even_ones_live() -> None:
    generations = np.array([3, 2, 3, 2], np.int64)
    ring = Ring.restore(4, generations, {}, held=np.array([0, 1]))
    assert (ring.list_live_rows().tolist(), ring.num_held, ring.num_holes) == ([1, 3], 1, 1)
    assert reserve(ring, 1).rows.tolist() == [2]
    ring.show(np.array([0]))
    ring.let_go(np.array([0]))
    assert ring.list_live_rows().tolist() == [0, 1, 3]
