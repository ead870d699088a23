"""How the figures are shown: rich tables for people, one JSON file for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tdserve.base.errors import InvalidRequestError
from tdserve.bench.figures import Figure, FloorFigure, Target
from tdserve.bench.machine import Fact
from tdserve.bench.options import BenchOptions
from tdserve.cli.render import print_whole

NOTE = (
    "reached: 100% is as fast as that floor, measured in turn with it; a target in % means the floor in its line\n"
    "p99/op: over all single operations; in a pipeline, of the gaps between two completions"
)


def show_machine(console: Console, machine: Mapping[str, Fact]) -> None:
    """Prints what the figures were measured on."""
    console.print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items()), style="dim")


def show_figures(console: Console, figures: Iterable[Figure], *, title: str, is_judged: bool) -> None:
    """Prints one table.

    Args:
        console: Where.
        figures: Its rows.
        title: Above it.
        is_judged: Whether targets are compared; with quick sizes they would mean nothing.
    """
    found = list(figures)
    has_floors = any(figure.floors for figure in found)
    has_targets = any(figure.targets for figure in found)
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("measured", min_width=14)
    table.add_column("median", justify="right", no_wrap=True)
    if has_floors:  # beside the figure itself: it is what the table is for
        table.add_column("reached", justify="right", no_wrap=True)
        table.add_column("floor", min_width=8)
        table.add_column("its median", justify="right", no_wrap=True)
    table.add_column("p99/op", justify="right", no_wrap=True)
    if has_targets:
        table.add_column("target", min_width=12)
    for figure in found:
        for number, floor in enumerate(figure.floors or (None,)):
            is_first = number == 0
            name, median, p99 = figure.name, _amount(figure.value, figure.unit), _duration(figure.op_p99_ms)
            cells: list[Text | str] = [*((name, median) if is_first else ("", ""))]
            if has_floors:
                style = "" if is_first else "dim"
                cells += [Text(cell, style=style) for cell in _floor_cells(floor, figure.unit)]
            cells.append(p99 if is_first else "")
            if has_targets:
                cells.append(_verdicts(figure, floor, is_first, is_judged))
            table.add_row(*cells)
    print_whole(console, table)
    console.print()


def show_summary(console: Console, figures: Iterable[Figure], *, is_judged: bool, seconds: float) -> None:
    """Prints how many targets are reached, and which are not."""
    judged = [(figure, target) for figure in figures for target in figure.targets]
    missed = [(figure, target) for figure, target in judged if not figure.meets(target)]
    console.print(NOTE, style="dim")
    if is_judged:
        console.print(f"targets met: {len(judged) - len(missed)} of {len(judged)}; took {seconds:.0f} s")
        for figure, target in missed:
            floor = figure.floor_of(target)
            of = "" if floor is None else f" of {floor.name}"
            bound = _bound(target, figure.unit)
            console.print(f"  not met: {figure.workload}: {figure.name}: {bound}{of}", style="yellow", markup=False)
    else:
        console.print(f"quick sizes: targets are not judged; took {seconds:.0f} s")


def write_json(
    path: Path, *, machine: Mapping[str, Fact], options: BenchOptions, figures: Iterable[Figure], seconds: float
) -> None:
    """Writes all that was measured, each round included.

    Raises:
        InvalidRequestError: The file cannot be written.
    """
    content = {
        "machine": dict(machine),
        "options": {
            "workloads": list(options.workloads),
            "transport": options.transport,
            "rounds": options.num_rounds,
            "quick": options.quick,
        },
        "seconds": seconds,
        "figures": [figure.to_json() for figure in figures],
    }
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise InvalidRequestError(argument="--json", reason=f"{path}: {error.strerror}") from error


def _amount(value: float, unit: str) -> str:
    """Three significant digits; large rates with k or M, so that columns stay narrow."""
    if unit == "rows/s" and value >= 1e3:
        return f"{value / 1e6:.2f} M{unit}" if value >= 1e6 else f"{value / 1e3:.3g} k{unit}"
    if unit == "us" and value >= 1e4:
        return f"{value / 1e3:.3g} ms"
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _duration(ms: float) -> str:
    return _amount(ms, "ms") if ms >= 1 else _amount(ms * 1e3, "us")


def _floor_cells(floor: FloorFigure | None, unit: str) -> tuple[str, str, str]:
    return ("", "", "") if floor is None else (f"{floor.ratio:.0%}", floor.name, _amount(floor.value, unit))


def _verdicts(figure: Figure, floor: FloorFigure | None, is_first: bool, is_judged: bool) -> Text:
    """What stands beside one floor: the targets that mean it and, beside the first, those of the figure itself."""
    text = Text("")
    for target in figure.targets:
        meant = figure.floor_of(target)
        if meant is not floor and not (meant is None and is_first):
            continue
        bound = _bound(target, figure.unit)
        space = " " if text else ""
        if not is_judged:
            text.append(space + bound, style="dim")
        elif figure.meets(target):
            text.append(f"{space}{bound} met", style="green")
        else:
            text.append(f"{space}{bound} not met", style="bold red")
    return text


def _bound(target: Target, unit: str) -> str:
    """Without the unit of a rate: the figure itself names it, and lines stay short."""
    if target.kind == "of floor":
        return f">= {target.bound:.0%}"
    return f"< {_amount(target.bound, unit)}" if target.kind == "below" else f">= {target.bound:,.0f}"
