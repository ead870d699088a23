"""The calls of a keyed store, which one server has, or several share: those of a ``MutableMapping``, and versions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from tdserve.base.errors import InvalidRequestError, VersionConflictError
from tdserve.client.content.fake_modes import check_real
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.handles.key_paths import NO_DEFAULT
from tdserve.client.kv.filled_places import check_out, fill_out
from tdserve.client.kv.key_arguments import Keys, encode_key, list_keys, list_versions, settle_keys
from tdserve.rules.kv.entry_changes import MAX_KEY_BYTES, MAX_KEYS
from tdserve.rules.kv.keyed_settings import KeyedSettings

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
class EntryMapping(ABC):
    """The calls of a keyed store; its handle has the steps that differ between one server and several. Threads:
    safe."""

    name: str
    """Name of the store."""
    settings: KeyedSettings
    """What an entry is, and which entries make room."""

    if TYPE_CHECKING:

        def info(self) -> dict[str, Any]: ...

    # ------------------------------------------------------------ changes

    def put(
        self,
        keys: str | Sequence[str],
        values: Any,
        if_version: int | Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Puts entries; existing ones are replaced. Readers see all of them, or none.

        Args:
            keys: One key, or several; each a str of 1 to 500 bytes in UTF-8.
            values: One value, or as many as keys: a list of values, or the rows of a tensordict or tensor. If the store
                has a structure, a dict of arrays stands for a tensordict, and an array for a tensor. Otherwise a dict
                comes back as a tensordict if there is a tensor in it, and else as a dict; what is in it beside tensors
                and arrays comes back as it was. Tensors in lists are refused.
            if_version: Nothing is put unless the entry has this version, 0 if it must be absent; one per key, or one
                for all.
            return_early: True returns a future at once; ``values`` may change afterwards. Puts and deletions of one
                handle are carried out in the order of the calls. Reads may overtake them: wait for the future.

        Returns:
            The version of the entry, or a list of one per key, or a future of that. Versions of a store grow, and none
            is used twice, nor by a store that is deleted and created again.

        Raises:
            VersionConflictError: An entry has another version. Nothing was put.
            SpecMismatchError, NotSupportedError: A value does not fit, or cannot be stored. Nothing was put.
            CapacityError: There is no room. Nothing was put.
            DeadlineExceededError: There was no answer in time, and it is unknown whether anything was put.
        """
        check_real("writing to a keyed store")
        if not isinstance(keys, str):
            keys = list_keys(keys)
        num_keys = 1 if isinstance(keys, str) else len(keys)
        expected = None if if_version is None else list_versions(if_version, num_keys)
        return self._put(keys, values, expected, timeout_s, return_early)

    @abstractmethod
    def _put(
        self, keys: Keys, values: Any, expected: list[int] | None, timeout_s: float | None, return_early: bool
    ) -> Any:
        """Puts entries.

        Args:
            expected: The version that each entry must have; None: any.
        """

    def delete(
        self,
        keys: str | Sequence[str],
        if_version: int | Sequence[int] | None = None,
        *,
        missing_ok: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Deletes entries, all or none; returns how many there were. They are not read any more when it returns.

        Args:
            if_version: As in ``put``.
            missing_ok: Whether keys may be absent.

        Raises:
            KeyNotFoundError: A key is absent. Nothing was deleted.
            VersionConflictError: An entry has another version. Nothing was deleted.
            DeadlineExceededError: There was no answer in time, and it is unknown whether anything was deleted; or puts
                with an early return, made before by this handle, had none, and nothing was.
        """
        names = [keys] if isinstance(keys, str) else list_keys(keys)
        expected = None if if_version is None else list_versions(if_version, len(names))
        return self._delete(names, expected, missing_ok, timeout_s) if names else 0

    @abstractmethod
    def _delete(self, keys: list[str], expected: list[int] | None, missing_ok: bool, timeout_s: float | None) -> int:
        """Deletes entries; ``expected`` as for ``_put``."""

    def pop(
        self,
        keys: str | Sequence[str],
        default: Any = NO_DEFAULT,
        *,
        timeout_s: float | None = 0,
        select: Any = None,
        numpy: bool | None = None,
    ) -> Any:
        """Returns entries as ``get`` does, and deletes them, all or none. Of several callers one gets an entry.

        The content is here before anything is deleted, so nothing is lost if the call is retried in between. Arguments
        as in ``get``; with ``default`` absent keys are no error.

        Raises:
            KeyNotFoundError: As in ``get``. Nothing was deleted.
            DeadlineExceededError: A key was absent all the time, or puts with an early return, made before by this
                handle, had no answer. Nothing was deleted.
            UnansweredPopError: There was no answer to the deletion in time (within the client's timeout, if the
                timeout is 0), and it is unknown whether the entries were deleted. ``values`` of the error is what would
                have been returned.
        """
        return self._pop(settle_keys(keys), default, timeout_s, select, numpy)

    @abstractmethod
    def _pop(self, keys: Keys, default: Any, timeout_s: float | None, select: Any, numpy: bool | None) -> Any:
        """Returns entries, and deletes them."""

    @abstractmethod
    def _settle_puts(self) -> None:
        """Waits until the puts that were made before have ended, also those that fail."""

    # ------------------------------------------------------------ reads

    def get(
        self,
        keys: str | Sequence[str],
        select: Any = None,
        timeout_s: float | None = 0,
        *,
        default: Any = NO_DEFAULT,
        numpy: bool | None = None,
        out: Any = None,
    ) -> Any:
        """Returns entries, as of one moment.

        Args:
            keys: One key, or several.
            select: Keys of the entries, which are tensordicts: only these leaves or parts are returned.
            timeout_s: Seconds to wait for keys that are absent, and for the server; None is the client's timeout. 0
                does not wait for keys, but still for a server that is away, as long as the client's timeout: a read
                continues through a restart.
            default: Returned in place of each entry that is absent, by a call that does not wait. Several keys then
                give a list, also if the store has a structure.
            numpy: True returns tensors as NumPy arrays, and tensordicts as dicts of them, which share the memory of
                what was received, unless there is ``out``; None is the client's setting.
            out: A tensordict that is filled in place and returned, on any device, or a tensor where entries are
                tensors. It has the structure of what would be returned without it. Several keys need a store with a
                structure.

        Returns:
            The value of one key; of several one stacked tensordict or tensor if the store has a structure, else a list.

        Raises:
            KeyNotFoundError: A key is absent, and the timeout is 0; or there is nothing to select. Nothing was written
                to ``out``, as after any other error.
            DeadlineExceededError: A key was absent all the time.
            SpecMismatchError: ``out`` does not fit.
            InvalidRequestError: ``out`` is given with a ``default``, or the entry is neither tensor nor tensordict.
        """
        keys = settle_keys(keys)
        if out is None:
            return self._get(keys, select, timeout_s, default, numpy)
        check_out(out, keys, default, self.settings, store=self.name)
        return self._get_into(out, keys, select, timeout_s)

    @abstractmethod
    def _get(self, keys: Keys, select: Any, timeout_s: float | None, default: Any, numpy: bool | None) -> Any:
        """Returns entries."""

    def _get_into(self, out: Any, keys: Keys, select: Any, timeout_s: float | None) -> Any:
        """Fills the caller's place with entries."""
        return fill_out(out, self._get(keys, select, timeout_s, NO_DEFAULT, False), store=self.name)

    def get_with_versions(
        self,
        keys: str | Sequence[str],
        select: Any = None,
        timeout_s: float | None = 0,
        *,
        numpy: bool | None = None,
    ) -> tuple[Any, Any]:
        """Returns what ``get`` returns, and the version of each entry: to put it back if it was not changed since.

        Of one key a value and a version, of several the values and a list of versions.
        """
        return self._get_with_versions(settle_keys(keys), select, timeout_s, numpy)

    @abstractmethod
    def _get_with_versions(
        self, keys: Keys, select: Any, timeout_s: float | None, numpy: bool | None
    ) -> tuple[Any, Any]:
        """Returns entries and their versions."""

    def versions(self, keys: str | Sequence[str]) -> Any:
        """Returns the version of an entry, or of each of several; 0 if it is absent."""
        found = self._ask_versions([keys] if isinstance(keys, str) else list_keys(keys))
        return found[0] if isinstance(keys, str) else found

    @abstractmethod
    def _ask_versions(self, keys: list[str]) -> Sequence[int]:
        """Returns the version of each entry, 0 for one that is absent."""

    def keys(self, prefix: str = "") -> list[str]:
        """Lists the keys that begin with a prefix, sorted by code point. Of very many, each page is of one moment."""
        if not isinstance(prefix, str):
            raise InvalidRequestError(argument="prefix", reason=f"{prefix!r} is not a str")
        if len(prefix.encode(errors="replace")) > MAX_KEY_BYTES:
            return []  # no key is as long
        return self._list_keys(prefix)

    @abstractmethod
    def _list_keys(self, prefix: str) -> list[str]:
        """Returns the keys that begin with a prefix, in order."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        try:
            encode_key(key)
        except InvalidRequestError:  # no entry can have it
            return False
        return bool(self._ask_versions([cast("str", key)])[0])

    def __getitem__(self, key: str | Sequence[str]) -> Any:
        return self.get(key)

    def __setitem__(self, key: str | Sequence[str], value: Any) -> None:
        self.put(key, value)

    def __delitem__(self, key: str | Sequence[str]) -> None:
        self.delete(key)

    # ------------------------------------------------------------ made of these

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
