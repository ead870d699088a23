"""What the client warns of while a command runs: shown after its answer, or not at all if an error contains it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import click

from tdserve.cli.screen.render import to_one_line

_log = logging.getLogger("tdserve")


class HeldWarnings(logging.Handler):
    """Warnings of the client, each of which is shown once, as a line on stderr."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._is_held = True
        self._lines: dict[str, bool] = {}  # and whether they were shown

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a warning."""
        self._lines.setdefault(to_one_line(record.getMessage()), False)
        if not self._is_held:
            self.show()

    def show(self) -> None:
        """Shows what was held, and from now on each warning at once."""
        self._is_held = False
        for line, was_shown in list(self._lines.items()):
            self._lines[line] = True
            if not was_shown:
                click.echo(f"tdserve: {line}", err=True)


@contextmanager
def hold_warnings() -> Iterator[None]:
    """Holds warnings during a block. They are shown when it has ended without an error."""
    held = HeldWarnings()
    _log.addHandler(held)
    try:
        yield
        held.show()
    finally:
        _log.removeHandler(held)


def show_warnings() -> None:
    """Shows the warnings that are held: a command that continues shows them at once from now on."""
    for handler in _log.handlers:
        if isinstance(handler, HeldWarnings):
            handler.show()
