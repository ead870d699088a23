"""The calls of a keyed store that a ``MutableMapping`` has besides: made of those that a handle has anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tdserve.base.errors import VersionConflictError
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.rules.kv.entry_changes import MAX_KEYS

READ_NBYTES = 16 * 1024 * 1024
"""Size of the entries that an iterator reads in one call: enough that the time of a call does not count."""

MAX_READ_KEYS = 1024
"""Entries that it reads in one call at most."""

_ABSENT: Any = object()
"""Stands for the value of an entry that is absent."""


@leave_modes_in_calls
class EntryIterator(Iterator[Any]):
    """An iterator over entries that exist, which it reads in batches. One thread at a time.

    Args:
        keys: Keys of entries, some of which may be deleted by the time they are read: they are left out.
        read: Reads entries by keys; ``_ABSENT`` stands for one that is absent.
        num_at_once: Keys in one call.
        has_keys: Whether each item is a key and a value, or the value alone.
    """

    def __init__(
        self, keys: Sequence[str], read: Callable[[Sequence[str]], list[Any]], num_at_once: int, *, has_keys: bool
    ) -> None:
        self._found = self._read(keys, read, num_at_once, has_keys)

    def __iter__(self) -> EntryIterator:
        return self

    def __next__(self) -> Any:
        return next(self._found)

    @staticmethod
    def _read(
        keys: Sequence[str], read: Callable[[Sequence[str]], list[Any]], num_at_once: int, has_keys: bool
    ) -> Iterator[Any]:
        for start in range(0, len(keys), num_at_once):
            some = keys[start : start + num_at_once]
            for key, value in zip(some, read(some), strict=True):
                if value is not _ABSENT:
                    yield (key, value) if has_keys else value


@leave_modes_in_calls
class EntryMapping:
    """The part of a keyed store's handle that a dict has too. Threads: safe."""

    if TYPE_CHECKING:
        keys: Callable[..., list[str]]
        get: Callable[..., Any]
        put: Callable[..., Any]
        delete: Callable[..., int]
        info: Callable[[], dict[str, Any]]
        _settle_puts: Callable[[], None]

    def items(self, prefix: str = "", *, select: Any = None, numpy: bool | None = None) -> EntryIterator:
        """Returns an iterator over keys and values, sorted by key, which reads many entries in each call.

        The keys are listed now; entries that are deleted before they are read are left out. Each batch is of one
        moment, and all of them are not: writers continue meanwhile.

        Args:
            prefix: Only entries whose keys begin with it.
            select, numpy: As in ``get``.

        Raises:
            KeyNotFoundError: While iterating: an entry lacks a key to select.
        """
        return self._iterate(prefix, select, numpy, has_keys=True)

    def values(self, prefix: str = "", *, select: Any = None, numpy: bool | None = None) -> EntryIterator:
        """Returns an iterator over values, sorted by key; arguments and errors as in ``items``."""
        return self._iterate(prefix, select, numpy, has_keys=False)

    def update(self, entries: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), /, **more: Any) -> None:
        """Puts entries, as ``dict.update`` takes them, by one ``put``: readers see all of them, or none.

        Raises:
            Errors as in ``put``: there are too many keys for one call, for example. Nothing was put.
        """
        found = dict(entries, **more)
        if found:
            self.put(list(found), list(found.values()))

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Returns the value of an entry; if it is absent, puts ``default``, unless another client is faster.

        Raises:
            Errors as in ``get`` and ``put``.
        """
        while (found := self.get(key, default=_ABSENT)) is _ABSENT:
            try:
                self.put(key, default, if_version=0)
            except VersionConflictError:  # another client has put it
                continue
            return default
        return found

    def clear(self) -> None:
        """Deletes the entries that are there when it begins, also those of earlier puts of this handle with an early
        return; in a call for each 16,384.

        Raises:
            DeadlineExceededError: There was no answer in time; such puts had none, for example.
        """
        self._settle_puts()  # the list of keys may overtake them
        keys = self.keys()
        for start in range(0, len(keys), MAX_KEYS):
            self.delete(keys[start : start + MAX_KEYS], missing_ok=True)

    def _iterate(self, prefix: str, select: Any, numpy: bool | None, *, has_keys: bool) -> EntryIterator:
        keys = self.keys(prefix)
        num_at_once = MAX_READ_KEYS
        if len(keys) > 1:
            info = self.info()
            entry_nbytes = info["nbytes"] / max(1, info["num_rows"])
            num_at_once = max(1, min(MAX_READ_KEYS, int(READ_NBYTES / max(1.0, entry_nbytes))))

        def read(some: Sequence[str]) -> list[Any]:
            found: list[Any] = self.get(some, select, default=_ABSENT, numpy=numpy)
            return found

        return EntryIterator(keys, read, num_at_once, has_keys=has_keys)
