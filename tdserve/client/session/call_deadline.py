"""The deadline that calls of a thread have in common: calls of a block of the user's, or the steps of one call, such as
those to several servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

from tdserve.base.deadline import Deadline

LONGEST_WAIT_S = 7 * 24 * 3600.0
"""An infinite ``timeout_s`` waits a week, since gRPC, gloo and the messages need a number."""

_of_thread = local()


@contextmanager
def within(limit: float | Deadline) -> Iterator[None]:
    """Gives the calls of a block one time together: those of this thread that have no ``timeout_s`` of their own end by
    it, where they would have their client's default each.

    >>> with tdserve.within(5.0):
    ...     names = client.stores()
    ...     table = client.create_replay("replay", row, 1000, exists_ok=True)

    A block within another one ends no later than that. ``next`` of an iterator over batches ends by it in any case. The
    block itself is not interrupted: what is no call of tdserve takes its time, and a call that begins after the time is
    over asks once. Calls of ``tdserve.aio`` are made in other threads: there, ``asyncio.timeout`` does this.

    Args:
        limit: Seconds from now. 0 asks once.

    Raises:
        InvalidRequestError: ``limit`` is negative, or no number.
        DeadlineExceededError: From a call of the block that would have to wait longer.
    """
    outer = get_call_deadline()
    _of_thread.deadline = limit if isinstance(limit, Deadline) else begin_step(limit)
    try:
        yield
    finally:
        _of_thread.deadline = outer


def begin_step(timeout_s: float) -> Deadline:
    """Returns the deadline of a step that may take so many seconds, and no longer than the block that it is in."""
    return (get_call_deadline() or Deadline.never).shorten(timeout_s)


def get_call_deadline() -> Deadline | None:
    """Returns the deadline of the call of which this thread makes a step; None if it makes none."""
    found: Deadline | None = getattr(_of_thread, "deadline", None)
    return found


def begin_call(timeout_s: float | None, default_s: float) -> Deadline:
    """Returns the deadline of a call that begins now; None is that of the block or call of which it is a step, or else
    the default. Errors as of ``check_wait_s``."""
    if timeout_s is None:
        return get_call_deadline() or Deadline.after(default_s)
    return Deadline.after(check_wait_s(timeout_s))


def check_wait_s(timeout_s: float) -> float:
    """Returns a timeout as a finite number of seconds. Raises InvalidRequestError for what is none."""
    wait_s = Deadline.after(timeout_s).timeout_s
    return LONGEST_WAIT_S if wait_s is None else min(wait_s, LONGEST_WAIT_S)
