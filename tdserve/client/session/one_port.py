"""What a client whose channel may have any transport has found out about ports other than the server's own."""

from __future__ import annotations

import logging

from tdserve.client.session.session import Session
from tdserve.rules.channel_transports import CHANNEL_TRANSPORTS, is_local_allowed

FALL_BACK_S = 4.0
"""Time for the first channel: a call waits for half of it, and then opens a session that needs but the server's own
port."""

_log = logging.getLogger("tdserve.client")


class OnePort:
    """Remembers across sessions that no other port can be used. Threads: the one that opens sessions.

    Args:
        asked: The client's transport. One that is asked for by name is used or fails; shared memory leaves open how
            what it cannot move is moved.

    Attributes:
        why: Why content cannot take other ports; "" if that is not known.
    """

    def __init__(self, asked: str) -> None:
        self.why = ""
        self._falls_back = is_local_allowed(asked)
        self._has_logged = False

    def learn(self, former: Session | None) -> None:
        """Notes why the channel of the client's last session could not be opened."""
        if former is not None and former.channel_failure and not former.device and self._falls_back:
            self.why = former.channel_failure

    def begin(self, session: Session) -> None:
        """Limits the time for the first channel of a new session, unless it has but one port: then logs why, once."""
        if not self._falls_back:
            return
        why = explain_one_port(session)
        if not why:  # otherwise there is nothing to fall back to
            session.contents.connect_timeout_s = session.contents.max_connect_s = FALL_BACK_S
        if why and not self._has_logged:
            self._has_logged = True
            level = logging.WARNING if self.why else logging.INFO
            _log.log(
                level, "content goes over the port of the server at %s (transport 'grpc'): %s", session.address, why
            )


def explain_one_port(session: Session | None) -> str:
    """Returns why a session's content takes the connection to control; "" if it does not."""
    if session is None or CHANNEL_TRANSPORTS[session.channel_transport].has_mail:
        return ""
    return session.why_not_channel
