"""Changes of entries, against a model: a dict that forgets only what the rules drop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tdserve.base.errors import (
    CapacityError,
    InvalidRequestError,
    KeyNotFoundError,
    TDServeError,
    TooLargeError,
    VersionConflictError,
)
from tdserve.rules.kv.entry_changes import (
    MAX_KEY_BYTES,
    MAX_KEYS,
    OVERHEAD_BYTES,
    Counters,
    Header,
    check_keys,
    check_num_keys,
    put_entries,
    remove_entries,
)
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.values.value_columns import Buffer

KEYS = [b"a", b"b", b"c", b"d"]
RECORD = bytes(100 - OVERHEAD_BYTES - 1)
"""With a key of one byte an entry counts for 100."""


class MemoryEntries:
    """Entries in dicts. A failed change leaves them changed: the caller copies them before, as a transaction does."""

    def __init__(self, settings: KeyedSettings) -> None:
        self.settings = settings
        self.counters = Counters()
        self.headers: dict[bytes, Header] = {}
        self.records: dict[bytes, bytes] = {}
        self.marks: set[bytes] = set()

    def copy(self) -> MemoryEntries:
        made = MemoryEntries(self.settings)
        made.counters = Counters(**vars(self.counters))
        made.headers, made.records, made.marks = dict(self.headers), dict(self.records), self.marks
        return made

    def find(self, key: bytes) -> Header | None:
        return self.headers.get(key)

    def put(self, keys: Sequence[bytes], records: Sequence[Buffer], first: Header) -> None:
        for number, (key, record) in enumerate(zip(keys, records, strict=True)):
            if self.settings.max_bytes and key in self.headers:
                self.drop(key, self.headers[key])
            nbytes = OVERHEAD_BYTES + len(key) + len(record)
            age = first.age + number if first.age else 0
            self.headers[key] = Header(first.version + number, first.expires_ms, age, nbytes)
            self.records[key] = bytes(record)
            self.counters.nbytes += nbytes if self.settings.max_bytes else 0

    def drop(self, key: bytes, header: Header) -> None:
        assert self.headers.pop(key) == header
        del self.records[key]
        self.counters.nbytes -= header.nbytes if self.settings.max_bytes else 0

    def renew(self, key: bytes, header: Header, age: int) -> None:
        assert self.headers[key] == header
        self.headers[key] = header._replace(age=age)

    def iter_oldest(self) -> Iterator[bytes]:
        at = -1
        while left := sorted((each.age, key) for key, each in self.headers.items() if each.age > at):
            at, key = left[0]
            yield key

    def iter_expired(self, now_ms: int) -> Iterator[bytes]:
        yield from [key for key, each in self.headers.items() if each.is_expired(now_ms)]

    def take_mark(self, key: bytes) -> bool:
        is_set = key in self.marks
        self.marks.discard(key)
        return is_set


def put(entries: MemoryEntries, keys: list[bytes], now_ms: int = 0, **more: Any) -> int:
    """Puts entries of the usual size."""
    arguments = {"records": [RECORD] * len(keys), "if_versions": [], **more}
    return put_entries(entries, entries.settings, keys, now_ms=now_ms, store="s", **arguments)


def remove(entries: MemoryEntries, keys: list[bytes], now_ms: int = 0, **more: Any) -> int:
    """Removes entries."""
    arguments = {"if_versions": [], "skips_missing": False, **more}
    return remove_entries(entries, entries.settings, keys, now_ms=now_ms, store="s", **arguments)


SETTINGS = [
    KeyedSettings(),
    KeyedSettings(ttl_s=0.01),
    KeyedSettings(max_bytes=250),
    KeyedSettings(max_bytes=250, ttl_s=0.01),
    KeyedSettings(max_bytes=250, eviction="lru"),
    KeyedSettings(max_bytes=250, eviction="lru", ttl_s=0.01),
]

CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["put", "put if", "remove", "read"]),
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        st.integers(0, 8),
    ),
    max_size=30,
)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=KeyedSettings.to_json)
@given(changes=CHANGES)
def test_changes_when_in_any_order_then_as_of_the_model(
    settings: KeyedSettings, changes: list[tuple[str, list[bytes], int]]
) -> None:
    entries, model, now_ms, seen = MemoryEntries(settings), dict[bytes, tuple[int, int]](), 1, set[int]()
    for kind, keys, step in changes:
        now_ms += step
        model = {key: (version, end) for key, (version, end) in model.items() if now_ms < end}
        if kind == "read":
            entries.marks.update(keys)
            continue
        changed = entries.copy()
        wanted: list[int] = []
        versions = [model.get(key, (0, 0))[0] for key in keys]
        try:
            if kind == "remove":
                assert remove(changed, keys, now_ms) == len(keys)
                assert all(versions)
                model = {key: each for key, each in model.items() if key not in keys}
            else:
                wanted = [*versions[:-1], versions[-1] + step % 2]
                first = put(changed, keys, now_ms, if_versions=wanted if kind == "put if" else [])
                assert kind == "put" or wanted == versions
                end = now_ms + 10 if settings.ttl_s else 1 << 60
                model |= {key: (first + number, end) for number, key in enumerate(keys)}
                assert seen.isdisjoint(range(first, first + len(keys))), "a version was used twice"
                seen.update(range(first, first + len(keys)))
        except KeyNotFoundError:
            assert kind == "remove"
            assert 0 in versions
            continue
        except VersionConflictError:
            assert kind == "put if"
            assert wanted != versions
            continue
        except TooLargeError:
            assert len(keys) == 3
            continue
        except CapacityError:
            assert settings.eviction == "none"
            assert len(model.keys() | set(keys)) > 2
            continue
        entries = changed
        there = {key: each.version for key, each in entries.headers.items() if not each.is_expired(now_ms)}
        if settings.eviction == "lru":
            model = {key: each for key, each in model.items() if key in there}
            assert kind == "remove" or set(keys) <= there.keys()
        assert there == {key: version for key, (version, _) in model.items()}
        if settings.max_bytes:
            assert entries.counters.nbytes == 100 * len(entries.headers) <= 250


def test_put_when_lru_then_the_one_that_was_not_read_goes() -> None:
    entries = MemoryEntries(KeyedSettings(max_bytes=300, eviction="lru"))
    for key in KEYS[:3]:
        put(entries, [key])
    entries.marks.update(KEYS[:2])
    put(entries, [b"d"])
    assert sorted(entries.headers) == [b"a", b"b", b"d"]
    put(entries, [b"e"])
    assert sorted(entries.headers) == [b"a", b"b", b"e"] or sorted(entries.headers) == [b"b", b"d", b"e"]


def test_put_when_all_are_read_then_the_oldest_goes() -> None:
    entries = MemoryEntries(KeyedSettings(max_bytes=300, eviction="lru"))
    put(entries, KEYS[:3])
    entries.marks.update(KEYS)
    put(entries, [b"e"])
    assert sorted(entries.headers) == [b"b", b"c", b"e"]


@pytest.mark.parametrize(
    ("keys", "if_versions"),
    [([], []), ([b""], []), ([b"x" * (MAX_KEY_BYTES + 1)], []), ([b"a"], [1, 2]), ([b"a", b"a"], [1, 1])],
)
def test_check_keys_when_invalid_then_refused(keys: list[bytes], if_versions: list[int]) -> None:
    with pytest.raises(InvalidRequestError):
        check_keys(keys, if_versions)


def test_check_num_keys_when_too_many_then_refused() -> None:
    check_num_keys([b"a"] * MAX_KEYS)
    with pytest.raises(InvalidRequestError):
        check_num_keys([b"a"] * (MAX_KEYS + 1))


def test_remove_when_some_are_missing_then_as_asked() -> None:
    entries = MemoryEntries(KeyedSettings())
    put(entries, [b"a", b"b"])
    with pytest.raises(TDServeError):
        remove(entries.copy(), [b"a", b"c"])
    assert remove(entries, [b"a", b"c"], skips_missing=True) == 1
    assert list(entries.headers) == [b"b"]
