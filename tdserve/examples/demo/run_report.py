"""Decides when a run ends, and shows how: the table at its end, its figures as JSON.

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
from rich.table import Table

from tdserve.examples.demo.demo_options import DemoOptions
from tdserve.examples.demo.watch import NUM_EPISODES_OF_MEAN, Episode, Snapshot, compute_mean_return, compute_rates


class Ending(NamedTuple):
    """Why a run ended, and the exit code that says so."""

    reason: str
    exit_code: int
    details: str = ""  # last lines of a process that died


SOLVED = Ending("solved", 0)
TIME_IS_UP = Ending("time is up", 0)


def find_target(options: DemoOptions) -> float | None:
    """Returns the mean return that solves a run: the one that was given, or the environment's own, if it has one."""
    return gymnasium.spec(options.env).reward_threshold if options.target is None else options.target


def find_ending(seen: Snapshot, options: DemoOptions) -> Ending | None:
    """Returns the ending that a run has reached, if any."""
    target = find_target(options)
    if target is not None and seen.mean_return is not None and seen.mean_return >= target:
        return SOLVED
    return TIME_IS_UP if seen.seconds >= options.max_seconds else None


@dataclass(frozen=True)
class Result:
    """One finished run."""

    options: DemoOptions
    ending: str
    last: Snapshot
    episodes: list[Episode]

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Pairs of seconds and the mean return of the last 20 episodes at that time, from the 20th episode on."""
        means = (
            (seen.seconds, compute_mean_return(self.episodes[: end + 1])) for end, seen in enumerate(self.episodes)
        )
        return [(seconds, mean) for seconds, mean in means if mean is not None]


def write_json(result: Result, path: Path) -> None:
    """Writes the figures to a file, and makes its folder.

    Raises:
        OSError: A folder or file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(describe_run(result), indent=1) + "\n")


def describe_run(result: Result) -> dict[str, Any]:
    """Returns the figures of a run for JSON."""
    return {
        **{name: getattr(result.options, name) for name in ("env", "seed", "transport", "num_actors")},
        "solved": result.ending == SOLVED.reason,
        "ending": result.ending,
        "target_return": find_target(result.options),
        **asdict(result.last),
        "per_second": compute_rates(Snapshot(), result.last),
        "curve": [{"seconds": seconds, "mean_return": mean} for seconds, mean in result.curve],
        "episodes": [episode._asdict() for episode in result.episodes],
    }


def summarize(result: Result) -> dict[str, str]:
    """Returns the rows of the table that ends a run."""
    last = result.last
    rates = compute_rates(Snapshot(), last)
    nothing = "nothing: all in shared memory" if last.num_transitions else "nothing"
    return {
        "ending": result.ending,
        "seed": f"{result.options.seed}",
        "seconds": f"{last.seconds:.1f}",
        f"mean return of the last {NUM_EPISODES_OF_MEAN}": format_decimal(last.mean_return),
        "episodes": f"{last.num_episodes}",
        "transitions": f"{last.num_transitions:,} ({rates['transitions']:,.0f}/s)",
        "samples": f"{last.num_samples:,} ({rates['samples']:,.0f}/s)",
        "updates": f"{last.num_updates:,} ({rates['updates']:,.0f}/s)",
        "policy versions": f"{last.version}",
        "moved": format_megabytes(last.num_bytes) or nothing,
    }


def print_summary(console: Console, figures: Mapping[str, str]) -> None:
    """Prints the table that ends a run."""
    table = Table(title="tdserve demo", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right", overflow="fold")
    for name, value in figures.items():
        table.add_row(name, value)
    console.print(table, soft_wrap=not console.is_terminal)


def format_decimal(value: float | None) -> str:
    """Returns a number with one decimal, or ``-``."""
    return "-" if value is None else f"{value:.1f}"


def format_megabytes(num_bytes: Mapping[str, float], per: str = "") -> str:
    """Returns bytes by transport as text, in units of 10^6. Transports that moved nothing are left out."""
    return ", ".join(f"{name} {count / 1e6:,.1f} MB{per}" for name, count in num_bytes.items() if count)
