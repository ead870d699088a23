"""An iterator over new versions of weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from threading import Lock

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, DeadlineExceededError, ForkedClientError, TDServeError, TransportError
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.session.call_conditions import may_repeat
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.weights.pulls import Pulls, Wanted, Weights

STEP_S = 5.0
"""Longest wait of one request, which another follows. If no server is there to cancel the request, a closed
subscription is noticed after this time."""

MIN_STEP_S = 0.001


@leave_modes_in_calls
class Subscription:
    """An iterator over versions, each above the one before; see ``Client.subscribe``. A context manager.

    Threads: one iterates; any may close.

    Args:
        client: The client.
        pulls: Gets the versions.
        wanted: Which weights, and where they go.
        timeout_s: For each wait; None is the client's default.
    """

    def __init__(self, client: SessionClient, pulls: Pulls, wanted: Wanted, *, timeout_s: float | None) -> None:
        wanted.check()
        self._client = client
        self._pulls = pulls
        self._wanted = wanted
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._is_closed = False
        self._under_way: tuple[Session, int] | None = None

    def __iter__(self) -> Subscription:
        return self

    def __next__(self) -> Weights:
        """Waits for the newest version above the last one, and returns it.

        Raises:
            StopIteration: The subscription, or the client, is closed.
            DeadlineExceededError: There was none in time; may be called again.
            TDServeError: As raised by ``Client.latest``; may be called again.
        """
        deadline = self._client.deadline(self._timeout_s)
        while not self._is_closed:
            try:
                found = self._pulls.pull(self._wanted, _make_step(deadline), self._watch)
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
            if found is None:  # asked without waiting
                raise DeadlineExceededError(what=f"a version of {self._wanted.name!r}", timeout_s=self._timeout_s)
            if self._is_closed:
                break
            self._wanted = replace(self._wanted, newer_than=found.version)
            return found
        raise StopIteration

    def close(self) -> None:
        """Ends the iteration, also one that waits in another thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            under_way, self._under_way = self._under_way, None
        if under_way is not None:
            session, request = under_way
            with suppress(TransportError):
                session.cancel(request)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self, session: Session, request: int) -> None:
        """Raises ClosedError for a request whose subscription is closed."""
        with self._lock:
            if self._is_closed:
                raise ClosedError(what="the subscription")
            self._under_way = session, request


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
