"""A session on its way: opened in a thread of its own, so that whoever waits for it can be let go at his deadline."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Thread, current_thread

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ConnectError, DeadlineExceededError
from tdserve.client.session.session import Session
from tdserve.control.status import NOBODY_THERE

JOIN_TIMEOUT_S = 1.0
"""For the thread, when its client is closed: its connection is gone by then, which ends whatever it waits for."""

MIN_OPENING_S = 5.0
"""As long goes on what a call has begun that had less time: the next call finds the session open."""


class Opening:
    """Opens one session. Threads: safe; any number may wait.

    Args:
        open_session: Opens it until a deadline; blocks. What it has opened is the client's, whoever waits here.
        address: Of the server, for errors.
        timeout_s: Until it is given up; at least ``MIN_OPENING_S``.
        explain_silence: Returns why nobody answers.
    """

    def __init__(
        self,
        open_session: Callable[[Deadline], Session],
        *,
        address: str,
        timeout_s: float,
        explain_silence: Callable[[], str] = lambda: NOBODY_THERE,
    ) -> None:
        self._open_session = open_session
        self._explain_silence = explain_silence
        self._address = address
        self._deadline = Deadline.after(max(timeout_s, MIN_OPENING_S))
        self._changed = Condition()
        self._session: Session | None = None
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="tdserve-open-session", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter ends, and lets no thread begin
            self._run()

    @property
    def is_over(self) -> bool:
        """Whether there is a session, or there will be none."""
        return self._session is not None or self._error is not None

    def wait(self, timeout_s: float) -> Session:
        """The session.

        Raises:
            ConnectError: It was not there in time; it is opened all the same.
            TDServeError: Why it cannot be opened.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_over, timeout_s)
            if self._session is not None:
                return self._session
            if self._error is not None:
                raise self._error
        raise self._silence(timeout_s)

    def join(self) -> None:
        """Waits for the thread to end, once nothing holds it any more."""
        if self._thread.ident is not None and self._thread is not current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            session = self._open_session(self._deadline)
        except DeadlineExceededError as error:  # its own time is over; whoever waits may have more, and tries again
            self._end(None, self._silence(error.timeout_s, error))
        except BaseException as error:  # noqa: BLE001 (outermost frame of the thread: whoever waits gets it)
            self._end(None, error)
        else:
            self._end(session, None)

    def _silence(self, timeout_s: float | None, cause: BaseException | None = None) -> ConnectError:
        waited = "in time" if timeout_s is None else f"within {round(timeout_s, 2):g} s"
        error = ConnectError(address=self._address, reason=f"nobody answered {waited}; {self._explain_silence()}")
        error.__cause__ = cause
        return error

    def _end(self, session: Session | None, error: BaseException | None) -> None:
        with self._changed:
            self._session, self._error = session, error
            self._changed.notify_all()
