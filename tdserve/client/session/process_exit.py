"""What is done before this process ends, while its sessions are still there."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

_PRIORITY = 10
"""Before that of resident clients, which are closed last."""

_process_of: dict[Callable[[], None], int] = {}


def before_the_end(call: Callable[[], None]) -> None:
    """Has ``call`` done at the end of this process, in front of what was registered before, as the end of sessions is.

    A process that multiprocessing has forked leaves without atexit, and so by a way of its own; where both come it is
    called twice. To say it again does nothing.
    """
    process = _process_of.get(call)
    if process is None:
        atexit.register(call)  # a fork has it too
    if process != os.getpid():
        _process_of[call] = os.getpid()
        Finalize(None, call, exitpriority=_PRIORITY)


def before_executors_end(call: Callable[[], None]) -> None:
    """Has ``call`` done while threads of executors still take work, which is before anything else of the process's end.

    For this there is only what ``concurrent.futures`` itself uses. Threads of the user's may still run then, and add to
    what there is to do: ``before_the_end`` is said as well.
    """
    register: Any = getattr(threading, "_register_atexit", None)
    if register is None or call in _early:
        return
    _early.add(call)
    try:
        register(call)
    except RuntimeError:  # the end has begun
        return


_early: set[Callable[[], None]] = set()
