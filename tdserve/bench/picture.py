"""Draws the figures of a run as a picture. matplotlib is imported only when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.bench.comparison import SavedRun
from tdserve.bench.figures import Figure
from tdserve.bench.report import format_amount

WIDTH_INCHES = 10.0
ROW_INCHES = 0.26
PANEL_INCHES = 0.7
"""Of a panel's axis and frame."""

BESIDE_FLOOR = "% of the floor (as fast: 100)"


class Mark(NamedTuple):
    """A row of a panel.

    Attributes:
        name: What was measured.
        text: The figure, for people.
        value: Where it stands.
        least, most: The range of its rounds.
        before: The value of the saved run; None where there is none.
    """

    name: str
    text: str
    value: float
    least: float
    most: float
    before: float | None


def check_can_draw() -> None:
    """Raises NotSupportedError if matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ModuleNotFoundError as missing:
        if missing.name != "matplotlib":
            raise
        reason = "matplotlib is not installed: pip install 'tdserve[demo]'"
        raise NotSupportedError(feature="a picture (--plot)", reason=reason) from missing


def draw_figures(path: Path, figures: Sequence[Figure], *, title: str, saved: SavedRun | None = None) -> None:
    """Draws a PNG file: the ratios to the floors in one panel, and each unit of the other figures in one of its own.

    Args:
        path: The file.
        figures: What to draw.
        title: Stands above.
        saved: An earlier run, whose values are marked beside the bars.

    Raises:
        NotSupportedError: matplotlib is not installed.
        InvalidRequestError: The file cannot be written.
    """
    check_can_draw()
    from matplotlib.figure import Figure as Picture  # needs no display, and no state of pyplot

    panels = _divide(figures, () if saved is None else saved.figures)
    heights = [PANEL_INCHES + ROW_INCHES * len(marks) for marks in panels.values()]
    picture = Picture(
        figsize=(WIDTH_INCHES, max(sum(heights), PANEL_INCHES + ROW_INCHES) + 0.5), dpi=120, layout="constrained"
    )
    picture.suptitle(title, x=0.01, ha="left", fontsize=10)
    axes = picture.subplots(max(len(panels), 1), squeeze=False, height_ratios=heights or [1.0])[:, 0]
    for each, (label, marks) in zip(axes, panels.items(), strict=False):
        _draw_panel(each, label, marks)
    if saved is not None:
        handles = {
            label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        picture.legend(handles.values(), handles.keys(), loc="outside upper right", ncols=2, fontsize=8)
    try:
        picture.savefig(path, format="png")
    except OSError as fault:
        raise InvalidRequestError(argument="--plot", reason=f"{path}: {fault.strerror}") from fault


def _divide(figures: Sequence[Figure], before: Sequence[Figure]) -> dict[str, list[Mark]]:
    """Returns the rows of each panel, by what its axis shows."""
    earlier = {(figure.workload, figure.name, figure.unit): figure for figure in before}
    panels: dict[str, list[Mark]] = {BESIDE_FLOOR: []} if any(figure.floors for figure in figures) else {}
    for figure in figures:
        old = earlier.get((figure.workload, figure.name, figure.unit))
        name, text = f"{figure.workload}: {figure.name}", format_amount(figure.median, figure.unit)
        if not figure.floors:
            old_median = None if old is None else old.median
            mark = Mark(name, text, figure.median, min(figure.rounds), max(figure.rounds), old_median)
            panels.setdefault(figure.unit, []).append(mark)
        for floor in figure.floors:
            ratios = floor.compute_ratios(figure)
            found = [each.ratio for each in old.floors if each.name == floor.name] if old is not None else []
            old_percent = 100 * found[0] if found else None
            least, most = 100 * min(ratios), 100 * max(ratios)
            of_floor = f"{floor.ratio:.0%}  ({text})"
            mark = Mark(f"{name} / {floor.name}", of_floor, 100 * floor.ratio, least, most, old_percent)
            panels[BESIDE_FLOOR].append(mark)
    return panels


def _draw_panel(axes: Any, label: str, marks: Sequence[Mark]) -> None:
    rows = range(len(marks))
    values = [mark.value for mark in marks]
    spreads = [
        [max(mark.value - mark.least, 0.0) for mark in marks],
        [max(mark.most - mark.value, 0.0) for mark in marks],
    ]
    axes.errorbar(values, rows, xerr=spreads, fmt="o", color="tab:blue", ecolor="tab:gray", capsize=2, label="this run")
    old = [(row, mark.before) for row, mark in zip(rows, marks, strict=True) if mark.before is not None]
    if old:
        axes.plot([value for _, value in old], [row for row, _ in old], "D", color="tab:orange", ms=5, label="before")
    if label == BESIDE_FLOOR:
        axes.axvline(100.0, color="tab:green", linestyle="--")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(left=0.0)
    axes.set_yticks(rows, [mark.name for mark in marks], fontsize=8)
    axes.set_ylim(len(marks) - 0.5, -0.5)
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(rows, [mark.text for mark in marks], fontsize=8)
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)
