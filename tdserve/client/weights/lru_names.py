"""A cache by the name of a store. It keeps only the names that were used last, since names come and go."""

from __future__ import annotations

from threading import Lock
from typing import Generic, TypeVar

MAX_NAMES = 256
"""A process follows or publishes a few kinds of weights, or some hundred adapters. For others the server sends again
what was forgotten."""

_Kept = TypeVar("_Kept")


class NewestNames(Generic[_Kept]):
    """A value for each of the names that were put last. Threads: safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, name: str) -> _Kept | None:
        """Returns what was put for a name, if it is still remembered."""
        return self._kept.get(name)

    def put(self, name: str, kept: _Kept) -> None:
        """Stores a value for a name; if there are too many, drops the one that was put longest ago."""
        with self._lock:
            self._kept.pop(name, None)
            self._kept[name] = kept
            if len(self._kept) > MAX_NAMES:
                del self._kept[next(iter(self._kept))]

    def pop(self, name: str) -> _Kept | None:
        """Returns what was put for a name, and drops it."""
        with self._lock:
            return self._kept.pop(name, None)
