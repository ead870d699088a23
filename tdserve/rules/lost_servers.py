"""What a client knows of servers that do not answer, and when it tries them again. No I/O; the caller has the clock."""

from __future__ import annotations

from collections.abc import Iterator

REACH_S = 1.0
"""How long a call tries to reach a server that others can stand in for. A server that restarts takes about as long."""

PATIENCE_S = 5.0
"""How long a server that listens may take to answer before it is looked at: it may have stopped, or be busy."""

PROBE_INTERVAL_S = 0.5
"""A server that does not answer is tried again as often."""

PROBE_TIMEOUT_S = 0.5


class LostServers:
    """Servers that did not answer, and have not since. Iterating gives their numbers.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._tried_s: dict[int, float] = {}

    def __contains__(self, server: int) -> bool:
        return server in self._tried_s

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._tried_s))

    def note_lost(self, server: int, now_s: float) -> bool:
        """Notes that a server did not answer; returns whether that is news."""
        is_new = server not in self._tried_s
        self._tried_s[server] = now_s
        return is_new

    def note_found(self, server: int) -> None:
        """Notes that a server answers again."""
        self._tried_s.pop(server, None)

    def begin_probe(self, server: int, now_s: float) -> bool:
        """Returns whether the caller has to try a lost server now; others wait for the next time meanwhile."""
        tried_s = self._tried_s.get(server)
        if tried_s is None or now_s - tried_s < PROBE_INTERVAL_S:
            return False
        self._tried_s[server] = now_s
        return True
