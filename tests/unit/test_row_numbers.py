from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdserve.errors import InvalidRequestError, RemoteProtocolError
from tdserve.row_numbers import column_of, decode_rows, encode_few_bytes, encode_rows, is_run, run_of, spread

numbers = st.lists(st.integers(0, 2**40), max_size=20)
runs = st.tuples(st.integers(0, 2**40), st.integers(0, 50)).map(lambda run: list(range(run[0], run[0] + run[1])))


@given(numbers | runs)
def test_rows_when_they_cross_the_wire_then_equal_in_their_order(rows: list[int]) -> None:
    found = decode_rows(encode_rows(np.array(rows, np.int64)))
    assert found.dtype == np.int64
    assert found.tolist() == rows


def test_rows_when_a_run_of_any_length_then_24_bytes() -> None:
    assert len(encode_rows(np.arange(7, 1_000_007))) == 24


@given(numbers | runs)
def test_few_bytes_when_they_cross_the_wire_then_equal_in_their_order(rows: list[int]) -> None:
    found = decode_rows(encode_few_bytes(np.array(rows, np.int64)))
    assert found.dtype == np.int64
    assert found.tolist() == rows


@pytest.mark.parametrize(("highest", "nbytes"), [(2**32 - 1, 16 + 4 * 256), (2**32, 8 * 255)])
def test_few_bytes_when_all_numbers_fit_then_four_bytes_each(highest: int, nbytes: int) -> None:
    rows = np.append(np.arange(0, 508, 2), highest)
    assert len(encode_few_bytes(rows)) == nbytes
    assert decode_rows(encode_few_bytes(rows)).tolist() == rows.tolist()


def test_few_bytes_when_there_are_fewer_than_said_then_error() -> None:
    with pytest.raises(RemoteProtocolError, match="9 row numbers"):
        decode_rows(np.array([-2, 9, 0], "<i8").tobytes())


@given(numbers.filter(bool) | runs.filter(bool))
def test_run_when_numbers_follow_one_another_then_known_without_them(rows: list[int]) -> None:
    found = np.array(rows, np.int64)
    assert is_run(found) == (rows == list(range(rows[0], rows[0] + len(rows))))
    expected = (rows[0], len(rows)) if len(rows) > 3 and is_run(found) else None
    assert run_of(encode_rows(found)) == expected


@pytest.mark.parametrize("numbers", [[-1, 3, 0], [-1, -3, 2], [-2, 2, 1], [4, 5, 6]])
def test_run_when_the_bytes_stand_for_none_then_none(numbers: list[int]) -> None:
    assert run_of(np.array(numbers, "<i8").tobytes()) is None


@pytest.mark.parametrize("rows", [[0, 2, 1, 3], [5, 5, 5, 8], [3, 2, 1, 0]])
def test_rows_when_they_only_end_like_a_run_then_not_taken_for_one(rows: list[int]) -> None:
    assert decode_rows(encode_rows(np.array(rows, np.int64))).tolist() == rows


def test_rows_when_the_bytes_are_none_then_error() -> None:
    with pytest.raises(RemoteProtocolError, match="7 bytes"):
        decode_rows(bytes(7))


@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(0, 4))
def test_spread_when_a_row_has_several_elements_then_all_of_theirs(rows: list[int], num_each: int) -> None:
    expected = [row * num_each + each for row in rows for each in range(num_each)]
    assert spread(np.array(rows, np.int64), num_each).tolist() == expected


def test_column_when_one_number_stands_for_all_or_each_row_has_its_own_then_one_per_row() -> None:
    assert column_of("priority", np.array([2.5], "<f8").tobytes(), "<f8", 3).tolist() == [2.5] * 3
    assert column_of("priority", np.arange(3, dtype="<f8").tobytes(), "<f8", 3).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("nbytes", [0, 7, 16, 25, 32])
def test_column_when_there_are_more_or_fewer_then_error(nbytes: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"invalid priority: {nbytes} bytes"):
        column_of("priority", bytes(nbytes), "<f8", 3)
