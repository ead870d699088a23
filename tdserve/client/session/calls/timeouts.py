"""How long the steps of a call may take, given the time that is left."""

from __future__ import annotations

from tdserve.base.deadline import Deadline, compute_grace_s
from tdserve.client.session.calls.call_deadline import get_call_deadline

TRANSFER_GRACE_S = 1.0
"""Extra time for content that was granted just before the deadline."""

DEFAULT_TRANSFER_S = 30.0
"""Time for the content of a call that does not wait (``timeout_s=0``)."""

MIN_CHANNEL_S = 1.0
"""Least time for opening the channel of a call that is nearly out of time, and whose content the server has granted."""

IMMEDIATE_CHANNEL_S = 5.0
"""Time for opening the channel of a call that does not wait: it is not retried."""

MIN_EXPECTING_S = 1.0
"""Calls with less time wait for an answer before content: that wait can end without harm to the session."""

MIN_BYTES_PER_S = 64 * 1024 * 1024
"""Content is written faster than this everywhere."""


def compute_min_channel_s(deadline: Deadline) -> float:
    """Returns how long a session's channel may take to open, whatever time the call has left: the server is there."""
    return IMMEDIATE_CHANNEL_S if deadline.timeout_s == 0 else MIN_CHANNEL_S


def compute_transfer_timeout_s(deadline: Deadline) -> float:
    """Returns the timeout of a transfer that the server grants now. A call that does not wait, but is a step of one
    that does, gets what the outer call has left."""
    if deadline.timeout_s == 0 or deadline.remaining_s is None:
        deadline = get_call_deadline() or deadline
    if deadline.timeout_s == 0 or deadline.remaining_s is None:
        return DEFAULT_TRANSFER_S
    return deadline.remaining_s + TRANSFER_GRACE_S


def compute_answer_timeout_s(deadline: Deadline, nbytes: int = 0) -> float | None:
    """Returns how long an answer may take: the server itself ends waits at the deadline.

    Args:
        nbytes: Size of content that the server, or the client with its permit, writes before that.
    """
    remaining_s = deadline.remaining_s
    return None if remaining_s is None else remaining_s + compute_grace_s(deadline.timeout_s) + nbytes / MIN_BYTES_PER_S


def compute_sending_timeout_s(deadline: Deadline, nbytes: int) -> float:
    """Returns how long content may take that is sent with its request."""
    timeout_s = compute_answer_timeout_s(deadline, nbytes)
    return DEFAULT_TRANSFER_S if timeout_s is None else timeout_s


def may_expect(deadline: Deadline) -> bool:
    """Returns whether a call may wait for content that was not announced: if that wait fails, the session ends."""
    return deadline.timeout_s is None or deadline.timeout_s >= MIN_EXPECTING_S
