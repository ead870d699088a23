"""tdserve/base/call_times.py: counts by fixed bounds."""

from __future__ import annotations

from tdserve.base.call_times import BOUNDS_S, MAX_CALLS, NUM_BUCKETS, OTHER_CALL, CallTimes


def test_count_when_a_call_takes_so_long_then_in_the_bucket_of_the_next_bound() -> None:
    times = CallTimes()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, BOUNDS_S[-1], BOUNDS_S[-1] * 2):
        times.count("sample", seconds)
    (tally,) = times
    assert tally.buckets == [2, 1, *[0] * (NUM_BUCKETS - 4), 1, 1]
    assert tally.sum_s == sum((BOUNDS_S[0] * 2.01, BOUNDS_S[-1] * 3))
    assert not tally.errors


def test_count_when_calls_fail_then_by_code_and_in_the_buckets_too() -> None:
    times = CallTimes()
    for code in ("", "NOT_FOUND", "NOT_FOUND", "ABORTED"):
        times.count("read", 1.0, code)
    (tally,) = times
    assert sum(tally.buckets) == 4
    assert tally.errors == {"NOT_FOUND": 2, "ABORTED": 1}


def test_count_when_there_are_very_many_names_then_the_rest_has_one() -> None:
    times = CallTimes()
    for number in range(1_000):
        times.count(f"call-{number}", 0.0)
    found = {tally.call: sum(tally.buckets) for tally in times}
    assert len(found) == MAX_CALLS
    assert found[OTHER_CALL] == 1_000 - MAX_CALLS + 1


def test_add_when_another_has_counted_then_the_sums() -> None:
    times, theirs = CallTimes(), [0] * NUM_BUCKETS
    theirs[1] = 4
    assert not times
    for _ in range(2):
        times.add("read", theirs, 0.5, {"ABORTED": 1})
    (tally,) = times
    assert (tally.buckets[1], tally.sum_s, tally.errors) == (8, 1.0, {"ABORTED": 2})
    assert theirs[1] == 4
