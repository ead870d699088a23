from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.examples.demo.figures import write
from tdserve.examples.demo.options import DemoOptions
from tdserve.examples.demo.result import Result
from tdserve.examples.demo.watch import Episode, Snapshot


def result(folder: Path, num_episodes: int = 30, ending: str = "solved") -> Result:
    episodes = [Episode(float(number), number % 2, 10.0 * number, number) for number in range(num_episodes)]
    last = Snapshot(seconds=40.0, num_transitions=8000, num_samples=80_000, num_bytes={"gloo": 4_000_000})
    return Result(DemoOptions(out=folder / "new", seed=3), 475.0, ending, ending == "solved", last, episodes)


@pytest.mark.parametrize("num_episodes", [0, 5, 30])
def test_write_draws_a_curve_however_short_the_run(tmp_path: Path, num_episodes: int) -> None:
    write(result(tmp_path, num_episodes, ending="learner ended unexpectedly (signal 9)"))
    png = (tmp_path / "new" / "learning-curve.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 5000
