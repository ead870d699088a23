"""``tdserve top``: a live screen of servers, their processes, stores and sessions."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tdserve.base.errors import TDServeError
from tdserve.cli.figures.figure_facts import describe_figures
from tdserve.cli.figures.server_figures import FigureReader, list_lost, open_figures
from tdserve.cli.figures.top_screen import Moment, compose_screen
from tdserve.cli.screen.render import UNFOLDED_COLUMNS, print_json, to_one_line
from tdserve.cli.shell.exit_codes import NO_ANSWER
from tdserve.cli.shell.number_types import TimeRange
from tdserve.cli.shell.options import Inquiry, ask_server

QUIT = b"qQ\x03\x04"
"""Keys that end it: also Ctrl-C and Ctrl-D."""


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=TimeRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.option("-n", "num_rows", type=click.IntRange(1, 1000), default=20, show_default=True, help="Stores, sessions.")
@click.option("--once", is_flag=True, help="Print one look and end, as without a terminal; rates need a second one.")
@ask_server
def top(inquiry: Inquiry, *, interval_s: float, num_rows: int, once: bool) -> int:
    """Show servers, processes, stores and sessions as they are now, with rates; q ends it.

    Stores are those of most recent use, sessions the newest. With --json, and with --once, one look is printed.
    """
    with open_figures(inquiry) as reader:
        found = reader.ask(max_stores=num_rows, max_sessions=num_rows)
        if inquiry.as_json:
            print_json([describe_figures(each) for each in found])
        elif once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            console = Console(highlight=False)
            if not console.is_terminal:
                console.width = UNFOLDED_COLUMNS
            console.print(compose_screen(None, Moment(time.monotonic(), found), num_rows, console.width))
        else:
            _show_live(reader, Moment(time.monotonic(), found), interval_s, num_rows)
            return 0  # the user has seen it
    return NO_ANSWER if list_lost(found) else 0


def _show_live(reader: FigureReader, moment: Moment, interval_s: float, num_rows: int) -> None:
    before: Moment | None = None
    fault = ""
    console = Console(highlight=False)
    with read_keys() as has_ended, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            screen = compose_screen(before, moment, num_rows, console.width)
            live.update(Group(Text(fault), screen) if fault else screen, refresh=True)
            if has_ended(interval_s):
                return
            try:
                found = reader.ask(max_stores=num_rows, max_sessions=num_rows)
            except TDServeError as error:  # it may come back
                fault = to_one_line(f"no answer for {time.monotonic() - moment.taken_s:.0f} s: {error}")
                continue
            fault = ""
            before, moment = moment, Moment(time.monotonic(), found)


@contextmanager
def read_keys() -> Iterator[Any]:
    """Reads keys without line feeds; yields what waits this many seconds, and returns whether a key has ended it."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the terminal is restored on the way

    def has_ended(seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if select.select([descriptor], [], [], left_s)[0]:
                keys = os.read(descriptor, 100)
                if not keys or any(key in QUIT for key in keys):
                    return True
        return False

    try:
        yield has_ended
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
