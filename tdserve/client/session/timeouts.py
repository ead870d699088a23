"""How long the parts of a call may take, by what is left of its time."""

from __future__ import annotations

from tdserve.base.deadline import Deadline, grace_s

TRANSFER_GRACE_S = 1.0
"""Content that was granted just before the deadline may still arrive."""

UNTIMED_TRANSFER_S = 30.0
"""For the content of a call that asked without waiting (``timeout_s=0``)."""

MIN_CHANNEL_S = 1.0
"""For the channel of a call whose time is nearly over, and whose content the server has granted."""

UNTIMED_CHANNEL_S = 5.0
"""For that of a call that asked without waiting: it is not tried again."""

MIN_EXPECTING_S = 1.0
"""Calls that have less time wait for an answer before content, which can be given up without harm to the session."""

MIN_BYTES_PER_S = 64 * 1024 * 1024
"""Slower than content is written anywhere."""


def min_channel_s(deadline: Deadline) -> float:
    """How long a session's channel may take to open, whatever is left of the call's time: the server is there."""
    return UNTIMED_CHANNEL_S if deadline.timeout_s == 0 else MIN_CHANNEL_S


def transfer_timeout_s(deadline: Deadline) -> float:
    """How long content may take that was granted now."""
    if deadline.timeout_s == 0 or deadline.remaining_s is None:
        return UNTIMED_TRANSFER_S
    return deadline.remaining_s + TRANSFER_GRACE_S


def answer_timeout_s(deadline: Deadline, nbytes: int = 0) -> float | None:
    """How long an answer may take: the server itself ends waits at the deadline.

    Args:
        nbytes: Of content that the server, or the client where the server lets it, writes before that.
    """
    remaining_s = deadline.remaining_s
    return None if remaining_s is None else remaining_s + grace_s(deadline.timeout_s) + nbytes / MIN_BYTES_PER_S


def sending_timeout_s(deadline: Deadline, nbytes: int) -> float:
    """How long content may take that is sent with its request."""
    timeout_s = answer_timeout_s(deadline, nbytes)
    return UNTIMED_TRANSFER_S if timeout_s is None else timeout_s


def may_expect(deadline: Deadline) -> bool:
    """Whether a call may wait for content that was not announced: that wait ends with the session."""
    return deadline.timeout_s is None or deadline.timeout_s >= MIN_EXPECTING_S
