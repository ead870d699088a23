"""Conditions of a call that decide whether it is tried again."""

from __future__ import annotations

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ConnectError,
    DeadlineExceededError,
    PeerLostError,
    ServerBusyError,
    StoreMovedError,
    TDServeError,
    TransportError,
)
from tdserve.client.session.calls.cancellation import get_cancellation
from tdserve.v1 import control_pb2

REFUSED_FOR_NOW = (ServerBusyError, StoreMovedError)
"""Errors of a server that has answered, and done nothing: it has no room for the call, or its store is at rest."""

REPEATED = (TransportError, *REFUSED_FOR_NOW)
"""Errors after which a client makes a call again by itself, within its deadline, unless such an error is not
``retryable``, or names the server that has the store now. Other retryable errors are left to the caller."""

RETRY_BACKOFF_S = 0.05
MAX_RETRY_BACKOFF_S = 0.5
"""First and longest pause before a call is tried again."""

REST_PAUSE_S = 0.01
"""Pause before a call is made again whose store is at rest: a checkpoint mostly needs 10 to 40 ms."""


def has_to_wait(request: object) -> bool:
    """Returns whether a question about stores may take long to answer."""
    return isinstance(request, control_pb2.DescribeStoreRequest) and request.timeout_s > 0


def is_cancelled() -> bool:
    """Returns whether the caller of this thread's call has cancelled it."""
    cancellation = get_cancellation()
    return cancellation is not None and cancellation.is_cancelled


def explain_late(error: TransportError, address: str, deadline: Deadline) -> TDServeError:
    """Returns the error of a call that has no time for another attempt: the last attempt's, or DeadlineExceededError if
    the server answered and only lacked a process."""
    if not isinstance(error, PeerLostError) or not error.request_id:
        return error
    what = f"an answer of {address}, where {error.peer} is missing ({error.reason}),"
    late = DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)
    late.request_id, late.__cause__ = error.request_id, error
    return late


def explain_sent(error: TDServeError) -> TDServeError:
    """Turns ConnectError into PeerLostError: the request was sent and may still be carried out. A caller that gets
    ConnectError would repeat it, perhaps elsewhere."""
    if not isinstance(error, ConnectError):
        return error
    reason = f"it stopped answering during the call, which it may yet carry out: {error.fields['reason']}"
    sent = PeerLostError(peer=f"the server at {error.fields['address']}", reason=reason)
    sent.__cause__ = error
    return sent


def lengthen(pause_s: float) -> float:
    """Returns the next pause between attempts."""
    return min(2 * pause_s, MAX_RETRY_BACKOFF_S)


def explain_rest(error: StoreMovedError, deadline: Deadline) -> TDServeError:
    """Returns what a call raises whose store was at rest at its deadline; the error itself if it was not to wait."""
    if deadline.timeout_s == 0 or not deadline.expired:
        return error
    what = f"an answer about store {error.fields['name']!r}, which is at rest for a checkpoint or a move,"
    late = DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)
    late.request_id, late.__cause__ = error.request_id, error
    return late


def choose_pauses_s(
    error: ServerBusyError | StoreMovedError, deadline: Deadline, pause_s: float
) -> tuple[float, float]:
    """Returns the pause after which a call that was refused is made again, and the next longer one.

    Args:
        pause_s: The pause after a refusal that may last.

    Raises:
        ServerBusyError, StoreMovedError: The refusal, if the call is not made again.
    """
    is_at_rest = isinstance(error, StoreMovedError)
    if is_cancelled() or not is_passing(error) or is_over(deadline, 0.0 if is_at_rest else pause_s):
        raise error
    return (deadline.limit(REST_PAUSE_S), pause_s) if is_at_rest else (pause_s, lengthen(pause_s))


def is_passing(error: TDServeError) -> bool:
    """Returns whether the same call may succeed later, at the same server."""
    return error.retryable and getattr(error, "server", None) is None


def may_repeat(error: TDServeError, deadline: Deadline) -> bool:
    """Returns whether a call makes a step again that has failed, perhaps only because the step had less time than the
    call.

    Args:
        deadline: Deadline of the call.
    """
    pause_s = 0.0 if isinstance(error, DeadlineExceededError) else RETRY_BACKOFF_S  # that has waited already
    return is_passing(error) and not is_over(deadline, pause_s)


def is_over(deadline: Deadline, pause_s: float) -> bool:
    """Returns whether a deadline does not allow for a pause."""
    remaining_s = deadline.remaining_s
    return remaining_s is not None and remaining_s <= pause_s
