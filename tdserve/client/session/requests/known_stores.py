"""Structures of stores that a client has read by name: the next read need not bring them."""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

from tdserve.structure.trees.tree import Spec

MAX_KNOWN = 1024
"""Stores that a client remembers."""

MAX_LEAVES = 100_000
"""Leaves that these have together; each takes about half a kilobyte. One store may have more."""


class KnownStore(NamedTuple):
    """A store as it was when it was read last.

    Attributes:
        identity: Its incarnation and the number of its structure. While the server names the same, the structure is the
            same in all that its fingerprint leaves out too, such as the order of keys.
        spec: Its structure.
        shares_non_tensor: Whether it shares its non-tensor leaves; None if that was not asked for.
    """

    identity: str
    spec: Spec
    shares_non_tensor: bool | None = None


class KnownStores:
    """Stores by name. Threads: safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stores: dict[str, KnownStore] = {}
        self._num_leaves = 0

    def find(self, name: str) -> KnownStore | None:
        """Returns a store that was read before, which may be another one now."""
        return self._stores.get(name)

    def forget(self, name: str) -> None:
        """Forgets a store that is another one now."""
        with self._lock:
            self._drop(name)

    def learn(self, name: str, store: KnownStore) -> None:
        """Remembers a store that was read; forgets those that were read first if there are too many."""
        num_leaves = _count_leaves(store)
        with self._lock:
            self._drop(name)
            while self._stores and (len(self._stores) >= MAX_KNOWN or self._num_leaves + num_leaves > MAX_LEAVES):
                self._drop(next(iter(self._stores)))
            self._stores[name] = store
            self._num_leaves += num_leaves

    def _drop(self, name: str) -> None:
        if (store := self._stores.pop(name, None)) is not None:
            self._num_leaves -= _count_leaves(store)


def _count_leaves(store: KnownStore) -> int:
    return len(store.spec.tensors) + len(store.spec.values)
