"""Clients that belong to a process: what came there by pickle or through a fork shares them, one for each address."""

from __future__ import annotations

import atexit
import os
from multiprocessing.util import Finalize
from threading import Lock

from tdserve.client.session.calls import Recipe, SessionClient

_lock = Lock()
_clients: dict[Recipe, SessionClient] = {}


def resident(recipe: Recipe) -> SessionClient:
    """This process's client of an address and settings; it is made for the first who asks, and closed at exit."""
    with _lock:
        found = _clients.get(recipe)
        if found is None or found.is_closed:
            if not _clients:
                # A process that multiprocessing has forked leaves without atexit, and one that it has spawned may too.
                Finalize(None, _close_all, exitpriority=0)
            found = _clients[recipe] = recipe.make()
        return found


def _close_all() -> None:
    with _lock:
        closing = list(_clients.values())
    for client in closing:
        client.close()


def _begin_anew() -> None:
    """In a forked child: the parent's clients are not its own; they are kept, for what ends with them is not either."""
    global _lock, _clients
    _inherited.append(_clients)
    _lock, _clients = Lock(), {}


_inherited: list[dict[Recipe, SessionClient]] = []

os.register_at_fork(after_in_child=_begin_anew)
# Here: what others still have to do with these clients is registered later, and done before.
atexit.register(_close_all)
