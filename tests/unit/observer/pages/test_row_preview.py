"""tdserve/observer/pages/row_preview.py: rows as histograms, text and chats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.observer.pages.row_preview import MAX_TEXT, find_chat, make_histogram, shorten


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
    for value in ([], "user", [{"role": "user"}], [1], {"role": "a", "content": "b"}):
        assert find_chat(value) is None


def test_text_when_long_then_cut_and_its_length_said() -> None:
    assert shorten("x" * (MAX_TEXT + 1)) == "x" * MAX_TEXT + "… (2,001 characters)"
    assert shorten("a\nb") == "a\nb"
