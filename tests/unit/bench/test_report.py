from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from tdserve.base.errors import InvalidRequestError
from tdserve.bench.bench_options import BenchOptions
from tdserve.bench.figures import Figure, Scale, Target, make_figure
from tdserve.bench.measure import Round
from tdserve.bench.report import show_figures, show_machine, show_summary, write_json

WRITTEN = (Target("at least", 1e6),)


def figure(op_s: float = 2e-4, targets: Sequence[Target] = WRITTEN) -> Figure:
    subject, gloo, memory = ([Round((each,), each)] for each in (op_s, 1e-4, 5e-5))
    floors = {"gloo": gloo, "memory": memory}
    return make_figure("w", "extend", Scale("rows/s", 256), subject=subject, floors=floors, targets=targets)


def shown(*figures: Figure, is_judged: bool = True) -> str:
    console = Console(file=io.StringIO(), width=120)
    show_figures(console, figures, title="w", is_judged=is_judged)
    show_summary(console, figures, is_judged=is_judged, seconds=12.3)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_when_a_target_is_met_then_shows_value_floor_share_and_verdict() -> None:
    text = shown(figure())
    for part in ("extend", "1.28 Mrows/s", "200 us", "gloo", "2.56 Mrows/s", "50%", ">= 1,000,000 met"):
        assert part in text


def test_table_when_a_target_is_missed_then_the_summary_names_it() -> None:
    text = shown(figure(1e-3), figure())
    assert "targets met: 1 of 2; took 12 s" in text
    assert "not met: w: extend: >= 1,000,000" in text


def test_table_when_targets_mean_different_floors_then_each_stands_beside_its_own() -> None:
    targets = [Target("at least", 1e6), Target("of floor", 0.4), Target("of floor", 0.3, "memory")]
    lines = {
        name: line for line in shown(figure(targets=targets)).splitlines() for name in ("50%", "25%") if name in line
    }
    assert ">= 1,000,000 met >= 40% met" in lines["50%"]
    assert ">= 30% not met" in lines["25%"]
    text = shown(figure(targets=targets))
    assert "targets met: 2 of 3" in text
    assert "not met: w: extend: >= 30% of memory" in text


def test_table_when_a_figure_has_a_target_and_no_floor_then_shows_the_verdict() -> None:
    series = [Round((1e-3,), 1e-3)]
    bare = make_figure("w", "map", Scale("ms"), subject=series, floors={}, targets=[Target("below", 2.0)])
    assert "< 2 ms met" in shown(bare)
    assert "< 2 ms met" in shown(bare, figure())


def test_table_when_sizes_are_quick_then_nothing_is_judged() -> None:
    assert "not met" not in shown(figure(1e-3), is_judged=False)


def test_table_when_the_console_is_narrow_then_no_figure_is_cut() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    show_figures(console, [figure()], title="w", is_judged=True)
    assert isinstance(console.file, io.StringIO)
    words = console.file.getvalue().split()
    for word in ("1.28", "Mrows/s", "50%", "25%", "memory", "met"):
        assert word in words


@pytest.mark.parametrize("width", [80, 100])
def test_table_when_it_goes_into_a_pipe_then_every_column_is_there_and_no_line_is_broken(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    show_figures(console, [figure()], title="w", is_judged=True)
    assert isinstance(console.file, io.StringIO)
    heading, first = (line for line in console.file.getvalue().splitlines() if "measured" in line or "extend" in line)
    assert [name.strip() for name in heading.split("┃")] == [
        "measured", "median", "reached", "floor", "its median", "p99/op", "target",
    ]  # fmt: skip
    assert [cell.strip() for cell in first.split("│")] == [
        "extend", "1.28 Mrows/s", "50%", "gloo", "2.56 Mrows/s", "200 us", ">= 1,000,000 met",
    ]  # fmt: skip


def test_table_when_figures_have_details_then_each_has_a_column_and_rates_of_calls_have_bars_to_scale() -> None:
    rounds = {
        "read, 1 client": Round((0.01,), 0.01, details={"control CPU": 12.0}),
        "read, 2 clients": Round((0.02,), 0.02, details={"calculated: cores": 5.0, "control CPU": 1_234.0}),
        "write, 1 client": Round((1.0,), 1.0),
    }
    scale = Scale("calls/s")
    targets = [Target("below", 80.0, detail="control CPU")]
    text = shown(
        *(
            make_figure("w", name, scale, subject=[each], floors={}, targets=targets if each.details else ())
            for name, each in rounds.items()
        )
    )
    assert "not met: w: read, 2 clients: control CPU < 80" in text
    table = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
    assert table == [
        ["read, 1 client", "100 calls/s", "10 ms", "control CPU < 80 met", "", "12"],
        ["read, 2 clients", "50 calls/s", "20 ms", "control CPU < 80 not met", "5", "1,234"],
        ["write, 1 client", "1 calls/s", "1000 ms", "", "", ""],
    ]
    bars = [line.count("█") for line in text.splitlines() if "█" in line]
    assert bars == [40, 20, 40]
    assert "calculated, not measured" in text


def test_machine_when_shown_then_every_fact_stands_there() -> None:
    console = Console(file=io.StringIO(), width=120)
    show_machine(console, {"cores": 2, "memory_gib": 23.5})
    assert isinstance(console.file, io.StringIO)
    assert "cores 2, memory gib 23.5" in console.file.getvalue()


def test_json_when_written_then_holds_machine_options_and_figures(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, machine={"cores": 2}, options=BenchOptions(quick=True), figures=[figure()], seconds=1.5)
    content = json.loads(path.read_text())
    assert content["machine"] == {"cores": 2}
    assert content["options"]["transport"] == "gloo"
    assert content["figures"][0]["met"] is True


def test_json_when_its_folder_is_missing_then_the_error_names_the_path(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "figures.json"
    with pytest.raises(InvalidRequestError, match="missing"):
        write_json(path, machine={}, options=BenchOptions(), figures=[], seconds=0.0)
