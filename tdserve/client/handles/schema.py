"""The structure of a handle's store, which other clients may change, and the lock that prevents such changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from tdserve.base.errors import KeyNotFoundError, LockedError, SpecMismatchError, StructureChangedError
from tdserve.client.handles.schema_changes import alter
from tdserve.client.session.calls import SessionClient
from tdserve.structure.nodes import entry_of
from tdserve.structure.tree import Node, Path, Spec, show

if TYPE_CHECKING:
    from typing_extensions import Self

_Result = TypeVar("_Result")


class StructuredHandle:
    """A handle that caches the structure of its store, and asks the server for the newest where it matters.

    Threads: safe, except for the blocks of ``with handle.lock_()`` and ``unlock_()``, which one thread may use at a
        time.

    Attributes:
        name: Of the store.
        uid: Incarnation of the store, read together with ``spec``.
        spec: Its structure when this handle last read it.
    """

    _client: SessionClient
    name: str
    uid: str
    spec: Spec
    _undone_next: bool | None = None
    _undone_at_exits: tuple[bool | None, ...] = ()

    def refresh(self, *, timeout_s: float | None = None) -> bool:
        """Asks the server for the store's structure; returns whether it differs from the one in this handle.

        Raises:
            StoreNotFoundError: The store was deleted.
        """
        deadline = self._client.deadline(timeout_s)
        if self._client.catalog.fingerprint(self.name, timeout_s=deadline.remaining_s) == self.spec.fingerprint:
            return False
        description = self._client.catalog.describe_existing(self.name, deadline)
        vars(self).update(spec=description.spec, uid=description.uid)
        return True

    @property
    def is_locked(self) -> bool:
        """Whether the store's keys are locked for all clients; asks the server."""
        self.refresh()
        return self.spec.root.is_locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        self._set_lock(bool(value), None)

    def lock_(self, *, timeout_s: float | None = None) -> Self:
        """Locks the store's keys for all clients until ``unlock_``. Content can still be written in place.

        ``with store.lock_(): ...`` unlocks it at the end.
        """
        return self._set_lock(True, timeout_s)

    def unlock_(self, *, timeout_s: float | None = None) -> Self:
        """Unlocks the store's keys for all clients. ``with store.unlock_(): ...`` locks it again at the end."""
        return self._set_lock(False, timeout_s)

    def _set_lock(self, is_locked: bool, timeout_s: float | None) -> Self:
        self.refresh(timeout_s=timeout_s)
        was_changed = self.spec.with_locked(is_locked) != self.spec
        if was_changed:
            alter(self._client, self.name, is_locked=is_locked, deadline=self._client.deadline(timeout_s))
            self.refresh()
        self._undone_next = (not is_locked) if was_changed else None
        return self

    def __enter__(self) -> Self:
        """Enters ``with store.lock_():`` or ``with store.unlock_():``; the end of the block undoes the change."""
        self._undone_at_exits = (*self._undone_at_exits, self._undone_next)
        self._undone_next = None
        return self

    def __exit__(self, *_: object) -> None:
        *rest, undone = self._undone_at_exits
        self._undone_at_exits = tuple(rest)
        if undone is not None:
            self._set_lock(undone, None)

    def _check_unlocked(self, path: Path) -> None:
        """Raises LockedError if the node at ``path``, or one above it, is locked."""
        for depth in range(len(path) + 1):
            entry = entry_of(self.spec.root, path[:depth])
            if isinstance(entry, Node) and entry.is_locked:
                raise LockedError(store=self.name, key=show(path[:depth]) if depth else "")

    def _has(self, path: Path) -> bool:
        return entry_of(self.spec.root, path) is not None

    def _retry_on_new_structure(self, access: Callable[[], _Result], *, is_write: bool = False) -> _Result:
        """Performs an access, and repeats it once if it failed because the structure in this handle is out of date.

        A write is not repeated if another store has this name by now: the caller may not mean that one.
        """
        uid, spec = self.uid, self.spec
        try:
            return access()
        except (KeyNotFoundError, SpecMismatchError, LockedError):
            is_other = self.refresh() or self.spec is not spec  # the access itself may have refreshed it
            if not is_other or (is_write and self.uid != uid):
                raise
        return access()

    def _insist(self, access: Callable[[], _Result], timeout_s: float | None) -> _Result:
        """Repeats a write as ``_retry_on_new_structure`` does, until it succeeds; stops when time is up."""
        uid, deadline = self.uid, self._client.deadline(timeout_s)
        while True:
            try:
                return self._retry_on_new_structure(access, is_write=True)
            except StructureChangedError:
                if self.uid != uid or deadline.expired:
                    raise
                self.refresh()
