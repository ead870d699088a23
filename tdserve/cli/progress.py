"""How far a command is that moves rows or files: on one line of a terminal, or now and then on a line of its own."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from tdserve.cli.render import escape_unprintable, format_nbytes

if TYPE_CHECKING:
    from tdserve.client.cluster.store_move import MoveProgress

SHOWN_EVERY_S = 0.2
LOGGED_EVERY_S = 5.0


class ByteProgress:
    """Shows on stderr, where that is a terminal, how far the move of a store is.

    Args:
        name: Of the store.
    """

    def __init__(self, name: str) -> None:
        self._is_shown = sys.stderr.isatty()
        self._name = escape_unprintable(name)
        self._shown_s = 0.0

    def show(self, progress: MoveProgress) -> None:
        """Shows the state, unless it was shown a moment ago."""
        now_s = time.monotonic()
        if not self._is_shown or now_s - self._shown_s < SHOWN_EVERY_S:
            return
        self._shown_s = now_s
        seen, total, copied = map(format_nbytes, progress[:3])
        state = "clients wait" if progress.is_sealed else "in use"
        click.echo(f"\r{self._name}: {seen} of {total}, {copied} copied, {state}\x1b[K", err=True, nl=False)

    def end(self) -> None:
        """Ends the line of the terminal."""
        if self._is_shown and self._shown_s:
            click.echo(err=True)


class RowProgress:
    """Shows rows, percent and rates on stderr.

    Args:
        name: Of the store.
        shows: Whether it shows anything; None: where stderr is a terminal.

    Attributes:
        begin_s: When it was made, on the monotonic clock.
        row_nbytes: Size of a row, for the rate in bytes; 0 if it is not known.
    """

    def __init__(self, name: str, *, shows: bool | None) -> None:
        self.begin_s = time.monotonic()
        self.row_nbytes = 0
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = self._is_terminal if shows is None else shows
        self._name = escape_unprintable(name)
        self._shown_s = self.begin_s
        self._has_line = False

    def show(self, num_done: int, num_rows: int) -> None:
        """Shows the state, unless it was shown a moment ago."""
        now_s = time.monotonic()
        is_due = now_s - self._shown_s >= (SHOWN_EVERY_S if self._is_terminal else LOGGED_EVERY_S)
        if not self._is_shown or not (is_due or num_done >= num_rows):
            return
        self._shown_s = now_s
        rate = num_done / max(now_s - self.begin_s, 1e-9)
        percent = 100 * num_done // max(num_rows, 1)
        text = f"{self._name}: {num_done:,} of {num_rows:,} rows ({percent} %), {rate:,.0f} rows/s"
        if self.row_nbytes:
            text += f", {format_nbytes(int(rate * self.row_nbytes))}/s"
        click.echo(f"\r{text}\x1b[K" if self._is_terminal else text, err=True, nl=not self._is_terminal)
        self._has_line = self._is_terminal

    def end(self) -> None:
        """Ends the line of the terminal."""
        if self._has_line:
            click.echo(err=True)
        self._has_line = False
