"""What a command shows of its steps."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tdserve.cli.screen.progress import show_step


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that can move its cursor, wherever the tests run."""
    monkeypatch.setenv("TERM", "xterm")


def run_step(*, is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, color_system=None, width=40)
    with show_step(console, "starts a server [1]"):
        pass
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_step_when_there_is_no_terminal_then_one_line_at_its_begin() -> None:
    assert run_step(is_terminal=False) == "starts a server [1]\n"


def test_step_when_on_a_terminal_then_its_last_line_has_its_time() -> None:
    assert re.search(r"starts a server \[1\]: \d\.\d s$", run_step(is_terminal=True).splitlines()[-1])


def test_step_when_it_fails_then_no_time_is_shown() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=40)
    with pytest.raises(ZeroDivisionError), show_step(console, "divides"):
        _ = 1 / 0
    assert isinstance(console.file, io.StringIO)
    assert "divides:" not in console.file.getvalue()
