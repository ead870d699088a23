"""tdserve/observer/pages/row_preview.py: rows as histograms, text and chats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.observer.pages.row_preview import (
    MAX_PRIORITIES,
    MAX_TEXT,
    find_chat,
    make_histogram,
    shorten,
    spread_evenly,
)


def test_histogram_when_numbers_are_odd_then_those_that_are_finite_count() -> None:
    values = np.array([np.nan, np.inf, *range(10)])
    found = make_histogram([values])
    assert found is not None
    assert (found["low"], found["high"], found["mean"], found["num_odd"]) == ("0", "9", "4.5", 2)
    assert max(bar["height"] for bar in found["bars"]) == 40


@pytest.mark.parametrize(
    "arrays",
    [
        [],
        [np.zeros(100)],
        [np.arange(5)],
        [np.array(["a"] * 20)],
        [np.full(20, np.nan)],
        [np.array([-1e308, 1e308] * 9)],
    ],
)
def test_histogram_when_there_is_nothing_to_show_then_none(arrays: Any) -> None:
    assert make_histogram(arrays) is None


def test_chat_when_a_value_is_one_then_role_and_content() -> None:
    assert find_chat([{"role": "user", "content": "hi\nyou\x1b"}]) == [("user", "hi\nyou\\x1b")]
    assert find_chat({"messages": [{"role": "user", "content": "hi"}], "id": 3}) == [("id", "3"), ("user", "hi")]
    for value in ([], "user", [{"role": "user"}], [1], {"role": "a", "content": "b"}):
        assert find_chat(value) is None


def test_text_when_long_then_cut_and_its_length_said() -> None:
    assert shorten("x" * (MAX_TEXT + 1)) == "x" * MAX_TEXT + "… (2,001 characters)"
    assert shorten("a\nb") == "a\nb"


@pytest.mark.parametrize("num_rows", [0, 1, MAX_PRIORITIES, MAX_PRIORITIES + 1, 10_000_000])
def test_rows_when_spread_then_all_or_some_at_equal_distances_from_the_first_to_the_last(num_rows: int) -> None:
    found = spread_evenly(num_rows)
    assert len(found) == min(num_rows, MAX_PRIORITIES)
    assert len(set(found.tolist())) == len(found)
    if num_rows:
        assert (found[0], found[-1]) == (0, num_rows - 1)
    assert len(found) < 2 or np.ptp(np.diff(found)) <= 1
