"""Python's garbage collector: a full pass visits every object, however many stores they belong to."""

from __future__ import annotations

import gc

STORES_AT_A_TIME = 128
"""Stores between two passes; visiting the objects of so many takes a few milliseconds."""


class Garbage:
    """The policy that keeps passes short: each open store's objects are visited once, and excluded from then on.

    Excluded objects are still freed with the last reference to them, as those of a deleted store are.
    """

    def __init__(self) -> None:
        self._num_new = 0

    def note_store(self) -> None:
        """Counts a newly opened store; calls :meth:`settle` after each ``STORES_AT_A_TIME``."""
        self._num_new += 1
        if self._num_new >= STORES_AT_A_TIME:
            self.settle()

    def settle(self) -> None:
        """Visits all new objects, and excludes them from now on."""
        self._num_new = 0
        gc.collect()
        gc.freeze()
