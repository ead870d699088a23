"""What a put or a removal does to the entries of a keyed store: versions, conditions, expiry, eviction.

The entries are in a transaction of the caller, which is dropped if a rule raises. Time is passed in, as milliseconds
since the epoch.

Each entry that is put gets the next number of the store's counter as its version. No number is used twice, so a version
never means two contents, not even of an entry that was removed and put again. The counter begins so that a condition
on a version of a store that was deleted and created again does not hold (``compute_begin``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tdserve.base.errors import (
    CapacityError,
    InvalidRequestError,
    KeyNotFoundError,
    TooLargeError,
    VersionConflictError,
)
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.values.value_columns import Buffer

MAX_KEY_BYTES = 500
"""LMDB takes keys of 511 bytes, and 8 of these go before a key in the order of expiry."""

MAX_KEYS = 16_384
"""Most keys of one call, whose message control's event loop handles at once, in a few milliseconds."""

OVERHEAD_BYTES = 28
"""What an entry counts for beside its key and its record: the size of its header and its checksum."""

MAX_EXPIRED_AT_ONCE = 64
"""Most expired entries that one change drops, unless it needs their room."""

MAX_RENEWED_AT_ONCE = 10_000
"""Most entries that one change passes over: readers may continue marking them."""

ABSENT = 0
"""The version of an entry that is not there."""


LARGEST_BEGIN = (1 << 52) - 1


def compute_begin(uid: str, *, former_version: int, num_shards: int) -> int:
    """Returns the number that the versions of a store's entries follow.

    Those of a store of one server follow the last version of the former store of its name. Parts of a shared store may
    be on other servers than before, which know nothing of that: theirs begin at a number of the incarnation, at most
    ``LARGEST_BEGIN``.

    Args:
        uid: Incarnation of the store.
        former_version: The last version of earlier stores of its name at this server.
        num_shards: Number of parts of a shared store; 0 for a store of one server.
    """
    return int(uid[:13], 16) if num_shards else former_version


class Header(NamedTuple):
    """What a store keeps about an entry.

    Attributes:
        version: Its version.
        expires_ms: When it is gone; 0: never.
        age: Its place in the order of eviction; lower ones go first.
        nbytes: What it counts for.
    """

    version: int
    expires_ms: int
    age: int
    nbytes: int

    def is_expired(self, now_ms: int) -> bool:
        """Whether the entry is gone, though it was not dropped yet."""
        return 0 < self.expires_ms <= now_ms


@dataclass
class Counters:
    """Counters of a store.

    Attributes:
        last_version: The newest version.
        last_age: The newest place in the order of eviction.
        nbytes: What all entries count for; only where a limit needs it.
    """

    last_version: int = 0
    last_age: int = 0
    nbytes: int = 0


class Entries(Protocol):
    """The entries of a store, within a transaction."""

    counters: Counters

    def find(self, key: bytes) -> Header | None:
        """Returns the header of an entry, expired or not."""

    def put(self, keys: Sequence[bytes], records: Sequence[Buffer], first: Header) -> None:
        """Puts entries, the last of equal keys; versions and ages (if any) count upwards from those of ``first``.
        Nothing is left of what they replace (``drop`` is called for it where a setting needs that)."""

    def drop(self, key: bytes, header: Header) -> None:
        """Removes an entry."""

    def renew(self, key: bytes, header: Header, age: int) -> None:
        """Gives an entry another place in the order of eviction."""

    def iter_oldest(self) -> Iterator[bytes]:
        """Yields all keys in the order of eviction. Entries may be dropped and renewed meanwhile."""

    def iter_expired(self, now_ms: int) -> Iterator[bytes]:
        """Yields the keys of expired entries. These may be dropped meanwhile."""

    def take_mark(self, key: bytes) -> bool:
        """Returns whether an entry was read since the last call for it; some others count as read too."""


def put_entries(
    entries: Entries,
    settings: KeyedSettings,
    keys: Sequence[bytes],
    records: Sequence[Buffer],
    if_versions: Sequence[int],
    *,
    begin: int = 0,
    now_ms: int,
    store: str,
) -> int:
    """Puts entries; returns the version of the first one. Those of the others follow.

    Args:
        if_versions: The versions that the entries must have, in the order of the keys; empty: any.
        begin: Number that the versions of the store follow, the result of ``compute_begin``.
        store: Name, for errors.

    Raises:
        VersionConflictError: An entry has another version.
        TooLargeError, CapacityError: There is no room.
        InvalidRequestError: A key is invalid, or a condition is given for a key that occurs twice.
    """
    check_keys(keys, if_versions)
    counters = entries.counters
    expires_ms = now_ms + max(round(settings.ttl_s * 1000), 1) if settings.ttl_s else 0
    is_lru = settings.eviction == "lru"
    if not settings.is_plain or if_versions:
        found = {key: entries.find(key) for key in keys}
        _check_versions(found, keys, if_versions, now_ms, store)
        if not settings.is_plain:
            for key, header in found.items():
                if header is not None:
                    entries.drop(key, header)
        if settings.ttl_s:
            _drop_expired(entries, now_ms, MAX_EXPIRED_AT_ONCE)
        if settings.max_bytes:
            sizes = {key: OVERHEAD_BYTES + len(key) + len(record) for key, record in zip(keys, records, strict=True)}
            _make_room(entries, settings, sum(sizes.values()), now_ms=now_ms, store=store)
    counters.last_version = max(counters.last_version, begin)
    first = Header(counters.last_version + 1, expires_ms, counters.last_age + 1 if is_lru else 0, 0)
    counters.last_version += len(keys)
    counters.last_age += len(keys) if is_lru else 0
    entries.put(keys, records, first)
    return first.version


