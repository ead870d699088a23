from __future__ import annotations

import math

from tdserve.rules.replay.eligibility.lease_ends import LeaseEnds


def take_all(ends: LeaseEnds, now_s: float) -> list[int]:
    """Takes all leases that are over."""
    found = []
    while (number := ends.take_over(now_s)) is not None:
        found.append(number)
    return found


def test_ends_when_their_time_comes_then_in_order_and_once() -> None:
    ends = LeaseEnds()
    for number, end_s in ((1, 5.0), (2, 3.0), (3, 3.0), (4, 9.0)):
        ends.set(number, end_s)
    assert (len(ends), ends.next_s) == (4, 3.0)
    assert take_all(ends, 2.9) == []
    assert take_all(ends, 5.0) == [2, 3, 1]
    assert take_all(ends, 5.0) == []
    assert (len(ends), ends.next_s) == (1, 9.0)


def test_ends_when_set_anew_or_dropped_then_only_the_last_counts() -> None:
    ends = LeaseEnds()
    ends.set(1, 5.0)
    ends.set(2, 6.0)
    ends.set(1, 8.0)
    ends.set(2, 2.0)
    ends.drop(3)
    assert ends.next_s == 2.0
    ends.drop(2)
    assert take_all(ends, 7.0) == []
    assert take_all(ends, 8.0) == [1]
    assert math.isinf(ends.next_s)


def test_ends_when_leases_end_early_again_and_again_then_no_memory_of_them_stays() -> None:
    ends = LeaseEnds()
    ends.set(0, 1e9)
    for number in range(1, 100_000):
        ends.set(number, 1e6 + number)
        ends.drop(number)
        ends.set(0, 1e9 + number)
    assert ends.num_entries < 200
    assert ends.next_s == 1e9 + 99_999
