"""Shows how the figures of a run have changed since a saved one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from tdserve.bench.bench_options import FLOORS
from tdserve.bench.comparison import MIN_ROUNDS, Change, Comparison, SavedRun, compare_figures, list_differences
from tdserve.bench.figures import Figure
from tdserve.bench.fitted_table import TableColumn, print_fitted
from tdserve.bench.machine_facts import Fact
from tdserve.bench.report import format_amount
from tdserve.cli.screen.render import escape_unprintable

COLUMNS = (
    TableColumn("figure", 14),
    *map(TableColumn, ("before", "now", "ratio", "beside floor")),
    TableColumn("floor", 12),
)

FASTER, SLOWER = " ↑", " ↓"

NOTE = (
    "ratio: 2.00 is twice as fast as before; beside floor: that of its ratio to the floor, which the machine moves less"
    f"\n{FASTER.strip()} faster, {SLOWER.strip()} slower beyond the spread: every round of one run beats every round of"
    f" the other; without a mark the rounds overlap, or there are fewer than {MIN_ROUNDS}"
)


def show_comparison(
    console: Console, saved: SavedRun, figures: Sequence[Figure], *, machine: Mapping[str, Fact]
) -> None:
    """Prints a row for each figure that both runs have, and how many have changed beyond the spread.

    Args:
        console: Where to print.
        saved: The earlier run.
        figures: Figures of this run.
        machine: Facts of this run's machine.
    """
    found = compare_figures(saved.figures, figures)
    path = escape_unprintable(str(saved.path))
    print_fitted(console, COLUMNS, _list_rows(found), title=f"compared with {path}")
    if differences := list_differences(saved.machine, machine):
        names = ", ".join(escape_unprintable(name.replace("_", " ")) for name in differences)
        console.print(f"other than before: {names}", style="yellow", markup=False)
    console.print(NOTE, style="dim")
    # what a figure lost beside its floor is tdserve's own; where there is no floor, the figure itself is judged
    changes = [each.beside_floor or each.change for each in found if each.now.workload != FLOORS]
    num_faster = sum(bool(change.is_beyond) and change.ratio > 1 for change in changes)
    num_slower = sum(bool(change.is_beyond) and change.ratio < 1 for change in changes)
    console.print(
        f"{len(found)} of {len(figures)} figures are in both; beyond the spread, beside the floor where there is one:"
        f" {num_faster} faster, {num_slower} slower",
        markup=False,
    )


def _list_rows(found: Sequence[Comparison]) -> Iterator[tuple[str | Text, ...]]:
    for each in found:
        unit = each.now.unit
        yield (
            escape_unprintable(f"{each.now.workload}: {each.now.name}"),
            format_amount(each.before.median, unit),
            format_amount(each.now.median, unit),
            _format_change(each.change),
            "" if each.beside_floor is None else _format_change(each.beside_floor),
            escape_unprintable(each.floor or ""),
        )


def _format_change(change: Change) -> Text:
    text = f"{change.ratio:.2f}"
    if not change.is_beyond:
        return Text(f"{text}  ")  # numbers stand below each other, with and without a mark
    return Text(text + FASTER, style="green") if change.ratio > 1 else Text(text + SLOWER, style="bold red")
