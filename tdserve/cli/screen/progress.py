"""How far a command is: in steps, or with rows and files on one line of a terminal, else on a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from tdserve.cli.screen.render import escape_unprintable, format_nbytes

if TYPE_CHECKING:
    from tdserve.client.cluster.moves.store_move import MoveProgress

SHOWN_EVERY_S = 0.2
LOGGED_EVERY_S = 5.0


@contextmanager
def show_step(console: Console, text: str) -> Iterator[None]:
    """Shows what a command does in this block: on a terminal a line that moves, and then how long it took."""
    if not console.is_terminal or console.is_dumb_terminal:
        console.print(text, soft_wrap=True, markup=False)
        yield
        return
    begin_s = time.monotonic()
    with console.status(Text(text)):
        yield
    console.print(f"{text}: {time.monotonic() - begin_s:.1f} s", style="dim", markup=False, highlight=False)


class ProgressLine:
    """Shows on stderr how far a command is.

    Args:
        name: Name of the store.
        shows: Whether it shows anything; None: where stderr is a terminal.

    Attributes:
        begin_s: When it was made, on the monotonic clock.
    """

    def __init__(self, name: str, *, shows: bool | None = None) -> None:
        self.begin_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = self._is_terminal if shows is None else shows
        self._name = escape_unprintable(name)
        self._shown_s = self.begin_s
        self._has_line = False

    def write(self, compose: Callable[[], str], *, is_last: bool) -> None:
        """Shows what ``compose`` returns, unless something was shown a moment ago and more comes."""
        now_s = time.monotonic()
        is_due = now_s - self._shown_s >= (SHOWN_EVERY_S if self._is_terminal else LOGGED_EVERY_S)
        if not self._is_shown or not (is_due or is_last):
            return
        self._shown_s = now_s
        text = f"{self._name}: {compose()}"
        click.echo(f"\r{text}\x1b[K" if self._is_terminal else text, err=True, nl=not self._is_terminal)
        self._has_line = self._is_terminal

    def end(self) -> None:
        """Ends the line of the terminal."""
        if self._has_line:
            click.echo(err=True)
        self._has_line = False


class MovedBytes(ProgressLine):
    """Shows how far the move of a store is."""

    def show(self, progress: MoveProgress) -> None:
        """Shows the state, unless it was shown a moment ago."""

        def compose() -> str:
            seen, total, copied = map(format_nbytes, progress[:3])
            return f"{seen} of {total}, {copied} copied, {'clients wait' if progress.is_sealed else 'in use'}"

        self.write(compose, is_last=False)


class RowProgress(ProgressLine):
    """Shows rows, percent and rates.

    Attributes:
        row_nbytes: Size of a row, for the rate in bytes; 0 if it is not known.
    """

    row_nbytes = 0

    def show(self, num_done: int, num_rows: int) -> None:
        """Shows the state, unless it was shown a moment ago."""

        def compose() -> str:
            rate = num_done / max(time.monotonic() - self.begin_s, 1e-9)
            percent = 100 * num_done // max(num_rows, 1)
            text = f"{num_done:,} of {num_rows:,} rows ({percent} %), {rate:,.0f} rows/s"
            return f"{text}, {format_nbytes(int(rate * self.row_nbytes))}/s" if self.row_nbytes else text

        self.write(compose, is_last=num_done >= num_rows)
