"""Which clients are here, and when those that are away are forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable


class Clients:
    """Forgets a client when it has been away for a time without a break: once, whatever sessions it had before.

    Args:
        keep_s: That time.
        forget: Called with the client's id.
    """

    def __init__(self, keep_s: float, forget: Callable[[bytes], None]) -> None:
        self._keep_s = keep_s
        self._forget = forget
        self._num_sessions: Counter[bytes] = Counter()
        self._away: dict[bytes, asyncio.TimerHandle] = {}

    def restore(self, client_ids: Iterable[bytes]) -> None:
        """After a start of the server, for which nobody was away before."""
        for client_id in client_ids:
            self.on_call(client_id)

    def on_opened(self, client_id: bytes) -> None:
        """A session of the client is open."""
        self._num_sessions[client_id] += 1
        self._stop_waiting(client_id)

    def on_ended(self, client_id: bytes) -> None:
        """A session of the client is over, of which ``on_opened`` was told."""
        self._num_sessions[client_id] -= 1
        if not self._num_sessions[client_id]:
            del self._num_sessions[client_id]
            self.on_call(client_id)

    def on_call(self, client_id: bytes) -> None:
        """The client was heard of: without a session its time begins anew."""
        if client_id not in self._num_sessions:
            self._stop_waiting(client_id)
            loop = asyncio.get_running_loop()
            self._away[client_id] = loop.call_later(self._keep_s, self._forget_now, client_id)

    def _stop_waiting(self, client_id: bytes) -> None:
        timer = self._away.pop(client_id, None)
        if timer is not None:
            timer.cancel()

    def _forget_now(self, client_id: bytes) -> None:
        del self._away[client_id]
        self._forget(client_id)
