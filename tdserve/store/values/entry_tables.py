"""The entries of a keyed store, in tables of its environment of values (``objects``); records are opaque bytes here.

There are five tables, which other tools may read too; all numbers are big endian. ``entries`` has, by key, a header
(version, expiry in milliseconds since the epoch or 0, place in the order of eviction or 0; eight bytes each), the
record behind it, and a checksum (``sealed``), as the last two tables have. ``ages`` has the keys in the order of
eviction, by place. ``expiries`` has every key that will expire, behind its expiry. ``answers`` has the answers to
changes that control may not have on record, by client and request. ``counters`` has the counters of
``tdserve.rules.kv.entry_changes``, eight bytes each.

A change and its answer are one transaction, and so is a read: it is of one moment, and no writer waits for it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from tdserve.base.errors import CorruptDataError
from tdserve.base.failpoints import reach
from tdserve.rules.kv.entry_changes import ABSENT, LARGEST_BEGIN, Counters, Header
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.store.database.catalog_room import CatalogRoom
from tdserve.store.disk.sealed import SEAL_BYTES, is_whole, make_damage, seal, unseal
from tdserve.store.values.objects import Count, Objects
from tdserve.store.values.use_marks import UseMarks
from tdserve.values.value_columns import Buffer

_HEADER = struct.Struct(">QQQ")
_NUMBER = struct.Struct(">Q")
_RECORD = slice(_HEADER.size, -SEAL_BYTES)
_COUNTERS = b"counters"

TABLES = ("entries", "ages", "expiries", "answers", "counters")

DERIVED_TABLES = frozenset(("ages", "expiries", "counters"))
"""Those that follow from the entries."""

_EXPIRY_BYTES = 8

MAX_ROOM_PUTS = 64
"""Puts of one change for which room is made beforehand, as if each were in a page of its own. Many go into the same
pages; a change that needs more room is refused where the disk has none."""

STEP_AFTER_LOSS = 1 << 40
"""More entries than are put between two syncs."""


class FoundEntries(NamedTuple):
    """Entries as of one moment.

    Attributes:
        versions: Version of each entry; 0 for one that is absent.
        records: Record of each entry; b"" for one that is absent.
    """

    versions: list[int]
    records: list[bytes]


class EntryTables:
    """The tables of one store.

    Args:
        objects: The store's environment of values.
        tables: The handles of ``TABLES``.
        marks: Marks of use; None if there is no eviction, or this process may not set them.
    """

    def __init__(self, objects: Objects, tables: Sequence[Any], marks: UseMarks | None) -> None:
        self.objects = objects
        self._entries, self._ages, self._expiries, self._answers, self._counters = tables
        self._marks = marks
        self._room: CatalogRoom | None = None

    @classmethod
    def open(cls, objects: Objects, folder: Path) -> EntryTables | None:
        """Opens the tables, which the writer creates; None if it has not done so yet.

        Args:
            objects: The store's environment of values.
            folder: Folder of the store.
        """
        marks = UseMarks(folder) if UseMarks.exist(folder) else None
        tables = [objects.open_table(name) for name in reversed(TABLES)]  # a reader finds all once it finds the last
        return None if None in tables else cls(objects, tables[::-1], marks)

    def find(self, keys: Sequence[bytes], now_ms: int, *, count: Count | None = None) -> FoundEntries:
        """Returns the entries of some keys, and marks them as used; ``count`` as in ``Objects.get_many``."""
        versions: list[int] = []
        records: list[bytes] = []
        read_header = _HEADER.unpack_from
        try:
            with self.objects.begin_read() as txn:
                for key in keys:
                    content = txn.get(key, db=self._entries)
                    if count is not None:
                        count(len(content or b""))
                    if content is None:
                        versions.append(ABSENT)
                        records.append(b"")
                        continue
                    if not is_whole(key, content):
                        raise make_damage(key, content, self.objects.path)
                    version, expires_ms, _ = read_header(content)
                    is_there = not 0 < expires_ms <= now_ms
                    versions.append(version if is_there else ABSENT)
                    records.append(bytes(content[_RECORD]) if is_there else b"")
        except lmdb.Error:
            with self.objects.convert_faults():
                raise
        if self._marks is not None:
            for key in keys:
                self._marks.set(key)
        return FoundEntries(versions, records)

    def list_keys(self, prefix: bytes, after: bytes, limit: int, now_ms: int) -> list[bytes]:
        """Returns keys with a prefix, in the order of their bytes.

        Args:
            after: Only keys behind this one.
            limit: At most this many.
        """
        found: list[bytes] = []
        with self.objects.convert_faults(), self.objects.begin_read() as txn:
            for key, content in _iter_from(txn.cursor(db=self._entries), max(prefix, after)):
                if not key.startswith(prefix) or len(found) == limit:
                    break
                if key > after and not 0 < _HEADER.unpack_from(content)[1] <= now_ms:
                    found.append(key)
        return found

    def find_last_version(self) -> int:
        """Returns the highest version that was given. Raises CorruptDataError."""
        with self.objects.convert_faults(), self.objects.begin_read() as txn:
            return _read_counters(txn, self._counters, self._entries, self.objects.path).last_version

    def count(self, prefix: bytes, now_ms: int, *, max_expired: int | None = None) -> int:
        """Returns the number of entries with a prefix; without one that costs the same for any number.

        Args:
            max_expired: Counts further expired entries that were not dropped yet as if they were there.
        """
        if prefix:
            return len(self.list_keys(prefix, b"", -1, now_ms))
        with self.objects.convert_faults(), self.objects.begin_read() as txn:
            num_entries: int = txn.stat(self._entries)["entries"]
            end = _NUMBER.pack(now_ms + 1)
            for key, _ in islice(_iter_from(txn.cursor(db=self._expiries), b""), max_expired):
                if key >= end:
                    break
                num_entries -= 1
        return num_entries

    def list_answers(self) -> list[tuple[bytes, bytes]]:
        """Returns the requests (client and number) of which an answer is kept, with their answers."""
        with self.objects.convert_faults(), self.objects.begin_read() as txn:
            return [
                (bytes(request), bytes(unseal(request, content, self.objects.path)))
                for request, content in _iter_from(txn.cursor(db=self._answers), b"")
            ]

    def change(
        self,
        apply: Callable[[EntryChanges], bytes],
        settings: KeyedSettings,
        *,
        request: bytes,
        recorded: Sequence[bytes],
        num_puts: int,
        asked_bytes: int,
    ) -> bytes:
        """Changes entries and keeps the answer to the request, in one commit; returns the answer. If the request has an
        answer already, nothing is changed.

        Args:
            apply: Makes the changes and returns the answer; nothing is changed if it raises.
            settings: Settings of the store.
            request: Client and number of the request.
            recorded: Requests whose answers need not be kept any more.
            num_puts: Entries that are put; a change that only removes some may use the reserve of disk space.
            asked_bytes: Size of what is put.

        Raises:
            CapacityError: The map or the disk is full. Nothing was changed.
            Others: As raised by ``apply``. Nothing was changed.
        """
        answer = b""

        def change(txn: Any) -> None:
            nonlocal answer
            for done in recorded:
                txn.delete(done, db=self._answers)
            earlier = txn.get(request, db=self._answers)
            if earlier is not None:
                answer = bytes(unseal(request, earlier, self.objects.path))
                return
            tables = (self._entries, self._ages, self._expiries, self._counters)
            changes = EntryChanges(txn, settings, tables, self._marks, self.objects.path)
            answer = apply(changes)
            changes.save_counters()
            txn.put(request, seal(request, answer), db=self._answers)
            reach("put.changed")

        if self._room is None:
            tables = (self._entries, self._ages, self._expiries, self._answers, self._counters)
            self._room = self.objects.open_room(tables)
        self._room.take(min(num_puts, MAX_ROOM_PUTS) + 1, asked_bytes, uses_reserve=not num_puts)
        self.objects.commit(change, asked_bytes=asked_bytes)
        reach("put.committed")
        return answer


def skip_versions(folder: Path, *, max_bytes: int) -> None:
    """Skips more versions than any client can have seen since the last sync. Only while no other process writes.

    Args:
        folder: Folder of the environment; it may be missing.
        max_bytes: Size of its map.
    """
    if not Objects.exists(folder):
        return
    with Objects(folder, writable=True, max_bytes=max_bytes) as objects:
        table, entries = objects.open_table("counters"), objects.open_table("entries")

        def skip(txn: Any) -> None:
            before = _read_counters(txn, table, entries, objects.path)
            write_counters(txn, table, replace(before, last_version=_skip_lost(before.last_version)))

        objects.commit(skip, asked_bytes=0)
        objects.sync()


class EntryChanges:
    """The entries within one transaction, as ``tdserve.rules.kv.entry_changes`` changes them.

    Args:
        txn: The transaction.
        settings: Settings of the store.
        tables: Entries, ages, expiries and counters.
        marks: Marks of use; None without eviction.
        path: Where they lie, for messages.
    """

    def __init__(
        self, txn: Any, settings: KeyedSettings, tables: tuple[Any, Any, Any, Any], marks: UseMarks | None, path: str
    ) -> None:
        self._txn = txn
        self._entries, self._ages, self._expiries, self._counters = tables
        self._marks = marks
        self._counts_bytes = bool(settings.max_bytes)
        self.counters = _read_counters(txn, self._counters, self._entries, path)

    def save_counters(self) -> None:
        """Writes the counters; the last step of a change."""
        write_counters(self._txn, self._counters, self.counters)

    def find(self, key: bytes) -> Header | None:
        """Returns the header of an entry, expired or not. It is not compared with the checksum: a damaged entry may be
        replaced or removed."""
        content = self._txn.get(key, db=self._entries)
        if content is None:
            return None
        version, expires_ms, age = _HEADER.unpack_from(content)
        return Header(version, expires_ms, age, len(key) + len(content))

    def put(self, keys: Sequence[bytes], records: Sequence[Buffer], first: Header) -> None:
        """Puts entries, the last of equal keys."""
        version, expires_ms, age, _ = first
        pack = _HEADER.pack
        if not (age or expires_ms or self._counts_bytes):
            items = [
                (key, seal(key, pack(number, 0, 0) + record))
                for number, (key, record) in enumerate(zip(keys, records, strict=True), version)
            ]
            self._put_many(items, self._entries)
            return
        last = {key: number for number, key in enumerate(keys)}
        items = [
            (key, seal(key, pack(version + number, expires_ms, age + number if age else 0) + records[number]))
            for key, number in last.items()
        ]
        self._put_many(items, self._entries)
        if age:
            self._put_many([(_NUMBER.pack(age + number), key) for key, number in last.items()], self._ages)
        if expires_ms:
            self._put_many([(_NUMBER.pack(expires_ms) + key, b"") for key in last], self._expiries)
        if self._counts_bytes:
            self.counters.nbytes += sum(len(key) + len(content) for key, content in items)

    def drop(self, key: bytes, header: Header) -> None:
        """Removes an entry."""
        self._txn.delete(key, db=self._entries)
        if header.age:
            self._txn.delete(_NUMBER.pack(header.age), db=self._ages)
        if header.expires_ms:
            self._txn.delete(_NUMBER.pack(header.expires_ms) + key, db=self._expiries)
        if self._counts_bytes:
            self.counters.nbytes -= header.nbytes

    def renew(self, key: bytes, header: Header, age: int) -> None:
        """Gives an entry another place in the order of eviction."""
        record = self._txn.get(key, db=self._entries)
        content = _HEADER.pack(header.version, header.expires_ms, age) + record[_HEADER.size :]
        if is_whole(key, record):  # damage must stay visible
            content = seal(key, content[:-SEAL_BYTES])
        self._txn.put(key, content, db=self._entries)
        self._txn.delete(_NUMBER.pack(header.age), db=self._ages)
        self._txn.put(_NUMBER.pack(age), key, db=self._ages)

    def iter_oldest(self) -> Iterator[bytes]:
        """Yields all keys in the order of eviction."""
        at = b""
        while True:  # a cursor of its own for each step: entries are dropped and renewed meanwhile
            cursor = self._txn.cursor(db=self._ages)
            if not (cursor.set_range(at) if at else cursor.first()):
                return
            place, key = bytes(cursor.key()), bytes(cursor.value())
            at = _NUMBER.pack(_NUMBER.unpack(place)[0] + 1)
            yield key

    def iter_expired(self, now_ms: int) -> Iterator[bytes]:
        """Yields the keys of expired entries."""
        end, at = _NUMBER.pack(now_ms + 1), b""
        while True:
            cursor = self._txn.cursor(db=self._expiries)
            if not (cursor.set_range(at) if at else cursor.first()):
                return
            place = bytes(cursor.key())
            if place >= end:
                return
            at = place + b"\0"
            yield place[_EXPIRY_BYTES:]

    def take_mark(self, key: bytes) -> bool:
        """Returns whether an entry was read since the last call for it."""
        return self._marks is not None and self._marks.take(key)

    def _put_many(self, items: list[tuple[bytes, bytes]], table: Any) -> None:
        self._txn.cursor(db=table).putmulti(items)


def _read_counters(txn: Any, table: Any, entries: Any, path: str) -> Counters:
    record = txn.get(_COUNTERS, db=table)
    if record is not None:
        return Counters(*_HEADER.unpack(unseal(_COUNTERS, record, path)))
    num_entries = txn.stat(entries)["entries"]
    if num_entries:  # their versions must not be used again
        actual = "none; stop the server, and see `tdserve check`"
        raise CorruptDataError(path=path, expected=f"the counters of its {num_entries} entries", actual=actual)
    return Counters()


def write_derived(txn: Any, tables: Mapping[str, Any]) -> None:
    """Writes the derived tables, which are empty, from the entries.

    Args:
        tables: By name.
    """
    counters, ages, expiries = Counters(), list[tuple[bytes, bytes]](), list[bytes]()
    for key, content in txn.cursor(db=tables["entries"]):
        version, expires_ms, age = _HEADER.unpack_from(content)
        counters.last_version = max(counters.last_version, version)
        counters.last_age = max(counters.last_age, age)
        counters.nbytes += len(key) + len(content)
        if age:
            ages.append((_NUMBER.pack(age), bytes(key)))
        if expires_ms:
            expiries.append(_NUMBER.pack(expires_ms) + bytes(key))
    counters.last_version = _skip_lost(counters.last_version)
    # In their order, so that pages are full: in any other order they might not have room.
    txn.cursor(db=tables["ages"]).putmulti(sorted(ages))
    txn.cursor(db=tables["expiries"]).putmulti([(place, b"") for place in sorted(expiries)])
    write_counters(txn, tables["counters"], counters)


def _skip_lost(last_version: int) -> int:
    """Returns a version above any that clients may know, of the last known one; 0 if none is, not even the begin."""
    return max(last_version, LARGEST_BEGIN) + STEP_AFTER_LOSS


def write_counters(txn: Any, table: Any, counters: Counters) -> None:
    """Writes the counters of a store."""
    content = _HEADER.pack(counters.last_version, counters.last_age, counters.nbytes)
    txn.put(_COUNTERS, seal(_COUNTERS, content), db=table)


def _iter_from(cursor: Any, begin: bytes) -> Iterator[tuple[bytes, Any]]:
    """Yields keys and contents of a table from a key on."""
    more = cursor.set_range(begin) if begin else cursor.first()
    while more:
        yield bytes(cursor.key()), cursor.value()
        more = cursor.next()
