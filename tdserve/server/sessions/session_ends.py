"""What may still be done for a session depends on whether it has ended."""

from __future__ import annotations

from tdserve.base.errors import PeerLostError
from tdserve.server.sessions.client_session import ClientSession


def check_open(session: ClientSession) -> None:
    """Raises PeerLostError if a session has ended: what is kept for it from now on would never end."""
    if session.ended.is_set():
        raise PeerLostError(peer=f"session {session.number}", reason="it has ended")
