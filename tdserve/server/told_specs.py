"""Which structures a data worker was told of, and need not be told again."""

from __future__ import annotations

from collections.abc import Callable

MAX_TOLD = 1024
"""Then the worker forgets them: stores and versions come and go, each perhaps with a structure of its own."""


class ToldSpecs:
    """The fingerprints of one worker's structures.

    Args:
        forget: Has the worker forget what it was told before the last time, which it is when this returns.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._told: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._told)

    def must_tell(self, fingerprint: bytes) -> bool:
        """Whether an order that names this structure has to bring it along; it does so then."""
        if fingerprint in self._told:
            return False
        if len(self._told) == MAX_TOLD:
            self._told.clear()
            self._forget()
        self._told.add(fingerprint)
        return True

    def clear(self) -> None:
        """The worker knows of none: it is another process."""
        self._told.clear()
