"""tdserve/observer/pages/page_figures.py: rates, percentiles, trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.call_times import BOUNDS_S, NUM_BUCKETS
from tdserve.observer.pages.page_figures import ShownRates, describe_session, describe_store, find_bound, list_tree
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2


def test_rates_when_counts_were_shown_before_then_their_changes_per_second() -> None:
    rates = ShownRates()
    assert rates.compute("a", (0, 10), 100.0) is None
    assert rates.compute("b", (5,), 101.0) is None
    assert rates.compute("a", (20, 10), 104.0) == [5.0, 0.0]


def test_rates_when_shown_again_at_once_then_those_of_before() -> None:
    rates = ShownRates()
    rates.compute("a", (0,), 100.0)
    assert rates.compute("a", (10,), 102.0) == [5.0]
    assert rates.compute("a", (11,), 102.1) == [5.0]
    assert rates.compute("a", (14,), 104.0) == [2.0]


def test_rates_when_a_count_began_again_then_none_below_zero() -> None:
    rates = ShownRates()
    rates.compute("a", (50,), 100.0)
    assert rates.compute("a", (3,), 102.0) == [0.0]


def test_rates_when_the_clock_began_again_then_as_if_shown_first() -> None:
    rates = ShownRates()
    rates.compute("a", (50,), 100.0)
    assert rates.compute("a", (3,), 2.0) is None
    assert rates.compute("a", (5,), 4.0) == [1.0]


def describe_table(rates: ShownRates, now_s: float, *, inserts: int, is_open: bool) -> Any:
    """Returns what is shown of a table with as many rows as inserts."""
    figures = control_pb2.StoreFigures(is_open=is_open)
    figures.description.name, figures.description.capacity = "table", 100
    figures.description.num_rows = figures.description.inserts = inserts
    return describe_store(figures, rates, now_s)


def test_store_when_it_was_not_opened_then_its_rows_are_unknown_and_no_rate_when_it_is() -> None:
    rates = ShownRates()
    assert describe_table(rates, 1.0, inserts=0, is_open=False)["rows"] is None
    opened = describe_table(rates, 5.0, inserts=50, is_open=True)
    assert (opened["rows"], opened["rate"]) == (50, None)
    assert describe_table(rates, 7.0, inserts=60, is_open=True)["rate"][0] == 5.0


def describe(rates: ShownRates, bytes_in: int, reported_s: float, uptime_s: float) -> Any:
    """Returns the rate of the content of a session that has reported so much."""
    figures = control_pb2.SessionFigures(bytes_in=bytes_in, reported_s=reported_s)
    return describe_session(figures, rates, uptime_s, uptime_s=uptime_s)["content_rate"]


def test_session_when_it_reports_now_and_then_then_the_rate_between_two_reports_and_none_after_a_pause() -> None:
    rates = ShownRates()
    assert describe(rates, 0, 0.0, 50.0) is None
    assert describe(rates, 100, 51.0, 51.5) is None
    assert describe(rates, 600, 56.0, 56.5) == [100.0, 0.0]
    for uptime_s in (57.5, 60.0, 66.0):  # no report has come since
        assert describe(rates, 600, 56.0, uptime_s) == [100.0, 0.0]
    assert describe(rates, 600, 56.0, 70.0) == (0.0, 0.0)


@pytest.mark.parametrize(("share", "bound"), [(0.5, BOUNDS_S[1]), (0.9, BOUNDS_S[3]), (0.99, None)])
def test_bound_when_calls_lie_in_buckets_then_that_of_the_share(share: float, bound: float | None) -> None:
    buckets = [0] * NUM_BUCKETS
    buckets[1], buckets[3], buckets[-1] = 50, 45, 5
    assert find_bound(buckets, share) == bound


def test_tree_when_parts_are_nested_then_each_above_what_is_in_it_in_the_order_of_the_keys() -> None:
    leaf = torch.zeros(2)
    content = TensorDict({"z": leaf, "next": {"obs": leaf, "deep": {"x": leaf}}, "a": leaf}, [])
    lines = [(line["depth"], line["key"]) for line in list_tree(capture(content).spec)]
    order = [key for depth, key in lines if not depth]
    assert sorted(order) == ["a", "next", "z"]
    at = lines.index((0, "next"))
    assert sorted(lines[at + 1 : at + 4]) == [(1, "deep"), (1, "obs"), (2, "x")]
    assert lines.index((2, "x")) == lines.index((1, "deep")) + 1
