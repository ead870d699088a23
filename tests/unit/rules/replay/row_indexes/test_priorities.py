from __future__ import annotations

import sys

import numpy as np
import pytest

from tdserve.rules.replay.row_indexes.priorities import MinTree, PriorityTree
from tests.memory import count_bytes

_CAPACITIES = [1, 15, 16, 17, 300, 5000, 70_000]
"""Of one block, several, one level above, two levels above."""


@pytest.mark.parametrize("capacity", _CAPACITIES)
def test_find_when_weights_change_then_as_a_search_in_the_running_sums(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    tree, model = PriorityTree(capacity), np.zeros(capacity)
    for _ in range(30):
        rows = rng.choice(capacity, rng.integers(0, capacity + 1), replace=False)
        # Whole numbers, whose sums are exact in any order; half of them 0.
        model[rows] = rng.integers(0, 100, len(rows)) * rng.integers(0, 2, len(rows))
        tree.set(rows, model[rows])
        assert tree.total == model.sum()
        assert tree.min_positive == model[model > 0].min(initial=np.inf)
        if tree.total:
            targets = np.concatenate(([0.0], np.floor(rng.random(200) * tree.total), rng.random(200) * tree.total))
            assert tree.find(targets).tolist() == np.searchsorted(np.cumsum(model), targets, side="right").tolist()
    assert tree.get(np.arange(capacity)).tolist() == model.tolist()


@pytest.mark.parametrize("capacity", _CAPACITIES)
def test_find_when_a_target_is_at_the_very_end_then_the_last_row_with_a_weight(capacity: int) -> None:
    tree, rng = PriorityTree(capacity), np.random.default_rng(0)
    last = capacity // 2
    # Sums of the same numbers taken in different ways differ in their last bits, one way or the other.
    for _ in range(50):
        tree.set(np.arange(last + 1), rng.random(last + 1) + 0.1)
        over = [np.nextafter(tree.total, 0), tree.total, np.nextafter(tree.total, np.inf), 2 * tree.total]
        assert tree.find(np.array(over)).tolist() == [last] * 4


@pytest.mark.parametrize("seed", range(5))
def test_find_when_weights_differ_beyond_reason_then_never_a_row_of_weight_zero(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = PriorityTree(70_000)
    weights = 10.0 ** rng.uniform(-323, 288, 70_000) * (rng.random(70_000) < 0.02)
    for _ in range(4):
        tree.set(np.arange(70_000), weights)
        found = tree.find(np.concatenate((rng.random(2000), [0.0, 1.0])) * tree.total)
        assert (tree.get(found) > 0).all()
        # Without the largest ones the small ones carry the sums.
        weights[weights > np.quantile(weights[weights > 0], 0.5)] = 0
    assert tree.total > 0


@pytest.mark.parametrize("row", [0, 15, 16, 4095, 69_999])
def test_find_when_one_row_has_the_smallest_float_then_that_row(row: int) -> None:
    tree = PriorityTree(70_000)
    tree.set(np.array([row]), 5e-324)
    assert tree.find(np.array([0.0, 5e-324])).tolist() == [row, row]


def test_total_when_a_huge_weight_came_and_went_then_exactly_what_is_left() -> None:
    tree = PriorityTree(1000)
    tree.set(np.arange(1000), 0.125)
    for _ in range(100):
        tree.set(np.array([500]), 1e288)
        assert tree.total == 1e288
        tree.set(np.array([500]), 0.125)
    assert tree.total == 125.0
    assert tree.min_positive == 0.125


def test_find_when_there_are_very_many_targets_then_all_are_found() -> None:
    tree = PriorityTree(10)
    tree.set(np.array([2, 5]), np.array([1.0, 3.0]))
    targets = np.random.default_rng(0).random(100_000) * 4
    assert tree.find(targets).tolist() == np.where(targets < 1, 2, 5).tolist()
    assert tree.find(targets[:0]).tolist() == []


def test_set_when_no_query_comes_for_long_then_nothing_is_lost() -> None:
    tree, rng = PriorityTree(70_000), np.random.default_rng(0)
    model = np.zeros(70_000)
    for _ in range(400):
        rows = rng.choice(70_000, 256, replace=False)
        model[rows] = rng.integers(1, 9, 256)
        tree.set(rows, model[rows])
        tree.set(rows[:0], model[:0])
    assert tree.total == model.sum()


@pytest.mark.slow
def test_set_when_no_rows_are_given_again_and_again_then_they_do_not_pile_up() -> None:
    tree, none = PriorityTree(10), np.empty(0, np.int64)
    before = count_bytes(tree)
    for _ in range(140_000):
        tree.set(none, 1.0)
    assert count_bytes(tree) - before < 70_000 * sys.getsizeof(none)
    assert tree.total == 0


def test_set_when_a_callers_array_changes_later_then_the_tree_does_not_mind() -> None:
    tree, rows = PriorityTree(100), np.array([50])
    tree.set(rows, 2.0)
    rows[0] = 1
    assert tree.total == 2.0
    assert tree.find(np.array([1.0])).tolist() == [50]


@pytest.mark.slow
@pytest.mark.parametrize("capacity", _CAPACITIES)
def test_lowest_when_numbers_change_then_as_sorted(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    tree, model = MinTree(capacity), np.full(capacity, np.inf)
    for _ in range(20):
        rows = rng.choice(capacity, rng.integers(0, capacity + 1), replace=False)
        model[rows] = rng.integers(0, 50, len(rows))
        tree.set(rows, model[rows])
        gone = rows[::3]
        model[gone] = np.inf
        tree.drop(gone)
        for num_rows in (1, 7, capacity):
            found = tree.find_lowest(num_rows)
            assert len(set(found.tolist())) == len(found)
            ordered = np.sort(model)
            assert model[found].tolist() == ordered[ordered < np.inf][:num_rows].tolist()


def test_lowest_when_there_is_none_then_empty() -> None:
    tree = MinTree(100)
    assert tree.find_lowest(3).tolist() == []
    tree.set(np.array([4]), np.array([0.0]))
    assert tree.find_lowest(3).tolist() == [4]
