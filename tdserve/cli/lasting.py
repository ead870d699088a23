"""Commands that last until they are told to end, as a container's: how they hear of it, and how they fail."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from threading import Timer
from typing import Any

import click

from tdserve.base.config import fail_delay_s
from tdserve.base.errors import TDServeError
from tdserve.cli.render import one_line

UNWINDING_S = 5.0
"""Seconds that a process which was told to end has for its clean-up: half of what ``docker stop`` grants."""

FAILED = 1
"""Exit code after an error of tdserve."""


def lasting(command: Callable[..., int]) -> Callable[..., int]:
    """Makes a command end with 0 by SIGTERM, from its first line on.

    It fails with ``FAILED`` and one line, which is there at once; the process only ends ``TDSERVE_FAIL_DELAY_S`` later:
    whoever starts it again, as often as it fails, does nothing else all day otherwise.
    """

    @wraps(command)
    def run(**settings: Any) -> int:
        end_on_sigterm()
        try:
            return command(**settings)
        except TDServeError as error:
            # Nothing is left to unwind, and 0 would be no failure.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(FAILED))
            tell(error)
            time.sleep(fail_delay_s())
            return FAILED

    return run


def tell(error: TDServeError) -> None:
    """Says an error in one line on stderr."""
    click.echo(f"tdserve: {one_line(str(error))}", err=True)


def end_on_sigterm() -> None:
    """From now on SIGTERM unwinds this process, and its exit code is 0; one that was held back comes now.

    The first process of a container hears no signal that it has no handler for, not even while it imports torch.
    """

    def end(*_: object) -> None:
        # A destructor or callback in which it comes swallows the exception: then the process ends without it.
        late = Timer(UNWINDING_S, os._exit, (0,))
        late.daemon = True
        late.start()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    # The last collection would look at all that torch has imported: most of the time that such a process takes to end.
    atexit.register(gc.freeze)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def hear_sigterm() -> None:
    """Lets SIGTERM end this process at once where it was held back, as the image does while nobody can hear it."""
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
