from __future__ import annotations

import json

import pytest

from tdserve.bench.figures import Scale, Target, Unit, make_figure
from tdserve.bench.measure import Round


def series(*op_s: float) -> list[Round]:
    """Returns a series with a round of four equal operations for each time; three rounds if there is only one time."""
    return [Round((each,) * 4, 4 * each) for each in (op_s if len(op_s) > 1 else op_s * 3)]


FLOORS = {"first": series(0.5), "second": series(2.0)}


@pytest.mark.parametrize(
    ("scale", "value", "ratio"),
    [
        (Scale("us"), 2e6, 0.25),
        (Scale("ms"), 2e3, 0.25),
        (Scale("rows/s", 64), 32.0, 0.25),
        (Scale("GB/s", 3), 1.5, 0.25),
    ],
)
def test_figure_when_made_in_any_unit_then_the_ratio_compares_it_with_the_floor(
    scale: Scale, value: float, ratio: float
) -> None:
    figure = make_figure("w", "n", scale, subject=series(2.0), floors={"floor": series(0.5)})
    assert figure.median == value
    assert figure.floors[0].ratio == ratio
    assert figure.op_p99_ms == 2000.0
    assert figure.num_ops == 12


@pytest.mark.parametrize(
    ("target", "is_met"),
    [
        (Target("below", 2001.0), True),
        (Target("below", 2000.0), False),
        (Target("at least", 2000.0), True),
        (Target("at least", 2001.0), False),
        (Target("of floor", 0.25), True),
        (Target("of floor", 0.26), False),
        (Target("of floor", 0.9, "second"), True),
        (Target("of floor", 1.1, "second"), False),
        (Target("tail", 4.0), True),
        (Target("tail", 3.9), False),
        (Target("tail", 1.0, "second"), True),
    ],
)
def test_target_when_compared_then_bounds_the_value_or_the_ratio_to_the_floor_that_it_means(
    target: Target, is_met: bool
) -> None:
    figure = make_figure("w", "n", Scale("ms"), subject=series(2.0), floors=FLOORS, targets=[target])
    assert figure.meets(target) is is_met
    assert figure.is_met is is_met


@pytest.mark.parametrize(
    ("bounds", "is_met"), [((), None), ((0.2, 0.9), True), ((0.3, 0.9), False), ((0.2, 1.1), False)]
)
def test_figure_when_it_has_several_targets_then_is_met_when_all_are(
    bounds: tuple[float, ...], is_met: bool | None
) -> None:
    targets = [Target("of floor", bound, floor) for bound, floor in zip(bounds, FLOORS, strict=False)]
    figure = make_figure("w", "n", Scale("ms"), subject=series(2.0), floors=FLOORS, targets=targets)
    assert figure.is_met is is_met


def test_figure_when_a_target_means_a_floor_that_was_not_measured_then_lacks_that_target() -> None:
    targets = [Target("of floor", 0.5, "third"), Target("below", 1.0)]
    figure = make_figure("w", "n", Scale("ms"), subject=series(2.0), floors=FLOORS, targets=targets)
    assert figure.targets == (Target("below", 1.0),)


def test_figure_when_it_has_several_floors_then_the_fastest_way_of_gloo_comes_first() -> None:
    floors = {"memory": series(0.1), "gloo slow": series(2.0), "gloo fast": series(1.0)}
    figure = make_figure("w", "n", Scale("GB/s"), subject=series(2.0), floors=floors)
    assert [floor.name for floor in figure.floors] == ["gloo fast", "gloo slow", "memory"]


def test_figure_when_one_round_is_disturbed_then_its_medians_are_those_of_the_others_and_the_p99_is_not() -> None:
    figure = make_figure("w", "n", Scale("rows/s"), subject=series(1.0, 50.0, 1.0), floors={})
    assert (figure.median, figure.op_median_ms, figure.op_p99_ms) == (1.0, 1e3, 50e3)


def test_figure_when_rounds_have_details_then_has_the_median_of_those_that_have_one() -> None:
    details: list[dict[str, float]] = [{"a": 1.0}, {"a": 9.0, "b": 4.0}, {"a": 2.0, "b": 6.0}]
    subject = [Round((1.0,), 1.0, details=each) for each in details]
    assert make_figure("w", "n", Scale("us"), subject=subject, floors={}).details == {"a": 2.0, "b": 5.0}


@pytest.mark.parametrize(
    ("target", "is_met"),
    [
        (Target("below", 5.0, detail="a"), True),
        (Target("below", 4.0, detail="a"), False),
        (Target("at least", 4.0, detail="a"), True),
        (Target("at least", 5.0, detail="a"), False),
    ],
)
def test_target_when_it_names_a_detail_then_bounds_that_and_not_the_figure(target: Target, is_met: bool) -> None:
    subject = [Round((4.5,), 4.5, details={"a": 4.0})]
    assert make_figure("w", "n", Scale("ms"), subject=subject, floors={}).meets(target) is is_met


def test_p99_when_there_are_a_hundred_operations_then_is_the_second_largest() -> None:
    subject = [Round(tuple(float(i) for i in range(100, 0, -1)), 1.0)]
    assert make_figure("w", "n", Scale("ms"), subject=subject, floors={}).op_p99_ms == 99e3


@pytest.mark.parametrize("unit", ["us", "rows/s"])
def test_ratio_when_both_slow_down_in_the_same_round_then_does_not_move(unit: Unit) -> None:
    floors = {"floor": series(1.0, 10.0, 1.0)}
    figure = make_figure("w", "n", Scale(unit), subject=series(2.0, 20.0, 2.0), floors=floors)
    assert figure.floors[0].ratio == 0.5


def test_figure_when_turned_to_json_then_holds_every_round_and_the_verdict() -> None:
    targets = [Target("of floor", 0.2), Target("below", 1.0)]
    figure = make_figure("w", "n", Scale("ms"), subject=series(2.0), floors={"f": series(0.5)}, targets=targets)
    found = json.loads(json.dumps(figure.to_json()))
    assert found["rounds"] == [2000.0] * 3
    assert found["floors"] == [{"name": "f", "median": 500.0, "ratio": 0.25, "rounds": [500.0] * 3}]
    assert found["targets"] == [
        {"kind": "of floor", "bound": 0.2, "floor": "f", "detail": "", "met": True},
        {"kind": "below", "bound": 1.0, "floor": None, "detail": "", "met": False},
    ]
    assert found["met"] is False
