"""Shows the figures: as rich tables for people, and as one JSON file for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from tdserve.base.errors import InvalidRequestError
from tdserve.bench.bench_options import BenchOptions
from tdserve.bench.figures import Figure, FloorFigure, Target
from tdserve.bench.fitted_table import TableColumn, print_fitted
from tdserve.bench.machine_facts import Fact

NOTE = (
    "reached: 100% is as fast as that floor, measured in turn with it\n"
    "targets in %, or with x for times, mean the floor in their line\n"
    "p99/op: over all single operations; in a pipeline, of the gaps between two completions\n"
    "CPU: microseconds of a process for one operation\n"
    "targets without a floor: set where a gloo round trip took 120 to 160 us"
)

DETAILS_NOTE = (
    "calculated, not measured: the calls per second for which control, the workers or all cores would suffice"
)

COLUMNS = (
    TableColumn("measured", 14),
    TableColumn("median"),
    TableColumn("reached"),  # beside the figure itself: the table is made for it
    TableColumn("floor", 10),
    TableColumn("its median"),
    TableColumn("p99/op"),
    TableColumn("target", 12),
)

OWN = ("measured", "median", "p99/op")
"""The columns that every table has."""

BAR_COLUMNS = 40
"""The length of the longest bar, where there is room for it."""

MIN_BAR_COLUMNS = 8


def show_machine(console: Console, machine: Mapping[str, Fact]) -> None:
    """Prints what machine the figures were measured on."""
    console.print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items()), style="dim")


def show_figures(console: Console, figures: Sequence[Figure], *, title: str, is_judged: bool) -> None:
    """Prints one table, without the columns of floors or targets where there are none, and plots rates of calls.

    Args:
        console: Where to print.
        figures: The rows of the table.
        title: Stands above the table.
        is_judged: Whether targets are compared; with quick sizes that would mean nothing.
    """
    richest_first = sorted(figures, key=lambda figure: -len(figure.details))
    details = list(dict.fromkeys(name for figure in richest_first for name in figure.details))
    lines = [line for figure in figures for line in _make_lines(figure, details, is_judged)]
    shown = [at for at, column in enumerate(COLUMNS) if column.heading in OWN or any(line[at] for line in lines)]
    columns = [*(COLUMNS[at] for at in shown), *map(TableColumn, details)]
    rows = [[*(line[at] for at in shown), *line[len(COLUMNS) :]] for line in lines]
    print_fitted(console, columns, rows, title=title)
    _plot_rates(console, figures)
    console.print()


def _make_lines(figure: Figure, details: Sequence[str], is_judged: bool) -> Iterator[list[Text]]:
    """Yields a line for each floor, the cells in the order of the columns, then those of the details.

    Only the first line names the figure.
    """
    for floor in figure.floors or (None,):
        is_first = floor is None or floor is figure.floors[0]
        name, median, p99 = ("", "", "")
        if is_first:
            name, p99 = figure.name, _format_duration(figure.op_p99_ms)
            median = format_amount(figure.median, figure.unit)
        beside = ("", "", "")
        if floor is not None:
            beside = (f"{floor.ratio:.0%}", floor.name, format_amount(floor.median, figure.unit))
        cells = [Text(cell, style="" if is_first else "dim") for cell in (name, median, *beside, p99)]
        values = [figure.details.get(name) if is_first else None for name in details]
        numbers = [Text("" if value is None else f"{value:,.0f}") for value in values]
        yield [*cells, _format_verdicts(figure, floor, is_first, is_judged), *numbers]


def _plot_rates(console: Console, figures: Sequence[Figure]) -> None:
    """Prints a bar for each rate of calls; those whose names differ only behind the comma have one scale."""
    rates = [figure for figure in figures if figure.unit == "calls/s"]
    for _, group in groupby(rates, lambda figure: figure.name.rpartition(",")[0]):
        alike = list(group)
        most = max(figure.median for figure in alike)
        amounts = [format_amount(figure.median, figure.unit) for figure in alike]
        beside = max(map(len, amounts)) + max(len(figure.name) for figure in alike) + 2
        width = max(min(BAR_COLUMNS, console.width - beside), MIN_BAR_COLUMNS)
        plot = Table.grid(Column(overflow="fold"), Column(width=width), Column(no_wrap=True), padding=(0, 1))
        for figure, amount in zip(alike, amounts, strict=True):
            plot.add_row(figure.name, Bar(most, 0, figure.median, width=width), amount)
        console.print()
        console.print(plot)


def show_summary(console: Console, figures: Sequence[Figure], *, is_judged: bool, seconds: float) -> None:
    """Prints how many targets are reached, and which ones are not."""
    judged = [(figure, target) for figure in figures for target in figure.targets]
    missed = [(figure, target) for figure, target in judged if not figure.meets(target)]
    console.print(NOTE, style="dim")
    if any(name.startswith("calculated") for figure in figures for name in figure.details):
        console.print(DETAILS_NOTE, style="dim")
    if is_judged:
        console.print(f"targets met: {len(judged) - len(missed)} of {len(judged)}; took {seconds:.0f} s")
        for figure, target in missed:
            floor = figure.find_floor(target)
            of = "" if floor is None else f" of {floor.name}"
            bound = _format_bound(target, figure.unit)
            console.print(f"  not met: {figure.workload}: {figure.name}: {bound}{of}", style="yellow", markup=False)
    else:
        console.print(f"quick sizes: targets are not judged; took {seconds:.0f} s")


def write_json(
    path: Path, *, machine: Mapping[str, Fact], options: BenchOptions, figures: Iterable[Figure], seconds: float
) -> None:
    """Writes everything that was measured, each round included.

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
            "clients": options.clients,
        },
        "seconds": seconds,
        "figures": [figure.to_json() for figure in figures],
    }
    write_content(path, content)


