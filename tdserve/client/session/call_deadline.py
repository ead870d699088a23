"""The deadline of a call that has many steps, such as one to several servers: steps that are given no time of their own
end by it, in whatever thread they are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

from tdserve.base.deadline import Deadline

_of_thread = local()


@contextmanager
def within(deadline: Deadline) -> Iterator[None]:
    """Runs a block that is a step of a call with this deadline: calls of this thread that have no timeout of their own
    have it, instead of their client's default."""
    outer = get_call_deadline()
    _of_thread.deadline = deadline
    try:
        yield
    finally:
        _of_thread.deadline = outer


def get_call_deadline() -> Deadline | None:
    """Returns the deadline of the call of which this thread makes a step; None if it makes none."""
    found: Deadline | None = getattr(_of_thread, "deadline", None)
    return found
