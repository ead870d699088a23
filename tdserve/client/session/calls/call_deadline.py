"""The deadline that calls of a thread or task have in common: calls of a block of the user's, or the steps of one call,
such as those to several servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tdserve.base.deadline import Deadline

LONGEST_WAIT_S = 7 * 24 * 3600.0
"""An infinite ``timeout_s`` waits a week, since gRPC, gloo and the messages need a number."""


class _Block:
    """A block with a deadline. Tasks and threads that begin in it inherit it, and may outlive it.

    Attributes:
        deadline: Deadline of the calls in it.
        outer: The block that it is in.
        is_over: Whether it has ended: then the outer one holds for those that continue.
    """

    __slots__ = ("deadline", "is_over", "outer")

    def __init__(self, deadline: Deadline, outer: _Block | None) -> None:
        self.deadline = deadline
        self.outer = outer
        self.is_over = False


_block: ContextVar[_Block | None] = ContextVar("_block", default=None)


@contextmanager
def within(limit: float | Deadline) -> Iterator[None]:
    """Gives the calls of a block one time together: those of this thread, or of this task and the tasks that begin in
    the block, that have no ``timeout_s`` of their own end by it, where they would have their client's default each.

    >>> with tdserve.within(5.0):
    ...     names = client.stores()
    ...     table = client.create_replay("replay", row, 1000, exists_ok=True)

    A block within another one ends no later than that. ``next`` of an iterator over batches ends by it in any case, and
    so do the waits of a writer in the calling thread, whatever ``timeout_s`` they were opened with. The block itself is
    not interrupted: what is no call of tdserve takes its time, and a call that begins after the time is over asks once.
    For calls of ``tdserve.aio`` the time includes the wait for a thread. A task that outlives the block has its
    client's default afterwards. Other threads that the program starts have it in any case.

    A generator has no context of its own, as with ``decimal.localcontext``: a block in one that yields applies to the
    code that iterates it as well, until the generator continues and leaves it or is closed. Where that code must not be
    limited, give the generator's calls a ``timeout_s``.

    Args:
        limit: Seconds from now. 0 asks once.

    Raises:
        InvalidRequestError: ``limit`` is negative, or no number.
        DeadlineExceededError: From a call of the block that would have to wait longer.
    """
    outer = _find_block()
    block = _Block(limit if isinstance(limit, Deadline) else begin_step(limit), outer)
    _block.set(block)
    try:
        yield
    finally:
        block.is_over = True
        if _block.get() is block:  # else the one that holds here began later, as one of a generator's, and continues
            _block.set(outer)


def leave_blocks() -> None:
    """Makes what this context runs later be in no block."""
    _block.set(None)


def begin_step(timeout_s: float | None) -> Deadline:
    """Returns the deadline of a step that may take this many seconds, None for any time, and no longer than the block
    that it is in."""
    deadline = get_call_deadline() or Deadline.never
    return deadline if timeout_s is None else deadline.shorten(timeout_s)


def get_call_deadline() -> Deadline | None:
    """Returns the deadline of the call of which this thread or task makes a step; None if it makes none."""
    block = _find_block()
    return None if block is None else block.deadline


def _find_block() -> _Block | None:
    """Returns the innermost block that has not ended."""
    block = _block.get()
    while block is not None and block.is_over:
        block = block.outer
    return block


def begin_call(timeout_s: float | None, default_s: float) -> Deadline:
    """Returns the deadline of a call that begins now; None is that of the block or call of which it is a step, or else
    the default. Errors as in ``check_wait_s``."""
    if timeout_s is None:
        return get_call_deadline() or Deadline.after(default_s)
    return Deadline.after(check_wait_s(timeout_s))


def check_wait_s(timeout_s: float) -> float:
    """Returns a timeout as a finite number of seconds. Raises InvalidRequestError for an invalid one."""
    wait_s = Deadline.after(timeout_s).timeout_s
    return LONGEST_WAIT_S if wait_s is None else min(wait_s, LONGEST_WAIT_S)
