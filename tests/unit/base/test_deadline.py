from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, InvalidRequestError
from tests.errors import raises


class _Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_remaining_when_time_passes_then_shrinks_to_zero_and_stays() -> None:
    clock = _Clock()
    deadline = Deadline.after(2.0, clock)
    assert deadline.remaining_s == 2.0
    clock.now_s += 1.5
    assert deadline.remaining_s == 0.5
    clock.now_s += 9
    assert deadline.remaining_s == 0.0


def test_limit_when_less_is_left_then_that_and_never_below_zero() -> None:
    clock = _Clock()
    deadline = Deadline.after(2.0, clock)
    assert (deadline.limit(1.5), deadline.limit(9.0)) == (1.5, 2.0)
    clock.now_s += 3
    assert deadline.limit(1.5) == 0.0
    assert Deadline.never.limit(9.0) == 9.0


def test_shorten_when_less_is_left_then_the_same_deadline_and_else_one_so_far_away() -> None:
    clock = _Clock()
    deadline = Deadline.after(2.0, clock)
    assert deadline.shorten(1.5) == Deadline.after(1.5, clock)
    assert deadline.shorten(2.0) is deadline
    clock.now_s += 3
    assert deadline.shorten(1.5) is deadline
    assert Deadline.never.shorten(1.5).timeout_s == 1.5


def test_expired_when_exactly_reached_then_true() -> None:
    clock = _Clock()
    deadline = Deadline.after(2, clock)
    clock.now_s = 101.999
    assert not deadline.expired
    clock.now_s = 102.0
    assert deadline.expired


def test_zero_when_asked_then_expired_without_waiting() -> None:
    deadline = Deadline.after(0)
    assert deadline.expired
    assert deadline.remaining_s == 0.0


@pytest.mark.parametrize("timeout_s", [None, math.inf])
def test_no_limit_when_asked_then_never_expires(timeout_s: float | None) -> None:
    clock = _Clock()
    deadline = Deadline.after(timeout_s, clock)
    clock.now_s = math.inf
    assert deadline.remaining_s is None
    assert not deadline.expired
    deadline.raise_if_expired("anything")


@pytest.mark.parametrize("timeout_s", [np.float32(2), np.int64(2), np.float64(2), Fraction(2)], ids=repr)
def test_after_when_the_number_is_of_another_type_then_so_many_seconds(timeout_s: Any) -> None:
    deadline = Deadline.after(timeout_s, _Clock())
    assert deadline.remaining_s == 2.0
    assert type(deadline.timeout_s) is float


def test_after_when_larger_than_any_float_then_never() -> None:
    assert Deadline.after(10**400) == Deadline.never
    with raises(InvalidRequestError, argument="timeout_s"):
        Deadline.after(-(10**400))


def test_begun_when_time_passes_then_that_of_the_making() -> None:
    clock = _Clock()
    made_s, deadline = clock.now_s, Deadline.after(1.5, clock)
    clock.now_s += 2
    assert deadline.begun_s == pytest.approx(made_s)
    assert Deadline.never.begun_s is None


def test_never_when_used_then_has_no_end() -> None:
    assert Deadline.never.remaining_s is None
    assert not Deadline.never.expired


def test_overdue_when_the_time_is_up_then_counts_from_there() -> None:
    clock = _Clock()
    deadline = Deadline.after(1.5, clock)
    assert deadline.overdue_s == Deadline.never.overdue_s == 0.0
    clock.now_s += 2
    assert deadline.overdue_s == 0.5


def test_raise_if_expired_when_expired_then_names_what_and_the_asked_time() -> None:
    clock = _Clock()
    deadline = Deadline.after(1.5, clock)
    deadline.raise_if_expired("a version of 'policy'")
    clock.now_s += 2
    with pytest.raises(DeadlineExceededError) as caught:
        deadline.raise_if_expired("a version of 'policy'")
    assert caught.value.fields == {"what": "a version of 'policy'", "timeout_s": 1.5}


@pytest.mark.parametrize("timeout_s", [-1, -0.001, math.nan, "5", True])
def test_after_when_no_time_then_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Deadline.after(timeout_s)
    assert caught.value.argument == "timeout_s"


@pytest.mark.parametrize(
    ("first", "other", "is_long_before"),
    [
        (Deadline(10.0, 5.0), Deadline(10.4, 30.0), False),
        (Deadline(10.0, 5.0), Deadline(10.6, 30.0), True),
        (Deadline(10.0, 0.0), Deadline(10.1, 30.0), True),
        (Deadline(10.0, 5.0), Deadline.never, True),
        (Deadline.never, Deadline(10.0, 5.0), False),
        (Deadline.never, Deadline.never, False),
    ],
)
def test_long_before_when_the_difference_is_more_than_a_tenth_then_true(
    first: Deadline, other: Deadline, is_long_before: bool
) -> None:
    assert first.is_long_before(other) == is_long_before
    assert first.is_near(other) == other.is_near(first) == (not is_long_before and not other.is_long_before(first))
