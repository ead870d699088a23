"""Clients that belong to a process, one for each address.

Unpickled objects, and those of a forked child, share them.
"""

from __future__ import annotations

import atexit
import os
from multiprocessing.util import Finalize
from threading import Lock

from tdserve.client.session.calls import Recipe, SessionClient

_lock = Lock()
_clients: dict[Recipe, SessionClient] = {}


def get_process_client(recipe: Recipe) -> SessionClient:
    """Returns this process's client of an address and settings; makes it when first asked, and closes it at exit."""
    with _lock:
        found = _clients.get(recipe)
        if found is None or found.is_closed:
            if not _clients:
                # A process forked by multiprocessing exits without atexit, and a spawned one may too.
                Finalize(None, _close_all, exitpriority=0)
            found = _clients[recipe] = recipe.make()
        return found


def _close_all() -> None:
    with _lock:
        closing = list(_clients.values())
    for client in closing:
        client.close()


def _begin_anew() -> None:
    """Starts anew in a forked child.

    The parent's clients are kept alive: their end would close what the parent uses.
    """
    global _lock, _clients
    _inherited.append(_clients)
    _lock, _clients = Lock(), {}


_inherited: list[dict[Recipe, SessionClient]] = []

os.register_at_fork(after_in_child=_begin_anew)
# Registered before the users of these clients register theirs, so that those run first.
atexit.register(_close_all)
