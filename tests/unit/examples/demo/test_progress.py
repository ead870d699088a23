from __future__ import annotations

import io

from rich.console import Console

from tdserve.examples.demo.progress import Progress, describe, print_summary
from tdserve.examples.demo.watch import Rates, Snapshot

SNAPSHOT = Snapshot(
    seconds=10.0, num_episodes=42, mean_return=123.45, num_transitions=1000, num_samples=64_000, num_updates=250,
    version=17, staleness=1.25, num_bytes={"gloo": 5_000_000, "inline": 0},
)  # fmt: skip
RATES = Rates.between(Snapshot(), SNAPSHOT)


def shown(*seconds: float, is_terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=100)
    with Progress(console, title="CartPole-v1, seed 0", target=475.0) as progress:
        for second in seconds:
            progress.show(Snapshot(seconds=second, num_episodes=7), RATES)
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
    figures = describe(Snapshot(), Rates.between(Snapshot(), Snapshot()), target=None)
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
    print_summary(Console(file=text, width=60), "tdserve demo", {"ending": "x" * 100})
    assert text.getvalue().count("x") == 100
