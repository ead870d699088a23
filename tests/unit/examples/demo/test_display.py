"""What a run shows while it learns."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from tdserve.examples.demo.demo_options import DemoOptions
from tdserve.examples.demo.run_display import (
    ASCII_BLOCKS,
    BLOCKS,
    RunScreen,
    describe,
    describe_phase,
    draw_curve,
    find_range,
    find_share,
    open_display,
)
from tdserve.examples.demo.watch import Snapshot, compute_rates

SNAPSHOT = Snapshot(
    seconds=10.0, num_episodes=42, mean_return=123.45, num_transitions=1000, num_samples=64_000, num_updates=250,
    version=17, staleness=1.25, num_bytes={"gloo": 5_000_000, "inline": 0},
)  # fmt: skip
RATES = compute_rates(Snapshot(), SNAPSHOT)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that can move its cursor, wherever the tests run."""
    monkeypatch.setenv("TERM", "xterm")


def shown(*seconds: float, is_terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=100)
    with open_display(console, DemoOptions()) as show:
        for second in seconds:
            show(Snapshot(seconds=second, num_episodes=7, num_updates=1), RATES)
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


def test_progress_on_a_terminal_that_cannot_move_its_cursor_prints_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert [line.split(" | ")[0] for line in shown(0.0, 2.0, is_terminal=True).splitlines()] == ["time 0 s", "time 2 s"]


def test_progress_on_a_terminal_draws_a_screen_with_the_newest_figures() -> None:
    text = shown(0.0, 3.0, is_terminal=True)
    assert "CartPole-v1, seed 0" in text
    assert "3 s of at most 180 s" in text
    assert "time 3 s |" not in text


def draw_screen(width: int, *means: float | None, target: float | None = 475.0, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, height=height)
    screen = RunScreen(DemoOptions(target=target), target)
    for number, mean in enumerate(means):
        seen = Snapshot(
            seconds=0.5 * number, num_episodes=number, mean_return=mean, num_transitions=1000, num_updates=3,
            version=17, staleness=1.25,
        )  # fmt: skip
        screen.show(seen, RATES)
    console.print(screen)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_screen_when_the_terminal_has_any_width_then_fits(width: int) -> None:
    lines = draw_screen(width, None, *map(float, range(0, 475, 2)))
    assert max(map(len, lines)) <= width
    assert all(name in " ".join(lines) for name in ("return", "samples", "6,400/s", "version", "behind"))


def test_screen_when_a_run_learns_then_has_its_return_a_bar_a_curve_rates_and_staleness() -> None:
    lines = draw_screen(80, 20.0, 118.75, 237.5)
    text = "\n".join(lines)
    assert "return 237.5 of 475  (50%)" in text
    curve = [line for line in lines if any(block in line for block in BLOCKS[1:])]
    assert len(curve) == 5 - 2  # the upper half is empty yet
    assert "transitions 100/s" in text
    assert "policy version 17, actors 1.2 behind" in text


def test_screen_when_it_is_low_then_its_curve_is_too() -> None:
    assert len(draw_screen(80, 20.0, height=10)) == len(draw_screen(80, 20.0)) - 3


def test_screen_when_there_is_no_target_then_has_a_curve_without_a_bar() -> None:
    assert not any("%" in line for line in draw_screen(80, 20.0, target=None))


@pytest.mark.parametrize(
    ("seen", "phase"),
    [
        (Snapshot(), "the actors start"),
        (Snapshot(num_transitions=7), "7 transitions, learning begins with 256"),
        (Snapshot(num_transitions=700, num_updates=1, num_episodes=4), "4 of the 20 episodes"),
        (Snapshot(num_transitions=700, num_updates=1, mean_return=3.0), None),
    ],
)
def test_run_when_it_has_no_return_yet_then_what_it_does_is_shown(seen: Snapshot, phase: str | None) -> None:
    described = describe_phase(seen)
    assert described == "" if phase is None else phase in described


def test_line_when_nothing_was_learned_yet_then_has_what_is_being_started() -> None:
    text = io.StringIO()
    with open_display(Console(file=text, width=40), DemoOptions()) as show:
        show(Snapshot(seconds=1.0), compute_rates(Snapshot(), Snapshot()))
    assert text.getvalue() == "time 1 s | the actors start: no transition yet\n"


@pytest.mark.parametrize(
    ("means", "target", "share"),
    [
        ([], 475.0, 0.0),
        ([95.0], 475.0, 0.2),
        ([300.0, 500.0], 475.0, 1.0),
        ([-500.0, -300.0], -100.0, 0.5),
        ([-200.0, 0.0], 200.0, 0.5),
        ([3.0], 0.0, 1.0),
        ([3.0], None, None),
    ],
)
def test_share_when_there_is_a_target_then_of_the_way_from_where_it_began(
    means: Sequence[float], target: float | None, share: float | None
) -> None:
    assert find_share(means, target) == share


def test_range_when_all_is_zero_then_is_not_empty() -> None:
    assert find_range([0.0], None) == (0.0, 1.0)


@pytest.mark.parametrize("blocks", [BLOCKS, ASCII_BLOCKS])
def test_curve_when_values_rise_then_its_columns_do(blocks: str) -> None:
    lines = draw_curve([0.0, 5.0, 10.0], low=0.0, high=10.0, width=9, num_lines=2, blocks=blocks)
    full = blocks[-1]
    assert lines == [f"  {full}", f"{blocks[1]}{full}{full}"]


def test_curve_when_there_are_more_values_than_columns_then_each_is_a_mean() -> None:
    assert draw_curve([0.0, 2.0, 8.0, 8.0], low=0.0, high=8.0, width=2, num_lines=1) == ["▁█"]
