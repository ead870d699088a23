from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tdserve.messages.row_numbers import PIECE_ROWS, decode_rows
from tdserve.messages.row_sets import RowSet

MANY = 3 * PIECE_ROWS


def in_each_form(rows: set[int]) -> list[RowSet]:
    """Returns the set in each of its forms."""
    numbers = np.array(sorted(rows), np.int64)
    mask = np.zeros(70, np.bool_)
    mask[numbers] = True
    found = [RowSet(listed=numbers), RowSet(bits=np.packbits(mask)), RowSet.from_rows(numbers[::-1])]
    if rows and len(rows) == max(rows) - min(rows) + 1:
        found.append(RowSet.run(min(rows), max(rows) + 1))
    return found


def rows_of(rows: RowSet) -> set[int]:
    """Returns the numbers of a set; fails if it lists one twice."""
    found = [number for piece in rows.iter_pieces() for number in np.arange(70 + 2 * MANY)[piece].tolist()]
    assert len(found) == len(rows) == len(set(found))
    assert rows.rows.tolist() == sorted(found)
    return set(found)


sets = st.one_of(
    st.sets(st.integers(0, 69), max_size=20),
    st.tuples(st.integers(0, 69), st.integers(0, 69)).map(lambda ends: set(range(min(ends), max(ends) + 1))),
)


@pytest.mark.slow
@given(sets, sets)
def test_sets_when_joined_in_any_form_then_as_those_of_python(one: set[int], two: set[int]) -> None:
    for ours in in_each_form(one):
        assert rows_of(ours) == one
        assert rows_of(RowSet.decode(ours.encode())) == one
        assert decode_rows(ours.encode()).tolist() == sorted(one)
        assert ours.contains(np.arange(100)).tolist() == [number in one for number in range(100)]
        for theirs in in_each_form(two):
            assert ours.has_overlap(theirs) == bool(one & two)
            assert rows_of(ours & theirs) == one & two
            assert rows_of(ours - theirs) == one - two
            assert rows_of(ours | theirs) == one | two


@pytest.mark.parametrize("rows", [range(0), range(3), range(5, 9), range(1, 50, 7), range(9, 2, -1), range(50, 1, -7)])
def test_of_range_when_it_goes_either_way_then_its_rows(rows: range) -> None:
    assert rows_of(RowSet.from_range(rows)) == set(rows)


@pytest.mark.parametrize("rows", [range(MANY), range(1, 2 * MANY, 2), range(2 * MANY, 3, -3)])
def test_pieces_when_there_are_very_many_rows_then_none_is_large(rows: range) -> None:
    numbers = np.random.default_rng(0).permutation(np.asarray(rows))
    for found in (RowSet.from_range(rows), RowSet.from_rows(numbers)):
        assert rows_of(found) == set(rows)
        assert rows_of(RowSet.decode(found.encode())) == set(rows)
        assert max(len(np.arange(2 * MANY + 1)[piece]) for piece in found.iter_pieces()) <= 8 * PIECE_ROWS
        assert len(found.encode()) < len(rows)
