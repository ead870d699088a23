"""What is known of a run at its end, as JSON and as the rows of a table. Needs no matplotlib: roles run without."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tdserve.examples.demo.options import DemoOptions
from tdserve.examples.demo.progress import megabytes
from tdserve.examples.demo.watch import NUM_EPISODES_OF_MEAN, Episode, Rates, Snapshot, mean_return


@dataclass(frozen=True)
class Result:
    """One finished run."""

    options: DemoOptions
    target: float | None
    ending: str
    solved: bool
    last: Snapshot
    episodes: list[Episode]

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Seconds, and the mean return of the last 20 episodes at that time; from the 20th episode on."""
        points = []
        for end in range(NUM_EPISODES_OF_MEAN, len(self.episodes) + 1):
            mean = mean_return(self.episodes[:end])
            if mean is not None:
                points.append((self.episodes[end - 1].seconds, mean))
        return points


def to_json(result: Result) -> dict[str, Any]:
    """The figures as JSON's own types."""
    options, last = result.options, result.last
    rates = Rates.between(Snapshot(), last)
    return {
        "env": options.env,
        "seed": options.seed,
        "transport": options.transport,
        "num_actors": options.num_actors,
        "solved": result.solved,
        "ending": result.ending,
        "target_return": result.target,
        **asdict(last),
        "per_second": asdict(rates),
        "curve": [{"seconds": seconds, "mean_return": mean} for seconds, mean in result.curve],
        "episodes": [episode._asdict() for episode in result.episodes],
    }


def summary(result: Result) -> dict[str, str]:
    """The rows of the table that ends a run."""
    last = result.last
    rates = Rates.between(Snapshot(), last)
    moved = ", ".join(f"{name} {megabytes(count)}" for name, count in last.num_bytes.items() if count)
    return {
        "ending": result.ending,
        "seed": f"{result.options.seed}",
        "seconds": f"{last.seconds:.1f}",
        "mean return of the last 20": "-" if last.mean_return is None else f"{last.mean_return:.1f}",
        "episodes": f"{last.num_episodes}",
        "transitions": f"{last.num_transitions:,} ({rates.transitions:,.0f}/s)",
        "samples": f"{last.num_samples:,} ({rates.samples:,.0f}/s)",
        "updates": f"{last.num_updates:,} ({rates.updates:,.0f}/s)",
        "policy versions": f"{last.version}",
        "moved": moved or "nothing: all in shared memory",
    }


def write_json(result: Result, path: Path) -> None:
    """Writes the figures there; makes the folder.

    Raises:
        OSError: A folder or file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(result), indent=1) + "\n")
