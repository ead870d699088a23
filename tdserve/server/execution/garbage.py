"""Python's garbage collector: a full pass visits every object, however many stores they belong to."""

from __future__ import annotations

import gc

STORES_AT_A_TIME = 128
"""Stores between two passes; visiting the objects of this many takes a few milliseconds."""

MIN_GONE = 1024
"""Deleted stores after which excluded objects are visited too, if no more stores are left: that takes ten milliseconds
and more."""


class Garbage:
    """The policy that keeps passes short: each open store's objects are visited once, and excluded from then on.

    Excluded objects are still freed with the last reference to them, as those of a deleted store are. Those that refer
    to one another, as a session and its mover, or an error and the calls that it has passed, are found by a pass over
    everything: once as many stores were deleted as there are, so that passes cost each store the same.
    """

    def __init__(self) -> None:
        self._num_new = self._num_gone = 0

    def note_store(self, num_stores: int) -> None:
        """Counts a newly opened store; calls :meth:`settle` after each ``STORES_AT_A_TIME``.

        Args:
            num_stores: Number of stores of the server.
        """
        self._num_new += 1
        if self._num_new >= STORES_AT_A_TIME:
            self.settle(is_whole=self._num_gone >= max(num_stores, MIN_GONE))

    def note_deletion(self) -> None:
        """Counts a deleted store."""
        self._num_gone += 1

    def settle(self, *, is_whole: bool = False) -> None:
        """Visits all new objects, and excludes them from now on.

        Args:
            is_whole: Whether objects are visited again that were excluded before.
        """
        self._num_new = 0
        if is_whole:
            self._num_gone = 0
            gc.unfreeze()
        gc.collect()
        gc.freeze()
