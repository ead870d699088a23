"""The stores that are open in the control process; unused ones are closed when there are many."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.open_store.opened_store import OpenedStore

MAX_OPENED_STORES = 1024
"""Most tensordict stores that stay open without being used. Each takes a mapping and some ten kilobytes."""

KEPT_FRACTION = 0.75
"""Fraction of them that is kept when there are more, so that most stores are opened without looking at all."""


class OpenedStores:
    """The open stores by name.

    A tensordict store is closed when very many others were used since, and opened again with its next use. One that a
    request still holds is not closed, but found again, so that a store is never open twice.

    Args:
        max_stores: Most stores that stay open without being used.
    """

    def __init__(self, max_stores: int = MAX_OPENED_STORES) -> None:
        self._max_stores = self._look_at = max_stores
        self._kept: dict[str, OpenedStore] = {}
        self._held: WeakValueDictionary[str, OpenedStore] = WeakValueDictionary()
        self._unsynced: set[str] = set()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: str) -> bool:
        """Returns whether a store is open, which does not count as a use."""
        return name in self._kept or name in self._held

    def get(self, name: str) -> OpenedStore | None:
        """Returns a store if it is open."""
        store = self._kept.get(name)
        if store is None:
            store = self._held.pop(name, None)
            if store is None:
                return None
            self._kept[name] = store
        self._turn = store.used_at = self._turn + 1
        return store

    def put(self, store: OpenedStore) -> None:
        """Adds a store that was just opened."""
        if len(self._kept) >= self._look_at:
            self._close_unused()
        self._kept[store.name] = store
        self._turn = store.used_at = self._turn + 1

    def pop(self, name: str) -> OpenedStore | None:
        """Removes a store, open or not; returns it if it was open."""
        store, held = self._kept.pop(name, None), self._held.pop(name, None)
        return store or held

    def retire(self, name: str) -> OpenedStore | None:
        """Like ``pop``, for a store that is elsewhere now, or is opened again: nothing that is under way continues with
        this object."""
        store = self.pop(name)
        if store is not None:
            store.waiters.retire(name)
        return store

    def peek(self, name: str) -> OpenedStore | None:
        """Returns a store if it is open, which does not count as a use."""
        return self._kept.get(name) or self._held.get(name)

    def list_stores(self) -> list[OpenedStore]:
        """Returns those that stay open without being used, in no order; that does not count as a use either."""
        return list(self._kept.values())

    def list_names(self) -> list[str]:
        """Returns the names of those that are open."""
        return [*self._kept, *self._held]

    def take_unsynced(self) -> set[str]:
        """Returns the names of those that were closed, or came from elsewhere, since the last call, even if they are
        open again."""
        unsynced, self._unsynced = self._unsynced, set()
        return unsynced

    def add_unsynced(self, names: Iterable[str]) -> None:
        """Has the next pass sync stores that may not be open: they came from elsewhere, or the last pass failed."""
        self._unsynced.update(names)

    def _close_unused(self) -> None:
        unused = sorted(filter(_may_be_closed, self._kept.values()), key=lambda store: store.used_at)
        num_closed = max(len(unused) - int(KEPT_FRACTION * self._max_stores), 0)
        for store in unused[:num_closed]:
            del self._kept[store.name]
            self._held[store.name] = store
            self._unsynced.add(store.name)
        # Tables, which are never closed, may be so many that it would look at all of them each time.
        self._look_at = max(self._max_stores, len(self._kept) + self._max_stores // 4)


def _may_be_closed(store: OpenedStore) -> bool:
    """Returns whether all that is known of a store is in its files and the catalog."""
    is_used = store.record.loading or store.writes or store.lost or store.waiters.num_waiting
    return not (KINDS[store.record.kind].has_rules or is_used)
