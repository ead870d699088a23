"""How the figures are shown: rich tables for people, one JSON file for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tdserve.bench.figures import Figure, Target
from tdserve.bench.machine import Fact
from tdserve.bench.options import BenchOptions
from tdserve.errors import InvalidRequestError

NOTE = (
    "reached: 100% is as fast as that floor, measured in turn with it; a target in % means a figure's first floor\n"
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
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("measured", min_width=22)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("p99/op", justify="right", no_wrap=True)
    if has_floors:
        table.add_column("floor", min_width=14)
        table.add_column("its median", justify="right", no_wrap=True)
        table.add_column("reached", justify="right", no_wrap=True)
        table.add_column("target", no_wrap=True)
    for figure in found:
        own = (figure.name, _amount(figure.value, figure.unit), _duration(figure.op_p99_ms))
        floors = [(floor.name, _amount(floor.value, figure.unit), f"{floor.ratio:.0%}") for floor in figure.floors]
        if not floors:
            table.add_row(*own)
            continue
        table.add_row(*own, *floors[0], _verdict(figure, is_judged))
        for floor in floors[1:]:
            table.add_row("", "", "", *(Text(cell, style="dim") for cell in floor), "")
    console.print(table)
    console.print()


def show_summary(console: Console, figures: Iterable[Figure], *, is_judged: bool, seconds: float) -> None:
    """Prints how many targets are reached, and which are not."""
    judged = [figure for figure in figures if figure.target is not None]
    missed = [figure for figure in judged if not figure.is_met]
    console.print(NOTE, style="dim")
    if is_judged:
        console.print(f"targets met: {len(judged) - len(missed)} of {len(judged)}; took {seconds:.0f} s")
        for figure in missed:
            console.print(f"  not met: {figure.workload}: {figure.name}", style="yellow")
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


def _verdict(figure: Figure, is_judged: bool) -> Text:
    target = figure.target
    if target is None:
        return Text("")
    if not is_judged:
        return Text(_bound(target, figure.unit), style="dim")
    verdict, style = ("met", "green") if figure.is_met else ("not met", "bold red")
    return Text(f"{_bound(target, figure.unit)} {verdict}", style=style)


def _bound(target: Target, unit: str) -> str:
    """Without the unit of a rate: the figure itself names it, and lines stay short."""
    if target.kind == "of floor":
        return f">= {target.bound:.0%}"
    return f"< {_amount(target.bound, unit)}" if target.kind == "below" else f">= {target.bound:,.0f}"
