from __future__ import annotations

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.replay.plans import PLAIN_ARRIVAL, Arrival, RowsPlan, check_priorities


def test_plan_when_nothing_else_is_said_then_no_row_is_spent_and_none_on_lease() -> None:
    plan = RowsPlan(np.array([3, 1]), np.array([2, 4]), {})
    assert (len(plan.spent), len(plan.spent_generations), plan.lease) == (0, 0, None)


def test_has_repeated_rows_when_asked_then_looks_at_each_batch_by_itself() -> None:
    plan = RowsPlan(np.array([3, 1, 3, 2]), np.array([2, 2, 2, 2]), {}, batch_rows=2)
    assert not plan.has_repeated_rows()
    assert RowsPlan(plan.rows, plan.generations, {}, batch_rows=4).has_repeated_rows()


def test_arrival_when_plain_then_all_leaves_and_the_highest_priority() -> None:
    assert (PLAIN_ARRIVAL.priorities, PLAIN_ARRIVAL.keys, PLAIN_ARRIVAL.ends) == (None, None, None)
    assert PLAIN_ARRIVAL.groups == {}
    assert PLAIN_ARRIVAL.groups is not Arrival().groups


@pytest.mark.parametrize("bad", [-1e-300, np.nan, np.inf, -np.inf])
def test_priorities_when_one_cannot_be_then_it_is_named(bad: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"{bad} is not a finite number") as caught:
        check_priorities(np.array([0.0, 1.0, bad, 2.0]))
    assert caught.value.argument == "priority"


def test_priorities_when_all_can_be_then_accepted() -> None:
    check_priorities(np.array([0.0, 1e300]))
    check_priorities(np.empty(0))
