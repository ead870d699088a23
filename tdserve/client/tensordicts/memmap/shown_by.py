"""Which store each tensordict of ``memmap_`` shows."""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import ReferenceType, ref


class ShownStores:
    """Names of stores by the tensordicts that show them, which it does not keep alive. Threads: safe.

    Tensordicts compare entry by entry, so they are known by identity.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._names: dict[int, tuple[ReferenceType[Any], str]] = {}

    def add(self, td: Any, name: str) -> None:
        """From now on ``td`` shows the store of that name, and no other."""
        number = id(td)
        with self._lock:
            self._names[number] = (ref(td, lambda gone: self._forget(number, gone)), name)

    def name_of(self, td: Any) -> str | None:
        """The store that it shows; None for one that shows none."""
        with self._lock:
            found = self._names.get(id(td))
        return None if found is None or found[0]() is not td else found[1]

    def _forget(self, number: int, gone: ReferenceType[Any]) -> None:
        # no lock: this runs wherever the last reference goes, also within add() of the same thread
        found = self._names.get(number)
        if found is not None and found[0] is gone:
            self._names.pop(number, None)
