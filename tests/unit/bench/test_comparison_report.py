from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from tdserve.bench.comparison import SavedRun
from tdserve.bench.comparison_report import show_comparison
from tdserve.bench.figures import Figure, Scale, make_figure
from tdserve.bench.measure import Round


def figure(name: str, op_s: float, *, has_floor: bool = True, workload: str = "w") -> Figure:
    rounds, floor = [Round((op_s,), op_s)] * 3, [Round((1e-3,), 1e-3)] * 3
    return make_figure(workload, name, Scale("us"), subject=rounds, floors={"gloo": floor} if has_floor else {})


MEMCPY, SLOW_MEMCPY = (figure("memcpy", op_s, has_floor=False, workload="floors") for op_s in (1e-3, 2e-3))
BEFORE = SavedRun(
    Path("old.json"),
    {"cores": 4},
    is_quick=False,
    figures=(figure("sample", 1e-3), figure("extend", 3e-3), figure("map", 1e-3, has_floor=False), MEMCPY),
)
NOW = (
    SLOW_MEMCPY,
    figure("sample", 2e-3),
    figure("extend", 1e-3),
    figure("map", 1e-3, has_floor=False),
    figure("new", 1e-3),
)


def show(width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    show_comparison(console, BEFORE, NOW, machine={"cores": 2})
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_comparison_when_figures_changed_then_each_has_ratios_and_marks_beyond_the_spread() -> None:
    rows = [[cell.strip() for cell in line.split("│")] for line in show(140).splitlines() if "│" in line]
    assert rows == [
        ["floors: memcpy", "1000 us", "2000 us", "0.50 ↓", "", ""],
        ["w: sample", "1000 us", "2000 us", "0.50 ↓", "0.50 ↓", "gloo"],
        ["w: extend", "3000 us", "1000 us", "3.00 ↑", "3.00 ↑", "gloo"],
        ["w: map", "1000 us", "1000 us", "1.00", "", ""],
    ]


def test_comparison_when_shown_then_counts_changes_and_names_what_differs() -> None:
    text = " ".join(show(140).split())
    assert "compared with old.json" in text
    assert "other than before: cores" in text
    assert "4 of 5 figures are in both" in text
    assert "where there is one: 1 faster, 1 slower" in text


def test_comparison_when_the_terminal_is_narrow_then_fits() -> None:
    text = show(40)
    assert max(map(len, text.splitlines())) <= 40
    assert "0.50 ↓" in text
