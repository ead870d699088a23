"""Decides when a run ends, and shows it: progress, the table at its end, its figures as JSON.

This module does not import matplotlib: roles run without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
from rich.console import Console
from rich.live import Live
from rich.table import Table

from tdserve.examples.demo.options import DemoOptions
from tdserve.examples.demo.watch import NUM_EPISODES_OF_MEAN, Episode, Rates, Snapshot, mean_return

LINE_INTERVAL_S = 2.0
"""Seconds between two plain lines: a log file wants few."""

REFRESHES_PER_S = 4


class Ending(NamedTuple):
    """Why a run ended, and the exit code that says so."""

    reason: str
    exit_code: int
    details: str = ""  # last lines of a process that died


SOLVED = Ending("solved", 0)
TIME_IS_UP = Ending("time is up", 0)


class Goal(NamedTuple):
    """When a run ends by itself."""

    target: float | None  # mean return; None where the environment names none
    max_seconds: float

    @classmethod
    def of(cls, options: DemoOptions) -> Goal:
        """Returns the goal of a run: the target that it was given, or the environment's own."""
        target = options.target
        if target is None:
            target = gymnasium.spec(options.env).reward_threshold
        return cls(target, options.max_seconds)

    def ending(self, seen: Snapshot) -> Ending | None:
        """Returns the ending that has been reached, if any."""
        if self.target is not None and seen.mean_return is not None and seen.mean_return >= self.target:
            return SOLVED
        return TIME_IS_UP if seen.seconds >= self.max_seconds else None


class ProgressDisplay:
    """Shows snapshots as they come: in a table that renews itself on a terminal, in plain lines elsewhere.

    A context manager.

    Args:
        console: The console to print to; whether it is a terminal decides the form.
        title: The title of the table.
        target: The mean return that ends the run; None where the environment names none.
    """

    def __init__(self, console: Console, *, title: str, target: float | None) -> None:
        self._console = console
        self._title = title
        self._target = target
        self._live = Live(console=console, refresh_per_second=REFRESHES_PER_S) if console.is_terminal else None
        self._last_line_s = -LINE_INTERVAL_S

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, snapshot: Snapshot, rates: Rates) -> None:
        """Renews the table, or prints a line if the last line is two seconds old."""
        figures = describe(snapshot, rates, target=self._target)
        if self._live is not None:
            self._live.update(_table(self._title, figures))
        elif snapshot.seconds - self._last_line_s >= LINE_INTERVAL_S:
            self._last_line_s = snapshot.seconds
            line = " | ".join(f"{name} {value}" for name, value in figures.items())
            self._console.print(line, soft_wrap=True, highlight=False)


def describe(snapshot: Snapshot, rates: Rates, *, target: float | None) -> dict[str, str]:
    """Returns the figures as text, by their names."""
    mean = "-" if snapshot.mean_return is None else f"{snapshot.mean_return:.1f}"
    stale = "-" if snapshot.staleness is None else f"{snapshot.staleness:.1f} behind"
    return {
        "time": f"{snapshot.seconds:.0f} s",
        "return": mean if target is None else f"{mean} of {target:g}",
        "episodes": f"{snapshot.num_episodes}",
        "transitions": f"{rates.transitions:,.0f}/s",
        "samples": f"{rates.samples:,.0f}/s",
        "updates": f"{rates.updates:,.0f}/s",
        "bytes": _megabytes(rates.num_bytes, "/s") or "-",
        "policy": f"version {snapshot.version}, actors {stale}",
    }


@dataclass(frozen=True)
class Result:
    """One finished run."""

    options: DemoOptions
    target: float | None
    ending: str
    last: Snapshot
    episodes: list[Episode]

    @property
    def is_solved(self) -> bool:
        """Whether the mean return reached its target."""
        return self.ending == SOLVED.reason

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Pairs of seconds and the mean return of the last 20 episodes at that time, from the 20th episode on."""
        means = ((seen.seconds, mean_return(self.episodes[: end + 1])) for end, seen in enumerate(self.episodes))
        return [(seconds, mean) for seconds, mean in means if mean is not None]


def write_json(result: Result, path: Path) -> None:
    """Writes the figures to a file, and makes its folder.

    Raises:
        OSError: A folder or file cannot be written.
    """
    options = result.options
    figures: dict[str, Any] = {
        **{name: getattr(options, name) for name in ("env", "seed", "transport", "num_actors")},
        "solved": result.is_solved,
        "ending": result.ending,
        "target_return": result.target,
        **asdict(result.last),
        "per_second": asdict(Rates.between(Snapshot(), result.last)),
        "curve": [{"seconds": seconds, "mean_return": mean} for seconds, mean in result.curve],
        "episodes": [episode._asdict() for episode in result.episodes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")


def summary(result: Result) -> dict[str, str]:
    """Returns the rows of the table that ends a run."""
    last = result.last
    rates = Rates.between(Snapshot(), last)
    return {
        "ending": result.ending,
        "seed": f"{result.options.seed}",
        "seconds": f"{last.seconds:.1f}",
        f"mean return of the last {NUM_EPISODES_OF_MEAN}": (
            "-" if last.mean_return is None else f"{last.mean_return:.1f}"
        ),
        "episodes": f"{last.num_episodes}",
        "transitions": f"{last.num_transitions:,} ({rates.transitions:,.0f}/s)",
        "samples": f"{last.num_samples:,} ({rates.samples:,.0f}/s)",
        "updates": f"{last.num_updates:,} ({rates.updates:,.0f}/s)",
        "policy versions": f"{last.version}",
        "moved": _megabytes(last.num_bytes) or "nothing: all in shared memory",
    }


def print_summary(console: Console, figures: Mapping[str, str]) -> None:
    """Prints the table that ends a run."""
    console.print(_table("tdserve demo", figures), soft_wrap=not console.is_terminal)


def _megabytes(num_bytes: Mapping[str, float], per: str = "") -> str:
    """Returns bytes by transport as text, in units of 10^6. Transports that moved nothing are left out."""
    return ", ".join(f"{name} {count / 1e6:,.1f} MB{per}" for name, count in num_bytes.items() if count)


def _table(title: str, figures: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right", overflow="fold")
    for name, value in figures.items():
        table.add_row(name, value)
    return table
