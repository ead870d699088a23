"""Live progress of a run: a table that renews itself on a terminal, plain lines elsewhere; the summary at the end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tdserve.examples.demo.watch import Rates, Snapshot

LINE_INTERVAL_S = 2.0
"""Seconds between two plain lines: a log file wants few."""

REFRESHES_PER_S = 4


class Progress:
    """Shows snapshots as they come. A context manager.

    Args:
        console: Where to; whether it is a terminal decides the form.
        target: Mean return that ends the run; None where the environment names none.
    """

    def __init__(self, console: Console, *, title: str, target: float | None) -> None:
        self._console = console
        self._title = title
        self._target = target
        self._open = ExitStack()
        self._live = Live(console=console, refresh_per_second=REFRESHES_PER_S) if console.is_terminal else None
        self._last_line_s = -LINE_INTERVAL_S

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._open.enter_context(self._live)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def show(self, snapshot: Snapshot, rates: Rates) -> None:
        """Renews the table, or prints a line if the last one is two seconds old."""
        if self._live is not None:
            self._live.update(_table(self._title, describe(snapshot, rates, target=self._target)))
        elif snapshot.seconds - self._last_line_s >= LINE_INTERVAL_S:
            self._last_line_s = snapshot.seconds
            parts = describe(snapshot, rates, target=self._target).items()
            self._console.print(" | ".join(f"{name} {value}" for name, value in parts), soft_wrap=True, highlight=False)


def describe(snapshot: Snapshot, rates: Rates, *, target: float | None) -> dict[str, str]:
    """The figures as text, by their names."""
    mean = "-" if snapshot.mean_return is None else f"{snapshot.mean_return:.1f}"
    stale = "-" if snapshot.staleness is None else f"{snapshot.staleness:.1f} behind"
    moved = ", ".join(f"{name} {megabytes(count)}/s" for name, count in rates.num_bytes.items() if count)
    return {
        "time": f"{snapshot.seconds:.0f} s",
        "return": mean if target is None else f"{mean} of {target:g}",
        "episodes": f"{snapshot.num_episodes}",
        "transitions": f"{rates.transitions:,.0f}/s",
        "samples": f"{rates.samples:,.0f}/s",
        "updates": f"{rates.updates:,.0f}/s",
        "bytes": moved or "-",
        "policy": f"version {snapshot.version}, actors {stale}",
    }


def megabytes(num_bytes: float) -> str:
    """A number of bytes as text, in units of 10^6."""
    return f"{num_bytes / 1e6:,.1f} MB"


def print_summary(console: Console, title: str, figures: Mapping[str, str]) -> None:
    """Prints the table that ends a run."""
    console.print(_table(title, figures), soft_wrap=not console.is_terminal)


def _table(title: str, figures: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right", overflow="fold")
    for name, value in figures.items():
        table.add_row(name, value)
    return table
