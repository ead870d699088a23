"""Calls made before this process exits, while its sessions are still open."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, Generic, TypeVar
from weakref import WeakSet

_PRIORITY = 10
"""Priority at exit: before the clients of the process, which are closed last."""

EXIT_S = 5.0
"""Time that the exit of a process waits for what is under way, in all."""

EXIT_FLUSH_S = 3.0
"""Of it, for rows that no call waits for: extends with an early return, and what writers still hold."""

EXIT_END_S = 1.0
"""Of it, kept for clients that end, whatever the rows have taken."""

_Member = TypeVar("_Member")

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


_waits_s: list[float] = []
"""How long each wait at the exit of this process has taken."""


@contextmanager
def spend_exit_time(most_s: float, *, kept_s: float = 0.0) -> Iterator[float]:
    """Gives the monotonic time until which a wait at the exit may take, and counts what it takes.

    Waits add up, rather than end at one moment: threads of the user may run for long between them, and begin more.

    Args:
        most_s: Longest time of this wait.
        kept_s: What it leaves of ``EXIT_S``.
    """
    begin_s = time.monotonic()
    try:
        yield begin_s + max(min(most_s, EXIT_S - kept_s - sum(_waits_s)), 0.0)
    finally:
        _waits_s.append(time.monotonic() - begin_s)


os.register_at_fork(after_in_child=_waits_s.clear)


class ExitFlush(Generic[_Member]):
    """The objects of one kind that store what they hold before this process exits, within ``EXIT_FLUSH_S`` together.

    Those of another kind, and what is begun after them, may still have what is left of ``EXIT_S``.

    Args:
        finish: Waits until one of them has stored everything, at most until a monotonic time.
        begin: Called for all of them before the first wait.
        is_early: Whether it also runs while threads of executors still accept work.
        begin_in_child: Called for all of them in a forked child, which runs this at its exit too: what they held before
            is the parent's to store.
    """

    def __init__(
        self,
        finish: Callable[[_Member, float], None],
        *,
        begin: Callable[[_Member], None] | None = None,
        is_early: bool = False,
        begin_in_child: Callable[[_Member], None] | None = None,
    ) -> None:
        self._finish = finish
        self._begin = begin
        self._is_early = is_early
        self._members: WeakSet[_Member] = WeakSet()
        if begin_in_child is not None:
            os.register_at_fork(after_in_child=partial(self._call_all, begin_in_child))

    def add(self, member: _Member) -> None:
        """Adds an object, which may be collected before."""
        if self._is_early:
            call_before_executors_end(self.run)
        call_at_exit(self.run)
        self._members.add(member)

    def _call_all(self, call: Callable[[_Member], None]) -> None:
        for member in list(self._members):
            call(member)

    def run(self) -> None:
        """Waits until everything is stored, or the time is up."""
        members = list(self._members)
        if self._begin is not None:
            for member in members:
                self._begin(member)
        with spend_exit_time(EXIT_FLUSH_S, kept_s=EXIT_END_S) as end_s:
            for member in members:
                self._finish(member, end_s)
