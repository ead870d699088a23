"""The life of a session, as either end sees it: what may happen when. The rule alone; no socket, no clock.

::

    CONNECTING ──opened──► OPEN ──drain──► DRAINING ──drained──► CLOSED
         └──────lost────────┴───────lost──────┴──────────────────►┘

Everything that changes the state stands in ``TRANSITIONS``; an event that has no entry there is refused, and the state
stays as it was.
"""

from __future__ import annotations

from enum import Enum

from tdserve.base.errors import WrongStateError

_NUM_TAGS = 2**31 - 1


def tag_of(request: int) -> int:
    """The tag of a request's content on the channel. 0 is the channel's own, for its end."""
    return 1 + request % _NUM_TAGS


def why_not_nccl(
    asked: str, *, client_gpu: str, worker_gpu: str, why_no_gpu: str = "", is_one_machine: bool = False
) -> str:
    """Why the content of a session does not go by NCCL; "" when it does. The rule of both ends, before NCCL is touched.

    Args:
        asked: The client's transport.
        client_gpu, worker_gpu: What tells the GPU of either end from all others; "" where there is none.
        why_no_gpu: Why the worker has none.
        is_one_machine: Whether one kernel runs both ends.
    """
    if asked not in ("auto", "nccl"):
        return f"{asked!r} was asked for"
    if not client_gpu:
        return "the client has no GPU that NCCL can use"
    if not worker_gpu:
        return f"the server's data worker has no GPU: {why_no_gpu or 'none was named (tdserve serve --device cuda:N)'}"
    if client_gpu == worker_gpu:
        return f"both ends use one GPU, {client_gpu}, which NCCL refuses; content is staged in pinned memory instead"
    if asked == "auto" and is_one_machine:
        return "both ends are on one machine, whose memory is nearer; content is staged in pinned memory"
    return ""


class SessionState(Enum):
    """Where a session is."""

    CONNECTING = "connecting"  # Hello not yet answered by Welcome
    OPEN = "open"  # requests may begin
    DRAINING = "draining"  # requests under way may end, none may begin
    CLOSED = "closed"  # over; the next call opens another


class SessionEvent(Enum):
    """What happens to a session."""

    OPENED = "opened"  # Welcome was sent, or arrived
    DRAIN = "drain"  # one end will not begin anything more
    DRAINED = "drained"  # the last request under way ended
    LOST = "lost"  # the stream broke, or one end refused or closed it


TRANSITIONS: dict[SessionState, dict[SessionEvent, SessionState]] = {
    SessionState.CONNECTING: {
        SessionEvent.OPENED: SessionState.OPEN,
        SessionEvent.LOST: SessionState.CLOSED,
    },
    SessionState.OPEN: {
        SessionEvent.DRAIN: SessionState.DRAINING,
        SessionEvent.LOST: SessionState.CLOSED,
    },
    SessionState.DRAINING: {
        SessionEvent.DRAINED: SessionState.CLOSED,
        SessionEvent.LOST: SessionState.CLOSED,
    },
    SessionState.CLOSED: {},
}


class SessionProtocol:
    """One session's state and the requests under way in it.

    Args:
        session: Its number, for errors; 0 where it is not known yet.
    """

    def __init__(self, session: int = 0) -> None:
        self.session = session
        self._state = SessionState.CONNECTING
        self._requests: set[int] = set()

    def __repr__(self) -> str:
        return f"<SessionProtocol {self.session} {self._state.value}, {len(self._requests)} requests>"

    @property
    def state(self) -> SessionState:
        """Where the session is."""
        return self._state

    @property
    def requests(self) -> frozenset[int]:
        """Requests that began and did not end."""
        return frozenset(self._requests)

    def on(self, event: SessionEvent) -> SessionState:
        """Takes an event in, and returns the new state.

        Raises:
            WrongStateError: The event is impossible now. Nothing was changed.
        """
        following = TRANSITIONS[self._state].get(event)
        if following is None or (event is SessionEvent.DRAINED and self._requests):
            raise self._refused(event.value)
        self._state = following
        return following

    def begin(self, request: int) -> None:
        """A request begins.

        Raises:
            WrongStateError: The session is not open, or a request of this number is under way. Nothing was changed.
        """
        if self._state is not SessionState.OPEN or request in self._requests:
            raise self._refused(f"begin of request {request}")
        self._requests.add(request)

    def end(self, request: int) -> bool:
        """A request ends, well or badly, also after the session was lost.

        Returns:
            Whether it was the last one of a draining session: :attr:`SessionEvent.DRAINED` comes next.

        Raises:
            WrongStateError: No such request is under way. Nothing was changed.
        """
        if request not in self._requests:
            raise self._refused(f"end of request {request}")
        self._requests.remove(request)
        return self._state is SessionState.DRAINING and not self._requests

    def _refused(self, event: str) -> WrongStateError:
        return WrongStateError(state=self._state.value, event=f"{event} of session {self.session}")
