"""Conditions of a call that decide whether it is tried again."""

from __future__ import annotations

from tdserve.base.deadline import Deadline
from tdserve.client.session.cancellation import get_cancellation
from tdserve.v1 import control_pb2

RETRY_BACKOFF_S = 0.05
MAX_RETRY_BACKOFF_S = 0.5
"""First and longest pause before a call is tried again."""


def has_to_wait(request: object) -> bool:
    """Returns whether a question about stores may take long to answer."""
    return isinstance(request, control_pb2.DescribeStoreRequest) and request.timeout_s > 0


def is_cancelled() -> bool:
    """Returns whether the caller of this thread's call has cancelled it."""
    cancellation = get_cancellation()
    return cancellation is not None and cancellation.is_cancelled


def is_over(deadline: Deadline, pause_s: float) -> bool:
    """Returns whether a deadline does not allow for a pause."""
    remaining_s = deadline.remaining_s
    return remaining_s is not None and remaining_s <= pause_s
