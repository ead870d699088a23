from __future__ import annotations

from statistics import median

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.bench.figures import Scale
from tdserve.bench.measure import (
    Pacing,
    Round,
    Series,
    Task,
    alternate,
    compute_percentile,
    time_round,
)


def series(*medians_s: float) -> Series:
    return Series(tuple(Round((each, each), 2 * each) for each in medians_s))


def test_percentile_of_a_hundred_values_when_asked_for_99_then_gives_the_second_largest() -> None:
    assert compute_percentile([float(i) for i in range(100, 0, -1)], 99) == 99.0


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 2.0), (99, 3.0), (100, 3.0)])
def test_percentile_of_few_values_when_asked_then_is_one_of_them(percent: float, expected: float) -> None:
    assert compute_percentile([3.0, 1.0, 2.0], percent) == expected


def test_percentile_of_nothing_when_asked_then_refuses() -> None:
    with pytest.raises(InvalidRequestError):
        compute_percentile([], 99)


def test_timed_round_when_operations_are_short_then_runs_until_the_most_it_may() -> None:
    done = time_round(lambda: None, Pacing(10.0, min_ops=2, max_ops=7))
    assert len(done.op_s) == 7


def test_timed_round_when_time_is_up_at_once_then_still_runs_the_fewest_it_must() -> None:
    done = time_round(lambda: None, Pacing(0.0, min_ops=3))
    assert len(done.op_s) == 3


def test_timed_round_when_given_before_and_finish_then_calls_them_in_order() -> None:
    events: list[str] = []
    time_round(
        lambda: events.append("op"),
        Pacing(0.0, min_ops=2),
        before=lambda: events.append("before"),
        finish=lambda: events.append("finish"),
    )
    assert events == ["before", "op", "before", "op", "finish"]


def test_timed_round_when_finish_takes_long_then_counts_it_once_and_before_never() -> None:
    def busy() -> None:
        sum(range(200_000))

    with_finish = time_round(lambda: None, Pacing(0.0, min_ops=1), finish=busy)
    with_before = time_round(lambda: None, Pacing(0.0, min_ops=1), before=busy)
    assert with_finish.elapsed_s > sum(with_finish.op_s)
    assert with_before.elapsed_s == sum(with_before.op_s)


def test_alternate_when_run_then_floors_and_subject_take_turns_and_the_first_turn_is_dropped() -> None:
    events: list[str] = []

    def task(name: str) -> Task:
        def run_round(_: Pacing) -> Round:
            events.append(name)
            return Round((float(len(events)),), 1.0)

        return Task(run_round, lambda _: events.append(f"check {name}"))

    found = alternate({"floor": task("floor"), "own": task("own")}, 2, Pacing(0.0))
    assert events == ["floor", "check floor", "own", "check own"] * 3
    assert [each.op_s for each in found["own"].rounds] == [(7.0,), (11.0,)]


def test_series_when_one_round_is_disturbed_then_its_median_and_rate_are_those_of_the_others() -> None:
    disturbed = series(1.0, 50.0, 1.0)
    assert disturbed.median_s == 1.0
    assert median(Scale("rows/s").convert_rounds(disturbed)) == 1.0
    assert disturbed.p99_s == 50.0


def test_ratios_when_both_slow_down_in_the_same_round_then_do_not_move() -> None:
    floor, own = series(1.0, 10.0, 1.0), series(2.0, 20.0, 2.0)
    assert Scale("us").compute_ratio(floor, own) == 0.5
    assert Scale("rows/s").compute_ratio(floor, own) == 0.5
