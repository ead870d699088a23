"""Entries in LMDB."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tdserve.base.errors import CapacityError, CorruptDataError, VersionConflictError
from tdserve.rules.kv.entry_changes import LARGEST_BEGIN, Entries, put_entries, remove_entries
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.store.values.entry_tables import STEP_AFTER_LOSS, EntryTables, skip_versions
from tdserve.store.values.objects import Objects
from tdserve.store.values.use_marks import UseMarks

_numbers = itertools.count(1)

PLAIN = KeyedSettings()


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[Objects]:
    """An environment whose writer this is."""
    with Objects(tmp_path / "objects", writable=True, max_bytes=1 << 24) as made:
        yield made


@pytest.fixture
def tables(objects: Objects, tmp_path: Path) -> EntryTables:
    """The tables of a store."""
    found = EntryTables.open(objects, tmp_path)
    assert found is not None
    return found


def change(tables: EntryTables, apply: Callable[[Any], bytes], settings: KeyedSettings = PLAIN, **how: Any) -> bytes:
    """Makes a change as a new request."""
    given = {
        "request": bytes(16) + next(_numbers).to_bytes(8, "big"),
        "recorded": (),
        "num_puts": 1,
        "asked_bytes": 0,
        **how,
    }
    return tables.change(apply, settings, **given)


def put(tables: EntryTables, keys: list[bytes], *, now_ms: int = 0, settings: KeyedSettings = PLAIN, **how: Any) -> int:
    """Puts entries whose record is their key; returns the first version."""
    if_versions, records = how.pop("if_versions", []), how.pop("records", keys)

    def apply(entries: Entries) -> bytes:
        version = put_entries(entries, settings, keys, records, if_versions, now_ms=now_ms, store="s")
        return str(version).encode()

    return int(change(tables, apply, settings, **how))


def remove(tables: EntryTables, keys: list[bytes], settings: KeyedSettings = PLAIN) -> int:
    """Removes entries; returns how many there were."""

    def apply(entries: Entries) -> bytes:
        num_removed = remove_entries(entries, settings, keys, [], skips_missing=True, now_ms=0, store="s")
        return str(num_removed).encode()

    return int(change(tables, apply, settings))


def test_find_when_put_then_found_with_its_version(tables: EntryTables) -> None:
    assert put(tables, [b"b", b"a", b"a"]) == 1
    assert tables.find([b"a", b"x", b"b"], 0) == ([3, 0, 1], [b"a", b"", b"b"])
    assert put(tables, [b"b"], if_versions=[1]) == 4
    with pytest.raises(VersionConflictError):
        put(tables, [b"c", b"b"], if_versions=[0, 1])
    assert tables.list_keys(b"", b"", -1, 0) == [b"a", b"b"]
    assert remove(tables, [b"a", b"c"]) == 1
    assert (tables.count(b"", 0), put(tables, [b"a"])) == (1, 5)


def test_change_when_repeated_then_answered_and_not_made_again(tables: EntryTables) -> None:
    request = bytes(24)
    assert put(tables, [b"a"], request=request) == 1
    assert put(tables, [b"a"], request=request) == 1
    assert tables.find([b"a"], 0).versions == [1]
    assert put(tables, [b"b"], recorded=[request]) == 2
    assert put(tables, [b"a"], request=request) == 3, "an answer that is on record elsewhere was kept"


def test_list_keys_when_many_then_in_pages_by_prefix(tables: EntryTables) -> None:
    keys = [f"{number:03}".encode() for number in range(200)]
    put(tables, keys)
    assert tables.list_keys(b"", b"", 10, 0) == keys[:10]
    assert tables.list_keys(b"", keys[9], 10, 0) == keys[10:20]
    assert tables.list_keys(b"01", b"", -1, 0) == keys[10:20]
    assert tables.list_keys(b"01", keys[15], -1, 0) == keys[16:20]
    assert (tables.count(b"", 0), tables.count(b"01", 0), tables.count(b"x", 0)) == (200, 10, 0)


def test_entries_when_expired_then_gone_before_they_are_dropped(tables: EntryTables) -> None:
    settings = KeyedSettings(ttl_s=0.01)
    put(tables, [b"a", b"b"], settings=settings)
    assert tables.find([b"a"], 9).versions == [1]
    assert tables.find([b"a"], 10) == ([0], [b""])
    assert (tables.count(b"", 9), tables.count(b"", 10), tables.list_keys(b"", b"", -1, 10)) == (2, 0, [])
    put(tables, [b"a"], now_ms=10, settings=settings)
    assert tables.find([b"a", b"b"], 0).versions == [3, 0], "an expired entry was not dropped"
    put(tables, [b"a"], now_ms=15, settings=settings)
    assert tables.find([b"a"], 24).versions == [4], "the time of an earlier put counted"


def test_put_when_lru_then_unused_entries_make_room(objects: Objects, tmp_path: Path) -> None:
    UseMarks(tmp_path, creates=True)
    tables, settings = EntryTables.open(objects, tmp_path), KeyedSettings(max_bytes=10_000, eviction="lru")
    assert tables is not None
    for number in range(100):
        put(tables, [str(number).encode()], records=[bytes(900)], settings=settings)
        assert tables.find([b"0"], 0).records == [bytes(900)]
    found = tables.list_keys(b"", b"", -1, 0)
    assert len(found) == 10
    assert b"99" in found


def test_put_when_the_map_is_full_then_refused_and_nothing_changes(tables: EntryTables) -> None:
    put(tables, [b"a"])
    with pytest.raises(CapacityError):
        put(tables, [b"b", b"a"], records=[bytes(1 << 23), bytes(1 << 24)])
    assert tables.find([b"a", b"b"], 0).versions == [1, 0]
    for _ in range(20):  # overwritten content makes room
        put(tables, [b"a"], records=[bytes(1 << 21)])


def test_open_when_nothing_was_put_then_a_reader_finds_nothing(tmp_path: Path) -> None:
    with Objects(tmp_path / "objects", writable=True, max_bytes=1 << 24):
        pass
    with Objects(tmp_path / "objects") as objects:
        assert EntryTables.open(objects, tmp_path) is None


def test_counts_of_bytes_when_entries_are_there_then_they_count(tables: EntryTables, objects: Objects) -> None:
    free = objects.free_bytes()
    put(tables, [b"a"], records=[bytes(1 << 20)])
    assert free - objects.free_bytes() >= 1 << 20


def test_put_when_the_counters_are_missing_then_refused_unless_there_are_no_entries(
    tables: EntryTables, objects: Objects
) -> None:
    assert put(tables, [b"a"]) == 1
    counters = objects.open_table("counters")
    objects.commit(lambda txn: txn.drop(counters, delete=False), asked_bytes=0)
    with pytest.raises(CorruptDataError, match=r"counters of its 1 entries.*`tdserve check`"):
        put(tables, [b"a"])
    entries = objects.open_table("entries")
    objects.commit(lambda txn: txn.drop(entries, delete=False), asked_bytes=0)
    assert put(tables, [b"a"]) == 1


def test_skip_versions_when_after_a_loss_then_none_is_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    skip_versions(folder, max_bytes=1 << 24)
    last = 0
    for _ in range(3):
        with Objects(folder, writable=True, max_bytes=1 << 24) as objects:
            tables = EntryTables.open(objects, tmp_path)
            assert tables is not None
            version = put(tables, [b"a"])
        assert version > last
        last = max(version, LARGEST_BEGIN) + STEP_AFTER_LOSS  # even if not a single version was synced
        skip_versions(folder, max_bytes=1 << 24)
