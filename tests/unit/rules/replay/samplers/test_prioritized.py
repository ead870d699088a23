from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError, LocalProtocolError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.prioritized import Prioritized, PrioritizedSelector
from tests import chi_square


def _selector(sampler: Prioritized, priorities: Any, rows: Rows | None = None) -> PrioritizedSelector:
    columns = RowColumns(len(priorities))
    columns.priority[:] = priorities
    selector = sampler.make_selector(columns, len(priorities))
    selector.add(np.arange(len(priorities)) if rows is None else rows)
    return selector


@pytest.mark.parametrize("sampler", [Prioritized(), Prioritized(alpha=1, eps=0), Prioritized(0), Prioritized(2, 1, 1)])
def test_draw_when_priorities_differ_then_frequencies_follow_the_formula(sampler: Prioritized) -> None:
    rng = np.random.default_rng(0)
    priorities = rng.random(400) * 3
    # On the way there are rows that go, come back, and change.
    columns = RowColumns(400)
    columns.priority[:] = 77.0
    selector = sampler.make_selector(columns, 400)
    selector.add(np.arange(400))
    selector.remove(np.arange(0, 400, 3))
    columns.priority[:] = priorities
    selector.update(np.arange(400))
    selector.add(np.arange(0, 400, 3))
    expected = (priorities + sampler.eps) ** sampler.alpha
    expected /= expected.sum()
    counts = np.zeros(400, np.int64)
    for _ in range(400):
        drawn = selector.draw(256, rng=rng)
        assert drawn is not None
        counts += np.bincount(drawn.rows, minlength=400)
    assert chi_square.statistic(counts, expected) < chi_square.limit(400)


def test_draw_when_seen_in_pairs_then_draws_are_independent() -> None:
    selector = _selector(Prioritized(alpha=1, eps=0), np.arange(1, 9))
    drawn = selector.draw(2 * 51_200, rng=np.random.default_rng(1))
    assert drawn is not None
    pairs = np.bincount(drawn.rows[::2] * 8 + drawn.rows[1::2], minlength=64)
    single = np.arange(1, 9) / 36
    assert chi_square.statistic(pairs, np.outer(single, single).reshape(-1)) < chi_square.limit(64)


def test_draw_when_it_returns_columns_then_they_follow_the_formulas() -> None:
    sampler = Prioritized(alpha=0.7, beta=0.5, eps=1e-3)
    priorities = np.array([0.0, 0.5, 1.0, 4.0, 9.0, 0.0])
    selector = _selector(sampler, priorities, np.array([1, 2, 3, 4]))
    drawn = selector.draw(500, rng=np.random.default_rng(0))
    assert drawn is not None
    assert set(drawn.rows.tolist()) == {1, 2, 3, 4}
    weights = (priorities + 1e-3) ** 0.7
    probability = weights[drawn.rows] / weights[1:5].sum()
    lowest = weights[1] / weights[1:5].sum()
    assert {name: column.dtype for name, column in drawn.columns.items()} == {
        "priority": np.float32,
        "probability": np.float32,
        "priority_weight": np.float32,
    }
    np.testing.assert_allclose(drawn.columns["priority"], priorities[drawn.rows], rtol=1e-6)
    np.testing.assert_allclose(drawn.columns["probability"], probability, rtol=1e-6)
    np.testing.assert_allclose(drawn.columns["priority_weight"], (probability / lowest) ** -0.5, rtol=1e-6)
    assert drawn.columns["priority_weight"].max() == 1


def test_draw_when_beta_is_one_then_weighted_rows_count_as_if_uniform() -> None:
    selector = _selector(Prioritized(alpha=1, beta=1, eps=0), np.array([1.0, 2.0, 5.0]))
    drawn = selector.draw(300_000, rng=np.random.default_rng(0))
    assert drawn is not None
    sums = np.bincount(drawn.rows, weights=drawn.columns["priority_weight"])
    np.testing.assert_allclose(sums / sums.sum(), 1 / 3, atol=0.01)


def test_draw_when_all_weights_are_zero_then_none() -> None:
    columns = RowColumns(10)
    selector = Prioritized(eps=0).make_selector(columns, 10)
    rng = np.random.default_rng(0)
    assert selector.draw(1, rng=rng) is None
    assert not selector.explain_none()
    selector.add(np.arange(5))
    assert len(selector) == 5
    assert selector.draw(1, rng=rng) is None
    assert "the 5 that may be drawn have priority 0" in selector.explain_none()
    columns.priority[[3, 7]] = 1.0
    selector.update(np.array([3, 7]))
    drawn = selector.draw(20, rng=rng)
    assert drawn is not None
    assert set(drawn.rows.tolist()) == {3}
    assert not selector.explain_none()
    selector.remove(np.array([3, 7]))
    assert len(selector) == 4
    assert selector.draw(1, rng=rng) is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 5.0, 1e300])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1e300])
def test_draw_when_priorities_are_extreme_then_numbers_stay_finite(alpha: float, beta: float) -> None:
    selector = _selector(Prioritized(alpha, beta), np.array([0.0, 5e-324, 1e-30, 1.0, 1e30, 1.7e308]))
    drawn = selector.draw(1000, rng=np.random.default_rng(0))
    assert drawn is not None
    assert all(np.isfinite(column).all() for column in drawn.columns.values())
    assert (drawn.columns["priority_weight"] <= 1).all()


def test_add_when_a_row_is_a_member_already_then_our_own_bug() -> None:
    selector = _selector(Prioritized(), np.ones(4), np.array([1, 2]))
    with pytest.raises(LocalProtocolError):
        selector.add(np.array([2, 3]))
    assert len(selector) == 2
    assert repr(selector) == "<PrioritizedSelector 2 rows>"


def test_selectors_when_one_loses_a_row_then_the_other_keeps_it() -> None:
    columns = RowColumns(4)
    columns.priority[:] = 1.0
    sampler = Prioritized()
    first, second = sampler.make_selector(columns, 4), sampler.make_selector(columns, 4)
    for selector in (first, second):
        selector.add(np.arange(4))
    first.remove(np.array([0, 1, 2]))
    drawn = [selector.draw(100, rng=np.random.default_rng(0)) for selector in (first, second)]
    assert [len(set(each.rows.tolist())) for each in drawn if each] == [1, 4]


@pytest.mark.parametrize("argument", ["alpha", "beta", "eps"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "1", None, True])
def test_prioritized_when_a_value_cannot_be_then_refused(argument: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Prioritized(**{argument: value})
    assert caught.value.argument == argument


def test_prioritized_when_given_integers_then_equal_to_floats() -> None:
    assert repr(Prioritized(1, 0, 0)) == repr(Prioritized(1.0, 0.0, 0.0))
    Prioritized().check(1)