def remove_entries(
    entries: Entries,
    settings: KeyedSettings,
    keys: Sequence[bytes],
    if_versions: Sequence[int],
    *,
    skips_missing: bool,
    now_ms: int,
    store: str,
) -> int:
    """Removes entries; returns how many there were.

    Args:
        if_versions: As in ``put_entries``.
        skips_missing: Whether keys may be absent.

    Raises:
        VersionConflictError: An entry has another version.
        KeyNotFoundError: A key is absent.
    """
    check_keys(keys, if_versions)
    found = {key: entries.find(key) for key in keys}
    _check_versions(found, keys, if_versions, now_ms, store)
    num_removed = 0
    for key, header in found.items():
        is_there = header is not None and not header.is_expired(now_ms)
        if not (is_there or skips_missing):
            raise make_missing_error(store, key)
        num_removed += is_there
        if header is not None:
            entries.drop(key, header)
    if settings.ttl_s:
        _drop_expired(entries, now_ms, MAX_EXPIRED_AT_ONCE)
    return num_removed


def check_keys(keys: Sequence[bytes], if_versions: Sequence[int]) -> None:
    """Checks the keys of a change.

    Raises:
        InvalidRequestError: There is none, one is empty or too long, or the conditions are not one per key.
    """
    if not keys or not all(keys) or max(map(len, keys)) > MAX_KEY_BYTES:
        raise InvalidRequestError(argument="keys", reason=f"each must have 1 to {MAX_KEY_BYTES} bytes in UTF-8")
    if if_versions and (len(if_versions) != len(keys) or len(set(keys)) != len(keys)):
        reason = "it must be one number per key, and each key must occur once"
        raise InvalidRequestError(argument="if_version", reason=reason)


def check_num_keys(keys: Sized) -> None:
    """Raises InvalidRequestError if one call has too many keys."""
    if len(keys) > MAX_KEYS:
        raise InvalidRequestError(argument="keys", reason=f"{len(keys)} in one call, at most {MAX_KEYS} are allowed")


def make_missing_error(store: str, key: bytes) -> KeyNotFoundError:
    """Returns the error for an entry that is absent."""
    return KeyNotFoundError(store=store, key=show_key(key), listing=f"client.kv({store!r}).keys()")


def show_key(key: bytes) -> str:
    """Returns a key as errors show it."""
    return key.decode(errors="replace")


def _check_versions(
    found: dict[bytes, Header | None], keys: Sequence[bytes], if_versions: Sequence[int], now_ms: int, store: str
) -> None:
    for key, expected in zip(keys, if_versions, strict=False):
        header = found[key]
        actual = ABSENT if header is None or header.is_expired(now_ms) else header.version
        if actual != expected:
            raise VersionConflictError(store=store, key=show_key(key), expected=expected, actual=actual)


def _drop_expired(entries: Entries, now_ms: int, max_num: int | None = None) -> None:
    for number, key in enumerate(entries.iter_expired(now_ms)):
        if number == max_num:
            return
        header = entries.find(key)
        if header is not None:
            entries.drop(key, header)


def _make_room(entries: Entries, settings: KeyedSettings, nbytes: int, *, now_ms: int, store: str) -> None:
    """Drops entries until there is room; second chance, an approximation of the order of last use: an entry that was
    read since it was looked at last goes to the end of the order."""
    counters, max_bytes = entries.counters, settings.max_bytes
    what = f"entries of keyed store {store!r} (max_bytes={max_bytes})"
    if nbytes > max_bytes:
        raise TooLargeError(what=what, asked=nbytes, free=max_bytes)
    if counters.nbytes + nbytes > max_bytes:
        _drop_expired(entries, now_ms)
    if counters.nbytes + nbytes <= max_bytes:
        return
    if settings.eviction == "none":
        raise CapacityError(what=what, asked=nbytes, free=max_bytes - counters.nbytes)
    num_renewed = 0
    for key in entries.iter_oldest():
        header = entries.find(key)
        if header is None:
            continue
        if num_renewed < MAX_RENEWED_AT_ONCE and entries.take_mark(key):
            num_renewed += 1
            counters.last_age += 1
            entries.renew(key, header, counters.last_age)
            continue
        entries.drop(key, header)
        if counters.nbytes + nbytes <= max_bytes:
            return
