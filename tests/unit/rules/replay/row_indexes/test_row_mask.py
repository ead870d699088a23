"""The mask of rows, compared with a Python set."""

from __future__ import annotations

import numpy as np
import pytest

from tdserve.base.errors import LocalProtocolError
from tdserve.messages.row_numbers import RUN_PIECE_ROWS
from tdserve.rules.replay.row_indexes.row_mask import RowMask

_CAPACITY = 4096
_BATCHES = [
    np.arange(1024, 3072),  # a run that is long enough for a slice
    np.array([5, 3, 3100, 9]),
    np.concatenate([np.arange(3500, 4096), np.arange(0, 2)]),  # the end of a ring and its beginning
]


@pytest.mark.parametrize("first", range(3))
def test_add_and_remove_when_rows_come_and_go_then_as_a_set(first: int) -> None:
    mask, model = RowMask(_CAPACITY), set[int]()
    for rows in _BATCHES[first:] + _BATCHES[:first]:
        mask.add(rows)
        model |= set(rows.tolist())
        assert mask.get_rows().tolist() == sorted(model)
        assert mask.contains(slice(0, 8)).tolist() == [row in model for row in range(8)]
    for rows in _BATCHES:
        mask.remove(rows)
        model -= set(rows.tolist())
        assert mask.select_members(np.arange(_CAPACITY)[::-1]).tolist() == sorted(model, reverse=True)
    assert not mask.get_rows().size


def test_add_when_a_row_is_a_member_then_error_and_nothing_changed() -> None:
    mask = RowMask(4)
    mask.add(np.array([1]))
    with pytest.raises(LocalProtocolError, match="made live again"):
        mask.add(np.array([0, 1]))
    assert mask.get_rows().tolist() == [1]


def test_remove_when_rows_are_no_members_then_nothing_happens() -> None:
    mask = RowMask(4)
    mask.add(np.array([1, 2]))
    mask.remove(np.array([0, 2]))
    assert mask.get_rows().tolist() == [1]


def test_contains_when_the_mask_changes_later_then_the_answer_stays() -> None:
    mask = RowMask(4)
    found = mask.contains(slice(0, 4))
    mask.add(np.array([1]))
    assert not found.any()


@pytest.mark.parametrize(
    ("max_rows", "expected"), [(0, []), (2, [7, RUN_PIECE_ROWS + 1]), (9, [7, RUN_PIECE_ROWS + 1, 2 * RUN_PIECE_ROWS])]
)
def test_first_rows_when_members_lie_far_apart_then_the_first_of_them(max_rows: int, expected: list[int]) -> None:
    mask = RowMask(3 * RUN_PIECE_ROWS)
    mask.add(np.array([2 * RUN_PIECE_ROWS, 7, RUN_PIECE_ROWS + 1]))
    assert mask.get_first_rows(max_rows).tolist() == expected
