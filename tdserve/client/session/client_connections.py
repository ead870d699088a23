"""What a client has open, such as its connection and its session: that ends with it, also if it is dropped."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.client.session.calls.deadline_watch import DeadlineWatch
from tdserve.client.session.catalog.catalog_client import AskSession
from tdserve.client.session.finalizing import run_from_finalizer
from tdserve.client.session.session import Session
from tdserve.control.connection import ControlConnection

_inherited: list[ClientConnections] = []
"""Those that belong to the parent of this forked child, kept alive: their end would close what the parent uses."""


class ClientConnections:
    """What one client has open.

    Neither this nor a thread of it refers to the client, except for a call under way: a client lives as long as the
    user has it, or a handle, iterator or writer of it, or a call is under way. Lost sessions are not kept here either:
    their errors refer to the calls that have raised them.

    Args:
        connection: To the server.
        watch: The thread that ends its calls.
    """

    def __init__(self, connection: ControlConnection, watch: DeadlineWatch) -> None:
        self._connection = connection
        self._watch = watch
        self._pid = os.getpid()
        self._find_session: Callable[[], Session | None] = _find_none
        self._has_opened = False

    def note_session(self, session: Session) -> None:
        """Takes note of the client's session; its threads keep it until it is lost."""
        self._find_session, self._has_opened = weakref.ref(session), True

    def end_later(self) -> bool:
        """Ends all this from a finalizer, without waiting for it; does nothing in a forked child of its process.

        Returns:
            Whether the client has had a session.
        """
        if os.getpid() != self._pid:
            _inherited.append(self)
            return False
        run_from_finalizer(self.close)
        return self._has_opened

    def close(self) -> None:
        """Ends the session in good order, and then everything else. Idempotent."""
        session, self._find_session = self._find_session(), _find_none
        if session is not None:
            session.end_overwrites()
            has_reported = session.report_calls()
            session.groups.leave_all(session.flush)
            if has_reported:
                session.flush()
        self._connection.close()
        if session is not None:
            session.close()
        self._watch.close()


def _find_none() -> None:
    return None


def end_with(
    owner: object, connections: Sequence[ClientConnections], address: str, *, ends: Sequence[Callable[[], None]] = ()
) -> weakref.finalize[..., object]:
    """Ends connections when their owner is dropped, with a ResourceWarning. If it was closed, ``detach`` the result.

    Args:
        owner: What the user holds, and all that was made of it.
        connections: Those of its clients; more may come.
        address: For the warning.
        ends: End what it has beside them.
    """
    finalizer = weakref.finalize(owner, _end_dropped, connections, address, ends)
    finalizer.atexit = False  # sessions end by themselves then
    return finalizer


def _end_dropped(connections: Sequence[ClientConnections], address: str, ends: Sequence[Callable[[], None]]) -> None:
    have_opened = [each.end_later() for each in connections]
    for end in ends:
        run_from_finalizer(end)
    if any(have_opened):
        # As for files: at the line that has dropped it. With tracemalloc it shows where it was made, too.
        warnings.warn(f"unclosed client of {address}", ResourceWarning, stacklevel=3, source=connections[0])


def ask_weakly(method: AskSession) -> AskSession:
    """Returns a function that calls a method and does not refer to its object; without that it returns None. It takes
    0.1 us, a third of what a ``WeakMethod`` takes."""
    bound: Any = method
    find_owner, function = weakref.ref(bound.__self__), bound.__func__

    def ask(method: str, request: Any, deadline: Deadline) -> Any:
        owner = find_owner()
        return None if owner is None else function(owner, method, request, deadline)

    return ask
