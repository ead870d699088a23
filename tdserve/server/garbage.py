"""Python's garbage collector: now and then it looks at every object there is, however many stores they are of."""

from __future__ import annotations

import gc

STORES_AT_A_TIME = 128
"""What belongs to so many stores is looked at in a few milliseconds."""


class Garbage:
    """Keeps those passes short: what belongs to open stores is looked at once, and left out from then on.

    What is left out is still freed when nobody refers to it any more, as all that a store has is once it is deleted.
    """

    def __init__(self) -> None:
        self._num_new = 0

    def note_store(self) -> None:
        """A store was opened."""
        self._num_new += 1
        if self._num_new >= STORES_AT_A_TIME:
            self.settle()

    def settle(self) -> None:
        """Looks at everything that is new, and leaves it out from now on."""
        self._num_new = 0
        gc.collect()
        gc.freeze()
