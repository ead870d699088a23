from __future__ import annotations

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.replay.eligibility.conditions import PLAIN
from tdserve.rules.replay.plans import (
    PLAIN_ARRIVAL,
    Arrival,
    RowsPlan,
    SamplePlan,
    SampleTerms,
    check_priorities,
)


def test_plan_when_nothing_else_is_said_then_no_row_is_spent() -> None:
    plan = RowsPlan(np.array([3, 1]), np.array([2, 4]), {})
    assert (len(plan.spent), len(plan.spent_generations)) == (0, 0)


@pytest.mark.parametrize(("batch_rows", "is_repeated"), [(2, False), (4, True)])
def test_has_repeated_rows_when_asked_then_looks_at_each_batch_by_itself(batch_rows: int, is_repeated: bool) -> None:
    terms = SampleTerms(PLAIN, lease=None, batch_rows=batch_rows, is_alone=True, num_clears=0, is_counted=True)
    rows = np.array([3, 1, 3, 2])
    plan = SamplePlan(rows, rows, {}, terms=terms, num_missing=0, sequence=rows)
    assert plan.has_repeated_rows() is is_repeated


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
