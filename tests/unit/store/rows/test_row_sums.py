"""Checksums of rows: equal for equal rows, and different for damaged ones."""

from __future__ import annotations

import numpy as np
import pytest

from tdserve.store.rows.row_sums import compute_factor, sum_rows

WIDTHS = [1, 3, 8, 64, 100, 4096, (1 << 16) + 24, 300_000]


def _table(num_rows: int, nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_rows, nbytes), np.uint8)


@pytest.mark.parametrize("nbytes", WIDTHS)
def test_sums_when_one_byte_differs_then_that_row_alone_has_another(nbytes: int) -> None:
    table = _table(9, nbytes)
    before = sum_rows(table, 5)
    for place in {0, nbytes // 2, nbytes - 1}:
        changed = table.copy()
        changed[4, place] ^= 0x80
        assert np.flatnonzero(sum_rows(changed, 5) != before).tolist() == [4]


@pytest.mark.parametrize("nbytes", WIDTHS)
def test_sums_when_rows_are_taken_apart_then_are_the_same(nbytes: int) -> None:
    table = _table(7, nbytes)
    together = sum_rows(table, 1)
    assert [int(sum_rows(table[row : row + 1], 1)[0]) for row in range(7)] == together.tolist()


def test_sums_when_many_rows_of_few_bytes_then_none_is_left_out() -> None:
    table = _table(300_000, 2)
    sums = sum_rows(table, 0)
    assert len(np.unique(sums)) == len(np.unique(table.view("<u2")))


def test_sums_when_rows_are_zeros_then_zero() -> None:
    assert sum_rows(np.zeros((3, 100), np.uint8), 7).tolist() == [0, 0, 0]


def test_sums_when_floats_differ_in_their_highest_bits_alone_then_differ() -> None:
    """A multiplication of whole words would hardly notice that half of a row is older."""
    rows = np.random.default_rng(1).choice([1.0, 2.0, 4.0, -1.0], (20_000, 8))
    torn = rows.copy()
    torn[:, 4:] = np.roll(torn[:, 4:], 1, axis=0)
    is_same = (torn == rows).all(axis=1)
    sums = [sum_rows(each.view(np.uint8), 0) for each in (rows, torn)]
    assert ((sums[0] == sums[1]) == is_same).all()


def test_sum_of_when_numbers_differ_then_differs_and_is_odd() -> None:
    found = {int(compute_factor(first, second)) for first in range(30) for second in range(30)}
    assert len(found) == 900
    assert all(number % 2 for number in found)
