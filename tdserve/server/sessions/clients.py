"""The clients of a server: which have a session, and when the others are forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol


class ClientKeeper(Protocol):
    """What keeps something for clients, also over restarts."""

    def list_clients(self) -> set[bytes]:
        """Returns the ids of the clients for which something is kept."""

    def forget_client(self, client_id: bytes) -> None:
        """Drops what is kept for a client that is gone for good."""


class Clients:
    """Forgets a client once it has had no session for some time, however many sessions it had before.

    Args:
        keep_s: Length of that time.
        keepers: What forgets it.
    """

    def __init__(self, keep_s: float, keepers: Sequence[ClientKeeper]) -> None:
        self._keep_s = keep_s
        self._keepers = keepers
        self._num_sessions: Counter[bytes] = Counter()
        self._away: dict[bytes, asyncio.TimerHandle] = {}

    def restore(self) -> None:
        """Starts the time of all clients for which something is kept from a previous run of the server."""
        for client_id in set[bytes]().union(*(keeper.list_clients() for keeper in self._keepers)):
            self._start_waiting(client_id)

    def on_opened(self, client_id: bytes) -> None:
        """Stops the time of a client: one of its sessions has been opened."""
        self._num_sessions[client_id] += 1
        self._stop_waiting(client_id)

    def on_ended(self, client_id: bytes) -> None:
        """Ends a session reported to ``on_opened``. With the client's last session its time starts."""
        self._num_sessions[client_id] -= 1
        if not self._num_sessions[client_id]:
            del self._num_sessions[client_id]
            self._start_waiting(client_id)

    def _start_waiting(self, client_id: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._away[client_id] = loop.call_later(self._keep_s, self._forget_now, client_id)

    def _stop_waiting(self, client_id: bytes) -> None:
        timer = self._away.pop(client_id, None)
        if timer is not None:
            timer.cancel()

    def _forget_now(self, client_id: bytes) -> None:
        del self._away[client_id]
        for keeper in self._keepers:
            keeper.forget_client(client_id)
