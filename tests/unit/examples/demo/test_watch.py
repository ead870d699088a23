from __future__ import annotations

import pytest

from tdserve.examples.demo.watch import Episode, Rates, Snapshot, mean_return, parts


def episodes(*returns: float) -> list[Episode]:
    return [Episode(float(number), 0, episode_return, 1) for number, episode_return in enumerate(returns)]


def test_mean_return_waits_for_twenty_episodes() -> None:
    assert mean_return(episodes(*[500.0] * 19)) is None


def test_mean_return_is_that_of_the_last_twenty() -> None:
    assert mean_return(episodes(*[0.0] * 50, *[480.0] * 10, *[470.0] * 10)) == 475.0


def test_rates_are_differences_per_second() -> None:
    first = Snapshot(seconds=1.0, num_transitions=100, num_samples=10, num_updates=1, num_bytes={"gloo": 50})
    last = Snapshot(
        seconds=3.0, num_transitions=300, num_samples=30, num_updates=5, num_bytes={"gloo": 70, "inline": 8}
    )
    rates = Rates.between(first, last)
    assert rates == Rates(transitions=100.0, samples=10.0, updates=2.0, num_bytes={"gloo": 10.0, "inline": 4.0})


def test_rates_without_time_between_are_zero() -> None:
    snapshot = Snapshot(seconds=1.0, num_transitions=5)
    assert Rates.between(Snapshot(seconds=1.0), snapshot).transitions == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [
        (0, 0, []),
        (5, 5, []),
        (0, 3, [0, 1, 2]),
        (2, 4, [2, 3]),
        (0, 4, [0, 1, 2, 3]),
        (0, 6, [2, 3, 0, 1]),
        (3, 6, [3, 0, 1]),
        (4, 6, [0, 1]),
        (6, 8, [2, 3]),
    ],
)
def test_parts_when_a_ring_of_four_is_full_then_what_is_left_in_order(
    first: int, end: int, expected: list[int]
) -> None:
    assert [row for part in parts(first, end, 4) for row in range(4)[part]] == expected
