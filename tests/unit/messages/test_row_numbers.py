from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tdserve.base.errors import InvalidRequestError, RemoteProtocolError
from tdserve.messages.row_numbers import (
    compute_max_rows,
    decode_column,
    decode_repeats,
    decode_rows,
    encode_bits,
    encode_few_bytes,
    encode_many,
    encode_repeats,
    encode_rows,
    find_run,
    is_run,
    sort_unique,
    spread,
)

numbers = st.lists(st.integers(0, 2**40), max_size=20)
runs = st.tuples(st.integers(0, 2**40), st.integers(0, 50)).map(lambda run: list(range(run[0], run[0] + run[1])))


@pytest.mark.slow
@given(numbers | runs)
def test_rows_when_they_cross_the_wire_then_equal_in_their_order(rows: list[int]) -> None:
    found = decode_rows(encode_rows(np.array(rows, np.int64)))
    assert found.dtype == np.int64
    assert found.tolist() == rows


def test_rows_when_a_run_of_any_length_then_24_bytes() -> None:
    assert len(encode_rows(np.arange(7, 1_000_007))) == 24


@pytest.mark.parametrize("num_rows", [5, 1023, 1024, 5_000_000])
def test_rows_when_they_go_round_the_end_of_a_table_then_few_bytes(num_rows: int) -> None:
    rows = (np.arange(num_rows) + 6_000_000) % (6_000_000 + num_rows // 3)
    encoded = encode_rows(rows)
    assert len(encoded) == (40 if num_rows >= 1024 else 8 * num_rows)
    assert (decode_rows(encoded, max_rows=num_rows) == rows).all()


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(64, 900)), min_size=2, max_size=9))
def test_rows_when_of_several_runs_then_equal_in_their_order(found: list[tuple[int, int]]) -> None:
    rows = np.concatenate([np.arange(first, first + num_rows) for first, num_rows in found])
    assert decode_rows(encode_rows(rows)).tolist() == rows.tolist()


@pytest.mark.parametrize("step", [1, 2, 70])
@pytest.mark.parametrize("num_rows", [1, 3, 20_000])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_encode_many_when_rows_are_sorted_and_near_then_a_bit_each(num_rows: int, step: int, is_sorted: bool) -> None:
    rows = np.arange(5, 5 + num_rows * step, step) * (1 if is_sorted else -1) + (0 if is_sorted else 2_000_000)
    encoded = encode_many(rows)
    assert decode_rows(encoded).tolist() == rows.tolist()
    assert len(encoded) <= len(encode_rows(rows))
    if (num_rows, step, is_sorted) == (20_000, 2, True):
        assert len(encoded) < 2 * num_rows // 8 + 32


@pytest.mark.parametrize("runs", [[-5, 0, 2**62, 0, 2**62], [-5, 0, -1], [-5, 0, 3, 9], [-5, 7, 11]])
def test_rows_when_runs_stand_for_more_than_there_can_be_then_refused(runs: list[int]) -> None:
    with pytest.raises(RemoteProtocolError, match="10 row numbers"):
        decode_rows(np.array(runs, "<i8").tobytes(), max_rows=10)


@pytest.mark.slow
@given(numbers | runs | st.lists(st.sampled_from([0, 7, 70_000]), min_size=2, max_size=9))
def test_max_rows_of_when_encoded_in_any_way_then_no_fewer_than_there_are(found: list[int]) -> None:
    rows = np.array(found, np.int64)
    several = np.concatenate([np.arange(first, first + 900) for first in found]) if found else rows
    assert compute_max_rows(encode_rows(rows)) == len(rows)
    assert compute_max_rows(encode_rows(several)) == len(several)
    assert compute_max_rows(encode_few_bytes(rows)) >= len(rows)
    assert compute_max_rows(encode_bits(np.packbits(np.ones(13, np.bool_)))) >= 13


@pytest.mark.slow
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


@pytest.mark.slow
@given(numbers.filter(bool) | runs.filter(bool))
def test_run_when_numbers_follow_one_another_then_known_without_them(rows: list[int]) -> None:
    found = np.array(rows, np.int64)
    assert is_run(found) == (rows == list(range(rows[0], rows[0] + len(rows))))
    expected = (rows[0], len(rows)) if len(rows) > 3 and is_run(found) else None
    assert find_run(encode_rows(found)) == expected


@pytest.mark.parametrize("numbers", [[-1, 3, 0], [-1, -3, 2], [-2, 2, 1], [4, 5, 6]])
def test_run_when_the_bytes_stand_for_none_then_none(numbers: list[int]) -> None:
    assert find_run(np.array(numbers, "<i8").tobytes()) is None


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
    assert decode_column("priority", np.array([2.5], "<f8").tobytes(), "<f8", 3).tolist() == [2.5] * 3
    assert decode_column("priority", np.arange(3, dtype="<f8").tobytes(), "<f8", 3).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("nbytes", [0, 7, 16, 25, 32])
def test_column_when_there_are_more_or_fewer_then_error(nbytes: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"invalid priority: {nbytes} bytes"):
        decode_column("priority", bytes(nbytes), "<f8", 3)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 2**44), st.integers(1, 60)), max_size=6))
def test_repeats_when_encoded_then_back_as_they_were(runs: list[tuple[int, int]]) -> None:
    found = np.array([number for number, count in runs for _ in range(count)], np.int64)
    assert decode_repeats(encode_repeats(found), len(found)).tolist() == found.tolist()


def test_repeats_when_very_many_are_equal_then_few_bytes() -> None:
    assert len(encode_repeats(np.repeat(np.array([4, 2]), [30_000, 50_000]))) == 40
    assert len(encode_repeats(np.arange(1000))) == 8000


@pytest.mark.parametrize("numbers", [[-4, 2, 3, 9], [-4, 2, 4, -1, 5], [2, 4, 6], [-4, 2, 5], [-4]])
def test_repeats_when_the_bytes_are_none_then_error(numbers: list[int]) -> None:
    with pytest.raises(RemoteProtocolError, match="4 numbers"):
        decode_repeats(np.array(numbers, "<i8").tobytes(), 4)


@pytest.mark.parametrize("rows", [[], [3], [1, 2, 5], [2, 1], [1, 1], [1, 2, 2]])
def test_each_once_when_sorted_or_not_then_sorted_and_each_once(rows: list[int]) -> None:
    assert sort_unique(np.array(rows, np.int64)).tolist() == sorted(set(rows))
