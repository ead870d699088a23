from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tdserve.examples.demo.demo_options import DemoOptions
from tdserve.examples.demo.demo_run import draw
from tdserve.examples.demo.run_report import (
    SOLVED,
    TIME_IS_UP,
    Ending,
    Result,
    find_ending,
    find_target,
    print_summary,
    summarize,
    write_json,
)
from tdserve.examples.demo.watch import Episode, Snapshot


def result(folder: Path, num_episodes: int = 30, ending: str = "solved") -> Result:
    episodes = [Episode(float(number), number % 2, 10.0 * number, number) for number in range(num_episodes)]
    last = Snapshot(seconds=40.0, num_transitions=8000, num_samples=80_000, num_bytes={"gloo": 4_000_000})
    return Result(DemoOptions(out=folder / "new", seed=3), ending, last, episodes)


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
    rows = summarize(result(tmp_path))
    assert rows["ending"] == "solved"
    assert rows["transitions"] == "8,000 (200/s)"
    assert rows["moved"] == "gloo 4.0 MB"


@pytest.mark.parametrize(("num_transitions", "moved"), [(3, "nothing: all in shared memory"), (0, "nothing")])
def test_summary_when_no_byte_was_moved_then_names_shared_memory_if_there_were_rows(
    tmp_path: Path, num_transitions: int, moved: str
) -> None:
    last = Snapshot(num_transitions=num_transitions, num_bytes={"gloo": 0})
    assert summarize(Result(DemoOptions(), "time is up", last, []))["moved"] == moved


@pytest.mark.slow
@pytest.mark.parametrize("num_episodes", [0, 5, 30])
def test_write_draws_a_curve_however_short_the_run(tmp_path: Path, num_episodes: int) -> None:
    draw(
        result(tmp_path, num_episodes, ending="learner ended unexpectedly (signal 9)"),
        tmp_path / "new" / "learning-curve.png",
    )
    png = (tmp_path / "new" / "learning-curve.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 5000


@pytest.mark.parametrize(
    ("seen", "ending"),
    [
        (Snapshot(seconds=5.0, mean_return=None), None),
        (Snapshot(seconds=5.0, mean_return=474.9), None),
        (Snapshot(seconds=5.0, mean_return=475.0), SOLVED),
        (Snapshot(seconds=10.0, mean_return=475.0), SOLVED),
        (Snapshot(seconds=10.0, mean_return=100.0), TIME_IS_UP),
    ],
)
def test_a_run_ends_at_its_goal_or_when_the_time_is_up(seen: Snapshot, ending: Ending | None) -> None:
    assert find_ending(seen, DemoOptions(target=475.0, max_seconds=10.0)) == ending


def test_target_when_none_is_given_then_is_the_environments_own() -> None:
    assert find_target(DemoOptions(env="CartPole-v1")) == 475.0
    assert find_target(DemoOptions(env="CartPole-v1", target=0.0)) == 0.0


def test_a_run_without_a_target_ends_when_the_time_is_up() -> None:
    options = DemoOptions(env="Pendulum-v1", max_seconds=10.0)
    assert find_ending(Snapshot(seconds=9.0, mean_return=1e9), options) is None
    assert find_ending(Snapshot(seconds=10.0, mean_return=1e9), options) == TIME_IS_UP


def test_summary_keeps_long_values_whole() -> None:
    text = io.StringIO()
    print_summary(Console(file=text, width=60), {"ending": "x" * 100})
    assert text.getvalue().count("x") == 100
