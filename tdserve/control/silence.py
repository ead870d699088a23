"""Why a server does not answer: found out beside the callers whose time is up, which wait little for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import NamedTuple

from tdserve.base.addresses import explain_unreachable
from tdserve.base.tls import TLS, explain_refused

HANDSHAKE_S = 0.35
"""Time for each step of a handshake; a stopped server does not answer."""

LOOK_S = 0.4
"""Most time that a caller waits for a look: it is already late."""

KEPT_S = 1.0
"""Time in which what a look has found is not looked for again."""


class Silence(NamedTuple):
    """Why there is no answer.

    Attributes:
        why: Why the server cannot be reached; "" if it can, or that is not known.
        refusal: Why the server refuses the handshake of this client; "" if it does not, or that is not known.
    """

    why: str = ""
    refusal: str = ""


class SilenceLooks:
    """Looks for the reason of a silence, for all callers of a connection together. A resolver that hangs, or a machine
    on which a handshake takes seconds, makes no caller late: it gets the reason that is known by then. Threads: safe.

    Args:
        find_server: Returns the server's address now, and the TLS of the connection.
    """

    def __init__(self, find_server: Callable[[], tuple[str, TLS | None]]) -> None:
        self._find_server = find_server
        self._lock = Lock()
        self._is_over = Event()
        self._is_over.set()
        self._over_s = float("-inf")
        self._found = Silence()

    def find(self, within_s: float = LOOK_S) -> Silence:
        """Returns the reason, as far as it is known within this time."""
        with self._lock:
            if self._is_over.is_set() and time.monotonic() - self._over_s > KEPT_S:
                self._is_over.clear()
                self._found = Silence()
                try:
                    Thread(target=self._look, name="tdserve-silence", daemon=True).start()
                except RuntimeError:  # the interpreter is exiting
                    self._is_over.set()
        self._is_over.wait(within_s)
        return self._found

    def _look(self) -> None:
        address, tls = self._find_server()
        why = explain_unreachable(address)
        self._found = Silence(why)
        if not why:
            self._found = Silence("", explain_refused(address, tls, timeout_s=HANDSHAKE_S))
        self._over_s = time.monotonic()
        self._is_over.set()
