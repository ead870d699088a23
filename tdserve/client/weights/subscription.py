"""An iterator over new versions of weights."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, DeadlineExceededError, ForkedClientError, TDServeError
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.session.calls.call_conditions import is_over, may_repeat
from tdserve.client.session.calls.call_deadline import begin_step
from tdserve.client.session.calls.cancellation import Cancellation
from tdserve.client.weights.pulls import Weights

STEP_S = 5.0
"""Longest wait of one request, which another follows. If no server is there to cancel the request, a closed
subscription is noticed after this time."""

MIN_STEP_S = 0.001

Pull = Callable[[int | None, Deadline, Deadline], Weights | None]
"""Gets the newest version above a number; None if there is none and it does not wait, or has no time left to. Waits for
one until the first deadline, and for its content until the second."""


@leave_modes_in_calls
class Subscription:
    """An iterator over versions, each above the one before; see ``Client.subscribe``. A context manager.

    Threads: one iterates; any may close.

    Args:
        name: Name of the weights, for errors.
        pull: Gets the versions.
        begin: Returns the deadline of a wait that begins; one in a block ``tdserve.within`` ends by it as well.
        newer_than: Begins above this version.
    """

    def __init__(self, name: str, pull: Pull, begin: Callable[[], Deadline], *, newer_than: int | None) -> None:
        self._name = name
        self._pull = pull
        self._begin = begin
        self._newer_than = newer_than
        self._lock = Lock()
        self._is_closed = False
        self._under_way: Cancellation | None = None

    def __iter__(self) -> Subscription:
        return self

    def __next__(self) -> Weights:
        """Waits for the newest version above the last one, and returns it.

        Raises:
            StopIteration: The subscription, or the client, is closed.
            DeadlineExceededError: There was none in time; may be called again.
            TDServeError: As raised by ``Client.latest``; may be called again.
        """
        deadline = begin_step(self._begin().timeout_s)
        while (cancellation := self._begin_step()) is not None:
            try:
                with cancellation.watch():
                    found = self._pull(self._newer_than, _make_step(deadline), deadline)
            except ForkedClientError:
                raise
            except ClosedError:
                break
            except TDServeError as error:
                if self._is_closed:
                    break
                if not may_repeat(error, deadline):
                    raise _restore_timeout(error, deadline) from None
                continue
            finally:
                with self._lock:
                    self._under_way = None
            if self._is_closed:
                break
            if found is None:  # asked without waiting, or with what was left of the step
                if is_over(deadline, 0.0):
                    raise DeadlineExceededError(what=f"a version of {self._name!r}", timeout_s=deadline.timeout_s)
                continue
            self._newer_than = found.version
            return found
        raise StopIteration

    def close(self) -> None:
        """Ends the iteration, also one that waits in another thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.cancel()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_step(self) -> Cancellation | None:
        """Returns what cancels the requests of a step; None if the subscription is closed."""
        with self._lock:
            self._under_way = None if self._is_closed else Cancellation()
            return self._under_way


def _make_step(deadline: Deadline) -> Deadline:
    remaining_s = deadline.remaining_s
    if deadline.timeout_s == 0:
        return deadline
    return Deadline.after(STEP_S if remaining_s is None else min(STEP_S, max(remaining_s, MIN_STEP_S)))  # 0 asks once


def _restore_timeout(error: TDServeError, deadline: Deadline) -> TDServeError:
    """Returns the error of a wait with the caller's timeout instead of that of the last step."""
    if isinstance(error, DeadlineExceededError):
        return type(error)(**{**error.fields, "timeout_s": deadline.timeout_s})
    return error
