"""Parts of a shared store that their servers do not have, although they answer: a disk was lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

from tdserve.base.errors import TDServeError
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.rules.lost_servers import LostServers

CREATION_S = 2.0
"""The record of a shared store comes first, and its parts follow within a moment; what is not there by then is lost."""

LOOK_AGAIN_S = 0.02
"""Pause between two looks at a part that is being created."""

Look = Callable[[], StoreDescription | None]
"""Asks the server of a part for its description."""


class LostParts:
    """The parts of one store that were not where they belong, and have not been found since, for all handles of a
    client. Threads: safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._lost = LostServers()  # by shard
        self._unreported: set[int] = set()
        self._left_out: frozenset[int] = frozenset()

    def replace_left_out(self, left_out: frozenset[int]) -> frozenset[int]:
        """Takes note of the shards without which calls continue now; returns those of the last call."""
        with self._lock:
            before, self._left_out = self._left_out, left_out
        return before

    def list_shards(self) -> list[int]:
        """Returns the shards that are lost."""
        return list(self._lost)

    def take_unreported(self) -> list[int]:
        """Returns the lost shards that were not returned before."""
        with self._lock:
            taken, self._unreported = self._unreported, set()
        return sorted(taken)

    def is_lost(self, shard: int, look: Look) -> bool:
        """Returns whether a part was not there recently. One that was not is looked for again from time to time, by the
        caller that asks then."""
        if shard not in self._lost:
            return False
        with self._lock:
            if not self._lost.begin_probe(shard, time.monotonic()):
                return shard in self._lost
        try:
            found = look()
        except TDServeError:  # the call itself will meet it
            return True
        if found is not None:
            self.note_found(shard)
        return found is None

    def forget(self) -> None:
        """Forgets all that is known: parts are being created."""
        with self._lock:
            self._lost, self._unreported = LostServers(), set()

    def note_found(self, shard: int) -> None:
        """Takes note that a part is there."""
        with self._lock:
            self._lost.note_found(shard)
            self._unreported.discard(shard)

    def wait(self, shard: int, look: Look, timeout_s: float) -> StoreDescription | None:
        """Returns the description of a part that may be about to be created; None if it is not there in time."""
        end_s = time.monotonic() + (0.0 if shard in self._lost else min(timeout_s, CREATION_S))
        while (found := look()) is None and time.monotonic() < end_s:
            time.sleep(LOOK_AGAIN_S)
        if found is not None:
            self.note_found(shard)
        elif timeout_s >= CREATION_S:
            with self._lock:
                if self._lost.note_lost(shard, time.monotonic()):
                    self._unreported.add(shard)
        return found
