from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tdserve.base.errors import LocalProtocolError
from tdserve.rules.replay.eligibility.written_keys import WrittenKeys
from tdserve.rules.replay.row_indexes.columns import RowColumns

_CAPACITY = 6
_NUM_KEYS = 130

_rows = st.lists(st.integers(0, _CAPACITY - 1), unique=True)
_keys = st.lists(st.sampled_from([0, 1, 62, 63, 64, 65, 127, 128, 129]))


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["reset", "reset all", "mark"]), _rows, _keys), max_size=12), _keys)
def test_written_when_rows_are_reset_and_marked_then_as_sets_of_keys(
    steps: list[tuple[str, list[int], list[int]]], asked: list[int]
) -> None:
    written = WrittenKeys(RowColumns(_CAPACITY), _NUM_KEYS)
    model: list[set[int]] = [set() for _ in range(_CAPACITY)]
    for what, given_rows, keys in steps:
        rows = np.array(given_rows, np.int64)
        if what == "mark":
            expected = [row for row in given_rows if not set(keys) <= model[row]]
            assert written.mark(rows, keys).tolist() == expected
        else:
            written.reset(rows, None if what == "reset all" else keys)
        for row in given_rows:
            fresh = set(range(_NUM_KEYS)) if what == "reset all" else set(keys)
            model[row] = model[row] | fresh if what == "mark" else fresh
    assert written.has(np.arange(_CAPACITY), asked).tolist() == [set(asked) <= keys for keys in model]


def test_has_when_no_row_was_written_then_none_and_of_no_keys_all() -> None:
    written = WrittenKeys(RowColumns(3), 2)
    assert written.has(np.arange(3), [1]).tolist() == [False] * 3
    assert written.has(np.arange(3), []).tolist() == [True] * 3
    assert WrittenKeys(RowColumns(3), 0).has(np.arange(3), []).tolist() == [True] * 3


def test_columns_when_kept_then_another_object_finds_what_was_written() -> None:
    columns = RowColumns(4)
    WrittenKeys(columns, 65).reset(np.array([2]), [64])
    assert columns.get_array("written", np.uint64, 2).shape == (4, 2)
    assert WrittenKeys(columns, 65).has(np.arange(4), [64]).tolist() == [False, False, True, False]


def test_count_missing_when_keys_fill_more_than_a_word_then_counts_each() -> None:
    written = WrittenKeys(RowColumns(4), 65)
    written.reset(np.array([0, 1]))
    written.reset(np.array([2]), [64])
    assert written.count_missing(np.array([0, 1, 2])).tolist() == [1] * 64 + [0]
    assert written.count_missing(np.array([0, 3, 2])).tolist() == [2] * 64 + [1]


@pytest.mark.parametrize("key", [-1, 2])
def test_keys_when_there_is_no_such_key_then_refused_and_nothing_changed(key: int) -> None:
    written = WrittenKeys(RowColumns(3), 2)
    rows = np.arange(3)
    for call in (lambda: written.reset(rows, [0, key]), lambda: written.mark(rows, [0, key])):
        with pytest.raises(LocalProtocolError):
            call()
    with pytest.raises(LocalProtocolError):
        written.has(rows, [key])
    assert not written.has(rows, [0]).any()


def test_repr_when_shown_then_has_the_number_of_keys() -> None:
    assert repr(WrittenKeys(RowColumns(3), 2)) == "<Written 2 keys of 3 rows>"


def test_mark_all_when_nothing_was_written_then_every_row_has_every_key() -> None:
    written = WrittenKeys(RowColumns(5), 70)
    written.mark_all()
    assert written.has(np.arange(5), range(70)).all()
    assert written.count_missing(np.arange(5)).tolist() == [0] * 70
