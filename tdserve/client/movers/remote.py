"""The mover of a client that reaches the server over the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tdserve.base.errors import NotSupportedError
from tdserve.client.session.mover import Mover
from tdserve.client.session.outgoing import Outgoing, Target
from tdserve.client.session.session import Session
from tdserve.client.transfers.upload import SentContent
from tdserve.structure.capture import Captured


class RemoteMover(Mover):
    """Moves content in messages, small content in requests and answers.

    Args:
        session: Whose content it moves.
    """

    def __init__(self, session: Session) -> None:
        self.transport = session.channel_transport
        self._session = session

    @property
    def is_ready(self) -> bool:
        """Whether the channel is open."""
        return self._session.has_channel

    @property
    def inline_bytes(self) -> int:
        """As the server says."""
        return self._session.inline_bytes

    def prepare(
        self,
        captured: Sequence[Captured],
        target: Target,
        *,
        margin_nbytes: int = 0,
        fetch: Callable[[], Captured] | None = None,
    ) -> Outgoing:
        """Laid out for messages."""
        return SentContent(captured, target, self._session, margin_nbytes=margin_nbytes, fetch=fetch)

    def check_maps(self, what: str, *, writable: bool) -> None:
        """It cannot."""
        why = self._session.why_not_local or "this client was told to use gloo"
        reason = f"it needs transport 'shm', and there is none here: {why}; read the store instead"
        raise NotSupportedError(feature=what, reason=reason)
