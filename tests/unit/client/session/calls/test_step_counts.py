from __future__ import annotations

import pytest

from tdserve.client.session.calls.step_counts import StepCount, StepCounts


def take(count: StepCount, step: int | None = None, *, fails: bool = False) -> int:
    """Takes a step in a call that may fail, and returns it."""
    try:
        with count.take(step) as taken:
            if fails:
                raise TimeoutError
    except TimeoutError:
        return taken
    return taken


def test_take_when_a_call_fails_then_the_next_gets_its_step() -> None:
    count = StepCount()
    assert [take(count, fails=fails) for fails in (False, True, False, False)] == [0, 1, 1, 2]


def test_take_when_calls_overlap_then_each_has_its_own_step() -> None:
    count = StepCount()
    with count.take() as first, count.take() as second:
        assert (first, second) == (0, 1)


def test_take_when_a_step_is_named_then_the_count_goes_on_behind_it() -> None:
    count = StepCount()
    assert (take(count, 36), take(count), take(count, 5), count.next) == (36, 37, 5, 6)


def test_take_when_a_call_with_a_step_fails_then_the_count_stays() -> None:
    count = StepCount()
    take(count)
    take(count, 36, fails=True)
    assert count.next == 1


@pytest.mark.parametrize(("is_named", "is_taken", "following"), [(False, False, 5), (True, True, 4)])
def test_take_prefetched_when_another_call_has_had_it_then_only_if_named(
    is_named: bool, is_taken: bool, following: int
) -> None:
    count = StepCount()
    take(count, 4)
    assert count.take_prefetched(3, is_named=is_named) is is_taken
    assert count.next == following


def test_take_prefetched_when_it_comes_next_then_counted() -> None:
    count = StepCount()
    assert count.take_prefetched(0, is_named=False)
    assert count.next == 1


def test_counts_when_asked_by_the_same_reader_then_one_and_otherwise_others() -> None:
    counts = StepCounts()
    take(counts.get("a", 0, 2))
    assert counts.get("a", 0, 2).next == 1
    for other in (("b", 0, 2), ("a", 1, 2), ("a", 0, 4)):
        assert counts.get(*other).next == 0


def test_restart_when_of_one_table_then_only_its_counts_begin_again() -> None:
    counts = StepCounts()
    take(counts.get("a", 0, 2))
    take(counts.get("b", 0, 2))
    counts.restart("a")
    assert (counts.get("a", 0, 2).next, counts.get("b", 0, 2).next) == (0, 1)
