"""How commands end on SIGTERM, and how those fail that run until they are told to end, such as a container's."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from tdserve.base.config import read_fail_delay_s
from tdserve.base.errors import TDServeError
from tdserve.cli.screen.render import to_one_line
from tdserve.cli.shell.advice import advise_shell
from tdserve.cli.shell.exit_codes import FAILED

UNWINDING_S = 5.0
"""Seconds for the clean-up of a process that was told to end: half of what ``docker stop`` grants."""

_callbacks: set[Callable[..., int]] = set()
"""What the lasting commands run."""


def lasting(command: Callable[..., int]) -> Callable[..., int]:
    """Makes a command exit with 0 on SIGTERM, from its first line on.

    On an error the command prints one line at once, and exits with ``FAILED`` after ``TDSERVE_FAIL_DELAY_S``. The pause
    slows down an engine that restarts every failed command at once. It is the innermost decorator of a command.
    """

    @wraps(command)
    def run(**settings: Any) -> int:
        end_on_sigterm()
        try:
            return command(**settings)
        except RuntimeError as error:  # Python 3.11 wraps what is raised while a class is being made, as by an import
            if isinstance(error.__cause__, SystemExit):
                raise error.__cause__ from None
            raise
        except TDServeError as error:
            # Nothing is left to unwind, and 0 would be no failure.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(FAILED))
            print_error(error)
            time.sleep(read_fail_delay_s())
            return FAILED

    _callbacks.add(run)
    return run


def is_lasting(command: click.Command) -> bool:
    """Returns whether a command handles SIGTERM itself: it is marked as ``lasting``."""
    return command.callback in _callbacks


def print_error(error: TDServeError) -> None:
    """Prints an error as one line on stderr, with advice for a shell."""
    click.echo(f"tdserve: {to_one_line(advise_shell(str(error)))}", err=True)


def end_on_sigterm() -> None:
    """Lets SIGTERM unwind this process with exit code 0; a signal that was held back arrives now.

    The kernel drops signals for which a container's first process has no handler, also while it imports torch.
    """
    # The last collection would look at all that torch has imported: most of the time that such a process takes to end.
    atexit.register(gc.freeze)
    _unwind_on_sigterm(0)


def fail_on_sigterm() -> Callable[[], object]:
    """Lets SIGTERM unwind this process with exit code 143, so that a command removes what it has not finished.

    A signal that was held back, as the image's entry point does at the start, arrives now. Threads: only the main one
    can set a handler; in others this does nothing.

    Returns:
        What sets the handler before again.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = _unwind_on_sigterm(128 + signal.SIGTERM)
    return lambda: signal.signal(signal.SIGTERM, before)


def _unwind_on_sigterm(exit_code: int) -> Any:
    """Sets a handler, and returns the one before."""

    def end(*_: object) -> None:
        # A destructor or callback in which it comes swallows the exception: then the process ends without it.
        late = threading.Timer(UNWINDING_S, os._exit, (exit_code,))
        late.daemon = True
        late.start()
        sys.exit(exit_code)

    before = signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return before
