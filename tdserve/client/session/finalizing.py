"""Work that finalizers hand to a thread: they run in any thread at any moment, perhaps inside a lock."""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import time
from collections.abc import Callable
from threading import Event, Thread

from tdserve.client.session.process_exit import EXIT_S, spend_exit_time

_log = logging.getLogger("tdserve.client")

_under_way: set[Event] = set()
"""One for each work that has not ended."""


def run_from_finalizer(work: Callable[[], None]) -> None:
    """Runs work soon in a thread of its own. Takes no lock and waits for nothing.

    While the interpreter exits no thread starts and nothing is done: sessions end with their process anyway.
    """
    over = Event()
    _under_way.add(over)
    try:
        # A Thread waits for its beginning, which needs a lock of `threading` that the interrupted code may hold.
        _thread.start_new_thread(_start, (work, over))
    except RuntimeError:
        _under_way.discard(over)


def _start(work: Callable[[], None], over: Event) -> None:
    try:
        Thread(target=_run, args=(work, over), name="tdserve-finalizing", daemon=True).start()
    except RuntimeError:
        _end(over)


def _run(work: Callable[[], None], over: Event) -> None:
    try:
        work()
    except Exception:  # noqa: BLE001 (outermost frame of the thread)
        _log.exception("an unused object could not be ended")
    finally:
        del work  # it may hold a client
        _end(over)


def _end(over: Event) -> None:
    _under_way.discard(over)
    over.set()


def wait_for_all(timeout_s: float) -> bool:
    """Waits until all of it has ended; returns whether it has in time."""
    end_s = time.monotonic() + timeout_s
    return all(over.wait(max(end_s - time.monotonic(), 0.0)) for over in list(_under_way))


@atexit.register
def _wait_at_exit() -> None:
    """A thread that is inside torch when the interpreter exits would abort the whole process. It takes milliseconds if
    the server answers."""
    with spend_exit_time(EXIT_S) as end_s:
        wait_for_all(end_s - time.monotonic())


os.register_at_fork(after_in_child=_under_way.clear)  # these threads do not exist there
