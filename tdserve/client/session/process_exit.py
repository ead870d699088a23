"""Calls made before this process exits, while its sessions are still open."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

_PRIORITY = 10
"""Before the clients of the process, which are closed last."""

EXIT_FLUSH_S = 3.0
"""For rows that nobody has waited for: extends with an early return, and what writers still hold."""

_process_of: dict[Callable[[], None], int] = {}


def call_at_exit(call: Callable[[], None]) -> None:
    """Registers a call at the exit of this process; the last one registered runs first. Sessions end in the same way.

    A process forked by multiprocessing exits without atexit, so the call is also registered with multiprocessing. If
    both run, it is called twice. Registering it again has no effect.
    """
    process = _process_of.get(call)
    if process is None:
        atexit.register(call)  # a fork has it too
    if process != os.getpid():
        _process_of[call] = os.getpid()
        Finalize(None, call, exitpriority=_PRIORITY)


def call_before_executors_end(call: Callable[[], None]) -> None:
    """Registers a call that runs while threads of executors still accept work: before everything else at exit.

    Only what ``concurrent.futures`` itself uses makes that possible. Threads of the user may still run then and add
    more work, so register the call with ``call_at_exit`` as well.
    """
    register: Any = getattr(threading, "_register_atexit", None)
    if register is None or call in _early:
        return
    _early.add(call)
    try:
        register(call)
    except RuntimeError:  # the interpreter is exiting
        return


_early: set[Callable[[], None]] = set()
