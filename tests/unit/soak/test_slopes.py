"""Slopes and their verdicts on series whose growth is known."""

from __future__ import annotations

import random

import pytest

from tdserve.soak.slopes import MIN_POINTS, fit_slope

MIB = 1 << 20


def make_series(per_hour: float, *, noise: float = 0.0, num_points: int = 20) -> list[tuple[float, float]]:
    """Returns a point every 90 s of a line that begins at 100 MiB."""
    chance = random.Random(3)
    return [
        (90.0 * number, 100 * MIB + per_hour * 90 * number / 3600 + chance.uniform(-noise, noise))
        for number in range(num_points)
    ]


def test_slope_when_a_figure_rises_under_noise_then_grows_and_the_interval_has_the_true_slope() -> None:
    slope = fit_slope(make_series(40 * MIB, noise=2 * MIB))
    assert slope.low < 40 * MIB < slope.high
    assert slope.low > 20 * MIB
    assert slope.judge(4 * MIB) == "grows"


def test_slope_when_a_figure_only_scatters_then_flat() -> None:
    slope = fit_slope(make_series(0.0, noise=MIB))
    assert slope.low < 0 < slope.high
    assert slope.judge(4 * MIB) == "flat"


def test_slope_when_a_few_points_are_far_off_then_they_do_not_count() -> None:
    series = make_series(0.0, noise=MIB)
    for number in (3, 11, 18):
        series[number] = (series[number][0], 900 * MIB)
    assert fit_slope(series).judge(4 * MIB) == "flat"


def test_slope_when_it_rises_by_less_than_the_tolerance_then_flat() -> None:
    assert fit_slope(make_series(4 * MIB)).judge(4 * MIB) == "flat"  # 1.9 MiB in 28.5 minutes


@pytest.mark.parametrize("num_points", [1, 2, MIN_POINTS - 1])
def test_slope_when_there_are_few_points_then_undecided(num_points: int) -> None:
    assert fit_slope(make_series(500 * MIB, num_points=num_points)).judge(4 * MIB) == "undecided"


def test_slope_when_there_are_just_enough_points_then_a_steady_rise_shows() -> None:
    assert fit_slope(make_series(500 * MIB, num_points=MIN_POINTS)).judge(4 * MIB) == "grows"


def test_slope_when_noise_is_as_large_as_the_growth_then_undecided() -> None:
    assert fit_slope(make_series(0.0, noise=80 * MIB)).judge(4 * MIB) == "undecided"
