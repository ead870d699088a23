"""tdserve/observer/pages/page_figures.py: rates, percentiles, trees."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.call_times import BOUNDS_S, NUM_BUCKETS
from tdserve.observer.pages.page_figures import ShownRates, find_bound, list_tree
from tdserve.structure.capture import capture


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
