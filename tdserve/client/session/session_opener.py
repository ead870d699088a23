"""A session that is being opened, in a thread of its own, so that a waiting call can end at its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition, Thread, current_thread

from tdserve.base.deadline import GRACE_S, Deadline
from tdserve.base.errors import ConnectError, DeadlineExceededError
from tdserve.client.session.session import Session

JOIN_TIMEOUT_S = 1.0
"""Timeout for the end of the thread when its client is closed: its connection is gone by then, which ends its wait."""

UNOPENED_JOIN_S = 0.1
"""The same of one that has opened nothing: a call that failed is late already."""

MIN_OPENING_S = 5.0
"""An opening continues for this long although the call that began it had less time: the next call uses the session."""

LATE_LOOK_S = 0.05
"""Time for a look why a server does not answer, by a call that is late."""


class Opening:
    """The opening of one session. Threads: safe; any number may wait.

    Args:
        open_session: Opens it until a deadline; blocks. The client owns the session, whether or not a call still waits.
        address: Address of the server, for errors.
        timeout_s: For the opening; at least ``MIN_OPENING_S``.
        explain_silence: Returns why there was no answer for this many seconds, as far as it is known within others.
    """

    def __init__(
        self,
        open_session: Callable[[Deadline], Session],
        *,
        address: str,
        timeout_s: float,
        explain_silence: Callable[[float, float], str],
    ) -> None:
        self._explain_silence = explain_silence
        self._address = address
        self._deadline = Deadline.after(max(timeout_s, MIN_OPENING_S))
        self._changed = Condition()
        self._session: Session | None = None
        self._error: BaseException | None = None
        # An argument, which goes with the thread: the client has this object, and must not be in a cycle with it.
        self._thread = Thread(target=self._run, args=(open_session,), name="tdserve-open-session", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is exiting, and starts no more threads
            self._run(open_session)

    @property
    def is_over(self) -> bool:
        """Whether there is a session, or the opening has failed."""
        return self._session is not None or self._error is not None

    def wait(self, timeout_s: float, *, begun_s: float | None = None, deadline: Deadline = Deadline.never) -> Session:
        """Returns the session.

        Args:
            begun_s: When the whole call began, by ``time.monotonic``, for its error; None: now.
            deadline: Deadline of the call: one that is late already has not much time for the reason.

        Raises:
            ConnectError: It was not open in time; the opening continues.
            TDServeError: Why it cannot be opened.
        """
        begun_s = time.monotonic() if begun_s is None else begun_s
        with self._changed:
            self._changed.wait_for(lambda: self.is_over, timeout_s)
            if self._session is not None:
                return self._session
            if self._error is not None and not self._is_silence(self._error):
                raise self._error
        raise self._make_silence_error(time.monotonic() - begun_s, _compute_look_s(deadline), self._error)

    def join(self) -> None:
        """Waits for the thread to end, once nothing blocks it any more; shortly if it has not opened a session, since
        it may be looking why a server does not answer."""
        if self._thread.ident is not None and self._thread is not current_thread():
            self._thread.join(UNOPENED_JOIN_S if self._session is None else JOIN_TIMEOUT_S)

    def _run(self, open_session: Callable[[Deadline], Session]) -> None:
        try:
            session = open_session(self._deadline)
        except BaseException as error:  # noqa: BLE001 (outermost frame of the thread: the waiting caller gets it)
            self._end(None, error)
        else:
            self._end(session, None)

    def _is_silence(self, error: BaseException) -> bool:
        """Returns whether the opening timed out; a waiting call that has more time tries again."""
        return isinstance(error, DeadlineExceededError) or (type(error) is ConnectError and self._deadline.expired)

    def _make_silence_error(self, waited_s: float, look_s: float, cause: BaseException | None) -> ConnectError:
        error = ConnectError(address=self._address, reason=self._explain_silence(waited_s, look_s))
        error.__cause__ = cause
        return error

    def _end(self, session: Session | None, error: BaseException | None) -> None:
        with self._changed:
            self._session, self._error = session, error
            self._changed.notify_all()


def _compute_look_s(deadline: Deadline) -> float:
    """Returns for how long a call looks for the reason of a silence, so that it is not late by more than a look."""
    if deadline.timeout_s == 0:  # it asks once, and waits longer
        return GRACE_S
    return max(GRACE_S - deadline.overdue_s, LATE_LOOK_S)