def write_content(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file.

    Raises:
        InvalidRequestError: It cannot be written.
    """
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise InvalidRequestError(argument="--json", reason=f"{path}: {error.strerror}") from error


def format_amount(value: float, unit: str) -> str:
    """Returns three significant digits, and large rates with k or M, so that columns stay narrow."""
    if unit == "rows/s" and value >= 1e3:
        return f"{value / 1e6:.2f} M{unit}" if value >= 1e6 else f"{value / 1e3:.3g} k{unit}"
    if unit == "us" and value >= 1e4:
        return f"{value / 1e3:.3g} ms"
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _format_duration(ms: float) -> str:
    return format_amount(ms, "ms") if ms >= 1 else format_amount(ms * 1e3, "us")


def _format_verdicts(figure: Figure, floor: FloorFigure | None, is_first: bool, is_judged: bool) -> Text:
    """Returns the targets that mean this floor and, beside the first floor, those that bound the figure itself."""
    text = Text("")
    for target in figure.targets:
        meant = figure.find_floor(target)
        if meant is not floor and not (meant is None and is_first):
            continue
        bound = _format_bound(target, figure.unit)
        space = " " if text else ""
        if not is_judged:
            text.append(space + bound, style="dim")
        elif figure.meets(target):
            text.append(f"{space}{bound} met", style="green")
        else:
            text.append(f"{space}{bound} not met", style="bold red")
    return text


def _format_bound(target: Target, unit: str) -> str:
    """Returns the bound without the unit of a rate: the figure itself names it, and lines stay short."""
    if target.kind == "of floor":
        return f">= {target.bound:.0%}"
    if target.kind == "tail":
        return f"p99 <= {target.bound:g}x"
    if target.detail:
        return f"{target.detail} {'<' if target.kind == 'below' else '>='} {target.bound:,.0f}"
    return f"< {format_amount(target.bound, unit)}" if target.kind == "below" else f">= {target.bound:,.0f}"
