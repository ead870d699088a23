from __future__ import annotations

import json
from pathlib import Path

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.bench.bench_options import BenchOptions
from tdserve.bench.comparison import compare_figures, list_differences, read_run
from tdserve.bench.figures import Figure, Scale, Target, Unit, make_figure
from tdserve.bench.measure import Round
from tdserve.bench.report import write_json


def figure(*op_s: float, floor_s: float | None = 1e-3, unit: Unit = "us", name: str = "sample") -> Figure:
    floors = {} if floor_s is None else {"gloo": [Round((floor_s,), floor_s)] * len(op_s)}
    subject = [Round((each,), each) for each in op_s]
    targets = [Target("below", 3.0)]
    return make_figure("w", name, Scale(unit), subject=subject, floors=floors, targets=targets)


def save(path: Path, *figures: Figure, is_quick: bool = False) -> Path:
    options = BenchOptions(quick=is_quick)
    write_json(path, machine={"cores": 2}, options=options, figures=figures, seconds=1.0)
    return path


def test_run_when_saved_and_read_then_has_the_same_figures(tmp_path: Path) -> None:
    written = figure(1e-3, 2e-3, 3e-3)
    found = read_run(save(tmp_path / "run.json", written, is_quick=True))
    (read,) = found.figures
    assert (found.is_quick, found.machine) == (True, {"cores": 2})
    assert {**read.to_json(), "targets": (), "met": None} == {**written.to_json(), "targets": (), "met": None}
    assert read.targets == ()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        ("{", "JSON"),
        ("[]", "tdserve bench --json"),
        ("{}", "figures"),
        ('{"figures": [{"floors": [{"colour": 1}]}], "machine": {}}', "tdserve bench --json"),
        ('{"simulated": [], "figures": []}', "machine"),
    ],
)
def test_run_when_the_file_is_not_one_then_the_error_names_it(tmp_path: Path, content: str | None, named: str) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidRequestError, match=named) as caught:
        read_run(path)
    assert str(path) in str(caught.value)
    assert caught.value.argument == "--compare"


@pytest.mark.parametrize("unit", ["us", "ms", "rows/s", "calls/s"])
def test_change_when_each_operation_takes_half_the_time_then_is_two_in_every_unit(unit: Unit) -> None:
    (found,) = compare_figures([figure(2e-3, 2e-3, 2e-3, unit=unit)], [figure(1e-3, 1e-3, 1e-3, unit=unit)])
    assert found.change.ratio == pytest.approx(2.0)
    assert found.beside_floor is not None
    assert found.beside_floor.ratio == pytest.approx(2.0)
    assert (found.floor, found.change.is_beyond, found.beside_floor.is_beyond) == ("gloo", True, True)


def test_change_when_the_whole_machine_is_slower_then_is_none_beside_the_floor() -> None:
    before = figure(1e-3, 1.1e-3, 1.2e-3)
    now = figure(2e-3, 2.2e-3, 2.4e-3, floor_s=2e-3)
    (found,) = compare_figures([before], [now])
    assert found.change.ratio == pytest.approx(0.5)
    assert found.change.is_beyond
    assert found.beside_floor is not None
    assert found.beside_floor.ratio == pytest.approx(1.0)
    assert not found.beside_floor.is_beyond


def test_change_when_rounds_of_both_runs_overlap_then_is_within_the_spread() -> None:
    (found,) = compare_figures([figure(1e-3, 2e-3, 3e-3)], [figure(2.9e-3, 4e-3, 5e-3)])
    assert found.change.ratio == pytest.approx(0.5)
    assert found.change.is_beyond is False


def test_change_when_a_run_has_two_rounds_then_its_spread_means_nothing() -> None:
    (found,) = compare_figures([figure(1e-3, 1e-3)], [figure(9e-3, 9e-3, 9e-3)])
    assert found.change.is_beyond is None


def test_figures_when_only_one_run_has_them_or_in_another_unit_then_are_left_out() -> None:
    before = [figure(1.0, name="old"), figure(1.0, unit="ms"), figure(1.0, name="both", floor_s=None)]
    found = compare_figures(before, [figure(1.0, name="both"), figure(1.0), figure(1.0, name="new")])
    assert [each.now.name for each in found] == ["both"]
    assert found[0].beside_floor is None


def test_machines_when_compared_then_what_differs_is_named_but_not_what_always_does() -> None:
    before = {"cores": 2, "torch": "2.13", "root": "/a", "load_average_1_min": 0.1, "gone": 1}
    now = {"cores": 4, "torch": "2.13", "root": "/b", "load_average_1_min": 0.2}
    assert list_differences(before, json.loads(json.dumps(now))) == ["cores", "gone"]
