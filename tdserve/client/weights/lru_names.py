"""What a client remembers of stores, by name: of the last ones only, since names come and go."""

from __future__ import annotations

from threading import Lock
from typing import Generic, TypeVar

MAX_NAMES = 256
"""A process follows or publishes a few kinds of weights, or some hundred adapters. Of others it is told again what it
has forgotten."""

_Kept = TypeVar("_Kept")


class NewestNames(Generic[_Kept]):
    """Something for each of the names for which it was put last. Threads: safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, name: str) -> _Kept | None:
        """What was put for a name, if it is still known."""
        return self._kept.get(name)

    def put(self, name: str, kept: _Kept) -> None:
        """Remembers it, and forgets what was put for another name longest ago, where there are too many."""
        with self._lock:
            self._kept.pop(name, None)
            self._kept[name] = kept
            if len(self._kept) > MAX_NAMES:
                del self._kept[next(iter(self._kept))]

    def pop(self, name: str) -> _Kept | None:
        """As ``get``; it is forgotten then."""
        with self._lock:
            return self._kept.pop(name, None)
