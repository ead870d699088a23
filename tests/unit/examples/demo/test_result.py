from __future__ import annotations

import json
from pathlib import Path

import pytest

from tdserve.examples.demo.options import DemoOptions
from tdserve.examples.demo.result import Result, summary, write_json
from tdserve.examples.demo.watch import Episode, Snapshot


def result(folder: Path, num_episodes: int = 30, ending: str = "solved") -> Result:
    episodes = [Episode(float(number), number % 2, 10.0 * number, number) for number in range(num_episodes)]
    last = Snapshot(seconds=40.0, num_transitions=8000, num_samples=80_000, num_bytes={"gloo": 4_000_000})
    return Result(DemoOptions(out=folder / "new", seed=3), 475.0, ending, ending == "solved", last, episodes)


def test_curve_begins_with_the_twentieth_episode(tmp_path: Path) -> None:
    curve = result(tmp_path).curve
    assert len(curve) == 11
    assert [seconds for seconds, _ in curve] == [float(number) for number in range(19, 30)]
    assert curve[0][1] == pytest.approx(95.0)
    assert curve[-1][1] == pytest.approx(195.0)


def test_write_leaves_the_figures_as_json(tmp_path: Path) -> None:
    write_json(result(tmp_path), tmp_path / "new" / "figures.json")
    figures = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert figures["solved"] is True
    assert (figures["seed"], figures["seconds"], figures["target_return"]) == (3, 40.0, 475.0)
    assert figures["per_second"]["samples"] == 2000.0
    assert figures["episodes"][1] == {"seconds": 1.0, "actor": 1, "episode_return": 10.0, "policy_version": 1}


def test_summary_gives_counts_with_their_rates(tmp_path: Path) -> None:
    rows = summary(result(tmp_path))
    assert rows["ending"] == "solved"
    assert rows["transitions"] == "8,000 (200/s)"
    assert rows["moved"] == "gloo 4.0 MB"
