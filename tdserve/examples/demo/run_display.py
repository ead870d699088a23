"""Shows a run while it learns: on a terminal as a screen that renews itself, elsewhere a plain line now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tdserve.examples.demo.demo_options import DemoOptions
from tdserve.examples.demo.demo_stores import MIN_ROWS
from tdserve.examples.demo.run_report import find_target, format_decimal, format_megabytes
from tdserve.examples.demo.watch import NUM_EPISODES_OF_MEAN, Snapshot

LINE_INTERVAL_S = 2.0
"""Seconds between two plain lines: a log file needs few."""

REFRESHES_PER_S = 4

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " _.-=+*%#"
"""A character of the curve, by how many eighths of it are filled."""

CURVE_LINES = 5
LOW_CURVE_LINES = 2
LOW_SCREEN_LINES = 16
"""A terminal with fewer lines gets the lower curve."""

Show = Callable[[Snapshot, dict[str, Any]], None]


@contextmanager
def open_display(console: Console, options: DemoOptions) -> Iterator[Show]:
    """Yields what shows snapshots with their rates: on a screen that renews itself, or in plain lines.

    Args:
        console: The console to print to; whether it is a terminal decides the form.
        options: Options of the run.
    """
    target, shown_s = find_target(options), -LINE_INTERVAL_S

    def print_line(snapshot: Snapshot, rates: dict[str, Any]) -> None:
        nonlocal shown_s
        if snapshot.seconds - shown_s < LINE_INTERVAL_S:
            return
        shown_s = snapshot.seconds
        figures = describe(snapshot, rates, target=target)
        parts = [f"{name} {value}" for name, value in figures.items()]
        if not snapshot.num_updates:
            parts[1:] = [describe_phase(snapshot)]  # all figures are still 0
        console.print(" | ".join(parts), soft_wrap=True)

    if not console.is_terminal or console.is_dumb_terminal:
        yield print_line
        return
    screen = RunScreen(options, target)
    with Live(screen, console=console, refresh_per_second=REFRESHES_PER_S):
        yield screen.show


def describe(snapshot: Snapshot, rates: dict[str, Any], *, target: float | None) -> dict[str, str]:
    """Returns the figures as text, by their names."""
    mean = format_decimal(snapshot.mean_return)
    stale = "-" if snapshot.staleness is None else f"{snapshot.staleness:.1f} behind"
    return {
        "time": f"{snapshot.seconds:.0f} s",
        "return": mean if target is None else f"{mean} of {target:g}",
        "episodes": f"{snapshot.num_episodes}",
        "transitions": f"{rates['transitions']:,.0f}/s",
        "samples": f"{rates['samples']:,.0f}/s",
        "updates": f"{rates['updates']:,.0f}/s",
        "bytes": format_megabytes(rates["num_bytes"], "/s") or "-",
        "policy": f"version {snapshot.version}, actors {stale}",
    }


def describe_phase(snapshot: Snapshot) -> str:
    """Returns what a run is doing that has no mean return yet; empty for one that has."""
    if snapshot.mean_return is not None:
        return ""
    if not snapshot.num_transitions:
        return "the actors start: no transition yet"
    if not snapshot.num_updates:
        return f"the actors act at random: {snapshot.num_transitions} transitions, learning begins with {MIN_ROWS}"
    return f"learns; {snapshot.num_episodes} of the {NUM_EPISODES_OF_MEAN} episodes of a mean return are over"


class RunScreen:
    """What a terminal shows of a run: its return as a bar and as a curve, its rates, and how old actors' policies are.

    Fits any width. ``rich`` asks for it again and again, from a thread of its own.

    Args:
        options: Options of the run.
        target: The mean return that solves it; None shows no bar.
    """

    def __init__(self, options: DemoOptions, target: float | None) -> None:
        self._options = options
        self._target = target
        self._means: list[float] = []
        self._figures: dict[str, str] = {}
        self._newest = Snapshot()

    def show(self, snapshot: Snapshot, rates: dict[str, Any]) -> None:
        """Shows a snapshot from now on, and its mean return as the end of the curve."""
        if snapshot.mean_return is not None:
            self._means.append(snapshot.mean_return)
        self._newest = snapshot
        self._figures = describe(snapshot, rates, target=self._target)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._options.title, style="bold")
        if phase := describe_phase(self._newest):
            yield Text(phase, style="yellow")
        if not self._figures:
            return
        figures, means = self._figures, self._means[:]  # the learner appends meanwhile
        grid = Table.grid(padding=(0, 1))
        grid.add_column(justify="right", style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        share = find_share(means, self._target)
        grid.add_row("return", Text(figures["return"] + ("" if share is None else f"  ({share:.0%})"), style="bold"))
        if share is not None:
            grid.add_row("", ProgressBar(total=1.0, completed=share))
        if means:
            low, high = find_range(means, self._target)
            width = options.max_width - len("transitions") - 1
            num_lines = LOW_CURVE_LINES if console.size.height < LOW_SCREEN_LINES else CURVE_LINES
            blocks = ASCII_BLOCKS if options.ascii_only else BLOCKS
            curve = draw_curve(means, low=low, high=high, width=width, num_lines=num_lines, blocks=blocks)
            labels = [f"{high:g}", *[""] * (len(curve) - 2), f"{low:g}"]
            for label, line in zip(labels, curve, strict=True):
                grid.add_row(label, Text(line, style="green", no_wrap=True))
        grid.add_row("time", f"{figures['time']} of at most {self._options.max_seconds:g} s")
        for name in ("episodes", "transitions", "samples", "updates", "bytes", "policy"):
            grid.add_row(name, Text(figures[name]))
        yield grid


def find_range(means: Sequence[float], target: float | None) -> tuple[float, float]:
    """Returns the lower and the upper end of a curve: the target is in it, and 0 unless the target is negative."""
    ends = [*means, *([] if target is None else [target]), *([] if target is not None and target < 0 else [0.0])]
    low, high = min(ends), max(ends)
    return low, high if high > low else low + 1.0


def find_share(means: Sequence[float], target: float | None) -> float | None:
    """Returns how much of the way to the target the newest mean return has come, from 0.0 to 1.0; None without one.

    The way begins at 0, or at the lowest mean return where that, or the target, is negative.
    """
    if target is None:
        return None
    low, _ = find_range(means, target)
    if not means or target <= low:
        return float(bool(means))
    return min(max((means[-1] - low) / (target - low), 0.0), 1.0)


def draw_curve(
    values: Sequence[float], *, low: float, high: float, width: int, num_lines: int, blocks: str = BLOCKS
) -> list[str]:
    """Returns the lines of a curve, from the top. More values than columns are averaged.

    Args:
        values: At least one.
        low, high: The values of its lower and upper edge.
        width: The most columns.
        num_lines: Its height.
        blocks: The characters from empty to full.
    """
    num_columns = min(len(values), max(width, 1))
    edges = [at * len(values) // num_columns for at in range(num_columns + 1)]
    columns = [fmean(values[first:end]) for first, end in pairwise(edges)]
    full = len(blocks) - 1
    # the least value has something to be seen too
    filled = [max(round((value - low) / (high - low) * num_lines * full), 1) for value in columns]
    return [
        "".join(blocks[min(max(each - line * full, 0), full)] for each in filled) for line in reversed(range(num_lines))
    ]
