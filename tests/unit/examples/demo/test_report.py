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
    describe,
    find_ending,
    find_target,
    open_display,
    print_summary,
    summarize,
    write_json,
)
from tdserve.examples.demo.watch import Episode, Snapshot, compute_rates


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


SNAPSHOT = Snapshot(
    seconds=10.0, num_episodes=42, mean_return=123.45, num_transitions=1000, num_samples=64_000, num_updates=250,
    version=17, staleness=1.25, num_bytes={"gloo": 5_000_000, "inline": 0},
)  # fmt: skip
RATES = compute_rates(Snapshot(), SNAPSHOT)


def shown(*seconds: float, is_terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=100)
    with open_display(console, DemoOptions()) as show:
        for second in seconds:
            show(Snapshot(seconds=second, num_episodes=7), RATES)
    return text.getvalue()


def test_describe_names_every_figure_of_the_run() -> None:
    assert describe(SNAPSHOT, RATES, target=475.0) == {
        "time": "10 s",
        "return": "123.5 of 475",
        "episodes": "42",
        "transitions": "100/s",
        "samples": "6,400/s",
        "updates": "25/s",
        "bytes": "gloo 0.5 MB/s",
        "policy": "version 17, actors 1.2 behind",
    }


def test_describe_before_anything_happened_shows_no_figures() -> None:
    figures = describe(Snapshot(), compute_rates(Snapshot(), Snapshot()), target=None)
    assert (figures["return"], figures["bytes"], figures["policy"]) == ("-", "-", "version 0, actors -")


def test_progress_without_a_terminal_prints_a_plain_line_every_two_seconds() -> None:
    lines = shown(0.0, 0.5, 1.9, 2.0, 2.5, is_terminal=False).splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["time 0 s", "time 2 s"]
    assert not any("\x1b" in line for line in lines)


def test_progress_on_a_terminal_draws_a_table_with_the_newest_figures() -> None:
    text = shown(0.0, 3.0, is_terminal=True)
    assert "CartPole-v1, seed 0" in text
    assert "3 s" in text
    assert "time 3 s |" not in text


def test_summary_keeps_long_values_whole() -> None:
    text = io.StringIO()
    print_summary(Console(file=text, width=60), {"ending": "x" * 100})
    assert text.getvalue().count("x") == 100
