"""What all movers share: the session whose content they move."""

from __future__ import annotations

import weakref

from tdserve.base.errors import PeerLostError
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.mover import Mover


class SessionMover(Mover):
    """A mover that does not keep its session alive, which has it: only the collector would free both.

    Args:
        session: Session whose content it moves.
    """

    def __init__(self, session: ClientSession) -> None:
        self._number = session.number
        self._session_ref = weakref.ref(session)

    @property
    def _session(self) -> ClientSession:
        """The session, which exists while any of its requests does."""
        session = self._session_ref()
        if session is None:
            raise PeerLostError(peer=f"session {self._number}", reason="it has ended")
        return session
