"""Stores that sessions fill for the first time: invisible to all others, and gone with their session."""

from __future__ import annotations

from tdserve.base.errors import StoreNotFoundError
from tdserve.server.catalog.opened_stores import OpenedStores
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.structure.trees.tree import Spec


class LoadingStores:
    """The stores that sessions fill, by session.

    Args:
        opened: All open stores; one that is being filled is open.
    """

    def __init__(self, opened: OpenedStores) -> None:
        self._opened = opened
        self._names: dict[int, set[str]] = {}

    def add(self, name: str, session: int) -> None:
        """Adds a store, whose files may still be made."""
        self._names.setdefault(session, set()).add(name)

    def discard(self, name: str, session: int) -> None:
        """Removes a store that is visible now, or gone."""
        names = self._names.get(session, set())
        names.discard(name)
        if not names:
            self._names.pop(session, None)

    def get(self, name: str, session: int) -> OpenedStore:
        """Returns a store that this session is still filling. Raises StoreNotFoundError."""
        store = self._find(name, session)
        if store is None:
            raise StoreNotFoundError(name=name)
        return store

    def find_hidden(self, name: str, session: int) -> OpenedStore | None:
        """Returns the store of this name that this session fills by several writes."""
        store = self._find(name, session)
        return store if store is not None and store.is_hidden else None

    def _find(self, name: str, session: int) -> OpenedStore | None:
        store = self._opened.get(name)
        is_own = store is not None and store.record.loading and store.owner_session == session
        return store if is_own else None

    def is_begun(self, name: str, session: int, spec: Spec) -> bool:
        """Returns whether this session has begun to fill a store with this name and structure by a single write."""
        store = self._find(name, session)
        return store is not None and store.spec.fingerprint == spec.fingerprint and not store.is_hidden

    def is_being_filled(self, name: str, session: int) -> bool:
        """Returns whether a request of this session is now filling a store of this name."""
        store = self._find(name, session)
        return store is not None and store.is_filling

    def list_of(self, session: int) -> list[OpenedStore]:
        """Returns the stores that this session fills, without those whose files are being made."""
        return list(filter(None, map(self._opened.get, sorted(self._names.get(session, ())))))

    def find_loader(self, name: str) -> int:
        """Returns the session that fills a store of this name; 0 if none does."""
        return next((session for session, names in self._names.items() if session > 0 and name in names), 0)
