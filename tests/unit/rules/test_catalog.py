from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tdserve.base.errors import CorruptDataError, InvalidRequestError, StoreExistsError, StoreNotFoundError
from tdserve.rules.catalog import (
    DEFAULT_MAX_OBJECT_BYTES,
    Catalog,
    StoreRecord,
    check_durability,
    check_max_object_bytes,
    explain_difference,
)
from tdserve.rules.placement import PlacementRecord
from tdserve.rules.replay.limiter import MinSize
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.sampler import Uniform
from tdserve.rules.replay.settings import Settings
from tdserve.store.rows.adopted import is_within
from tests.errors import raises


def _record(name: str = "frames", **changed: Any) -> StoreRecord:
    return dataclasses.replace(StoreRecord(name, "tensordict", f"uid-{name}", b"\0\xff", 3), **changed)


_records = st.builds(
    StoreRecord,
    name=st.text(),
    kind=st.sampled_from(["tensordict", "replay", "weights"]),
    uid=st.text(),
    fingerprint=st.binary(),
    num_rows=st.integers(0, 2**63),
    capacity=st.integers(0, 2**63),
    nbytes=st.integers(0, 2**63),
    created_s=st.floats(0, 1e12),
    settings=st.text(),
    extra=st.lists(st.text(alphabet=st.characters(exclude_categories=[]))).map(tuple),
    loading=st.booleans(),
    packed=st.booleans(),
    share_non_tensor=st.booleans(),
    max_object_bytes=st.integers(0, 2**63),
)


@pytest.mark.slow
@given(_records)
def test_record_when_written_and_read_then_equal(record: StoreRecord) -> None:
    assert StoreRecord.from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "queue"},
        {"fingerprint": "%%"},
        {"fingerprint": None},
        {"num_rows": -1},
        {"num_rows": 1.5},
        {"capacity": True},
        {"extra": [1]},
        {"extra": None},
        {"loading": 1},
        {"name": 3},
        {"created_s": "now"},
        {"max_object_bytes": -1},
        {"share_non_tensor": 1},
        {"colour": "red"},
    ],
)
def test_record_when_a_field_is_damaged_then_corrupt(change: dict[str, Any]) -> None:
    data = json.dumps({**json.loads(_record().to_bytes()), **change}).encode()
    with pytest.raises(CorruptDataError):
        StoreRecord.from_bytes(data)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"{}", b"[" * 10_000])
def test_record_when_the_bytes_are_no_record_then_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptDataError):
        StoreRecord.from_bytes(data)


def test_add_when_the_name_is_taken_then_refused_and_the_first_stays() -> None:
    catalog = Catalog([_record(num_rows=1)])
    with pytest.raises(StoreExistsError) as caught:
        catalog.add(_record(num_rows=2))
    assert caught.value.name == "frames"
    assert catalog.get("frames").num_rows == 1


def test_catalog_when_two_records_have_one_name_then_refused() -> None:
    with pytest.raises(StoreExistsError):
        Catalog([_record(), _record()])


def test_loading_when_created_then_invisible_but_the_name_is_taken() -> None:
    catalog = Catalog()
    catalog.add(_record(loading=True))
    assert "frames" not in catalog
    assert (len(catalog), catalog.list_page()) == (0, ([], ""))
    with pytest.raises(StoreNotFoundError):
        catalog.get("frames")
    assert catalog.get("frames", with_loading=True).loading
    with pytest.raises(StoreExistsError, match="being created"):
        catalog.add(_record())


def test_replace_when_loading_ends_then_visible() -> None:
    catalog = Catalog([_record("a"), _record("b", loading=True), _record("c")])
    catalog.replace(_record("b"))
    assert catalog.list_page()[0] == ["a", "b", "c"]
    catalog.replace(_record("b", loading=True))
    assert catalog.list_page()[0] == ["a", "c"]
    catalog.remove("b")
    assert catalog.list_page()[0] == ["a", "c"]


@pytest.mark.parametrize("record", [_record("other"), _record(uid="another incarnation")])
def test_replace_when_it_is_another_store_then_not_found(record: StoreRecord) -> None:
    with pytest.raises(StoreNotFoundError):
        Catalog([_record()]).replace(record)


def test_remove_when_present_then_gone_and_again_not_found() -> None:
    catalog = Catalog([_record("a"), _record("b")])
    assert catalog.remove("a").name == "a"
    assert "a" not in catalog
    assert [record.name for record in catalog] == ["b"]
    with pytest.raises(StoreNotFoundError) as caught:
        catalog.remove("a")
    assert caught.value.name == "a"


@given(st.sets(st.text(max_size=4)), st.text(max_size=2), st.integers(1, 4))
def test_page_when_followed_to_the_end_then_every_name_with_the_prefix_once(
    names: set[str], prefix: str, size: int
) -> None:
    catalog = Catalog(map(_record, names - {""}))
    found, after = catalog.list_page(prefix, size=size)
    while after:
        more, after = catalog.list_page(prefix, after=after, size=size)
        assert 0 < len(more) <= size
        found += more
    assert found == sorted(name for name in names - {""} if name.startswith(prefix))


def test_page_when_the_last_name_was_deleted_meanwhile_then_goes_on_behind_it() -> None:
    catalog = Catalog(map(_record, "abcd"))
    _, after = catalog.list_page(size=2)
    catalog.remove("b")
    assert catalog.list_page(after=after) == (["c", "d"], "")


def test_page_when_after_comes_before_the_prefix_then_begins_at_the_prefix() -> None:
    assert Catalog(map(_record, ["a", "aa", "b1", "b2", "c"])).list_page("b", after="a") == (["b1", "b2"], "")
    assert Catalog(map(_record, ["a", "b1", "b2", "c"])).list_page("b", after="c") == ([], "")


def test_page_when_size_is_negative_then_refused() -> None:
    with pytest.raises(InvalidRequestError):
        Catalog().list_page(size=-1)


def test_page_when_there_are_10_000_stores_then_a_page_takes_milliseconds() -> None:
    catalog = Catalog()
    for number in range(10_000):
        catalog.add(_record(f"store-{number * 7919 % 10_000:05}"))
    took_s = []
    for _ in range(3):  # one may meet the garbage collector
        start_s = time.thread_time()
        names, after = catalog.list_page("store-")
        took_s.append(time.thread_time() - start_s)
    assert min(took_s) < 0.05
    assert (len(names), after) == (10_000, "")


def test_matches_when_only_the_incarnation_differs_then_none() -> None:
    asked = _record(uid="x", created_s=9.0, packed=True, extra=("a",), nbytes=7)
    assert explain_difference(_record(), asked) is None


def _settings(**changes: Any) -> dict[str, Any]:
    """Fields of the record of a table; with these settings in place of its own."""
    settings = Settings(**{"sampler": Prioritized(alpha=0.6), "limiter": MinSize(1), **changes})
    return {"kind": "replay", "settings": settings.to_json()}


def test_explain_difference_when_a_record_is_a_copy_or_a_part_has_moved_then_only_choices_count() -> None:
    asked = PlacementRecord("replay", (0, 1), capacity=10, owner=2)
    known = PlacementRecord("replay", (0, 1), capacity=10, owner=0, copy_at=1, revision=3)
    other = PlacementRecord("replay", (0, 1), capacity=20, owner=2)
    found = _record(kind="placement", settings=known.to_json())
    assert explain_difference(found, _record(kind="placement", settings=asked.to_json())) is None
    reason = explain_difference(found, _record(kind="placement", settings=other.to_json()))
    assert reason == "its capacity is 10, asked is 20"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kind": "replay"}, "replay"),
        ({"capacity": 5}, "capacity is 0, asked is 5"),
        (_settings(sampler=Uniform()), "its sampler is prioritized, asked is uniform"),
        (_settings(sampler=Prioritized(alpha=0.7)), "its sampler.alpha is 0.6, asked is 0.7"),
        (_settings(limiter=MinSize(4)), "its limiter.min_size is 1, asked is 4"),
        (_settings(max_times_sampled=3), "its max_times_sampled is the default, asked is 3"),
    ],
)
def test_explain_difference_when_it_is_another_store_then_names_what_differs(change: dict[str, Any], word: str) -> None:
    existing = _record(**_settings()) if "settings" in change else _record()
    reason = explain_difference(existing, _record(**{"kind": existing.kind, **change}))
    assert reason is not None
    assert word in reason
    assert ";" not in reason


def test_record_when_written_then_without_what_is_usual() -> None:
    assert json.loads(_record().to_bytes()).keys() == {"name", "kind", "uid", "fingerprint", "num_rows"}


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (1 << 20, 1 << 20), ((1 << 20) + 1, (1 << 20) + 65536)])
def test_max_object_bytes_when_asked_for_then_rounded_up_to_whole_pages(asked: int, given: int) -> None:
    assert check_max_object_bytes(asked) == given


@pytest.mark.parametrize("asked", [1, (1 << 20) - 1, (1 << 42) + 1, 2**64 - 1])
def test_max_object_bytes_when_it_makes_no_sense_then_is_refused(asked: int) -> None:
    with raises(InvalidRequestError, argument="max_object_bytes"):
        check_max_object_bytes(asked)


def test_explain_difference_when_another_limit_is_asked_for_then_names_it_and_no_wish_fits_all() -> None:
    existing = _record(max_object_bytes=1 << 20)
    assert explain_difference(existing, _record(max_object_bytes=0)) is None
    assert explain_difference(existing, _record(max_object_bytes=1 << 20)) is None
    assert "max_object_bytes" in str(explain_difference(existing, _record(max_object_bytes=DEFAULT_MAX_OBJECT_BYTES)))


def test_names_around_when_there_are_many_then_the_nearest_in_their_order() -> None:
    catalog = Catalog()
    for number in range(100):
        catalog.add(_record(name=f"store-{number:02}"))
    around = catalog.find_names_around("store-50", 10)
    assert around == [f"store-{number:02}" for number in range(45, 55)]
    assert catalog.find_names_around("a", 4) == ["store-00", "store-01", "store-02", "store-03"]
    assert catalog.find_names_around("z", 2) == ["store-98", "store-99"]
    assert len(catalog.find_names_around("store-50", 10_000)) == 100
    assert catalog.find_names_around("store-50", 0) == []
    with pytest.raises(InvalidRequestError):
        catalog.find_names_around("store-50", -1)


def test_durability_when_asked_for_then_is_one_of_two_or_no_wish() -> None:
    assert [check_durability(asked) for asked in ("process", "disk", "", None)] == ["process", "disk", "", ""]
    with pytest.raises(InvalidRequestError, match="one of process, disk, got 'ram'"):
        check_durability("ram")


def test_explain_difference_when_another_durability_is_asked_for_then_names_it_but_not_without_a_wish() -> None:
    existing = _record(durability="disk")
    assert explain_difference(existing, _record(durability="")) is None
    assert explain_difference(existing, _record(durability="process")) == "its durability is 'disk', asked is 'process'"


_folders = st.lists(st.sampled_from(["a", "b", "a b", "é", "..."]), max_size=4).map(lambda parts: "/" + "/".join(parts))


@pytest.mark.slow
@given(st.lists(_folders), st.lists(st.integers(0, 20)), _folders)
def test_overlapping_when_asked_then_all_that_lie_on_one_way(folders: list[str], removed: list[int], path: str) -> None:
    catalog = Catalog([_record("plain")])
    for number, folder in enumerate(folders):
        catalog.add(_record(str(number), adopted=folder, loading=number % 2 == 0))
    for number in removed:
        if catalog.is_taken(str(number)):
            catalog.remove(str(number))
    catalog = Catalog(catalog) if len(folders) % 2 else catalog
    expected = {
        record.name
        for record in catalog
        if record.adopted and (is_within(path, record.adopted) or is_within(record.adopted, path))
    }
    found = [record.name for record in catalog.find_overlapping(path)]
    assert (set(found), len(found)) == (expected, len(expected))


def test_kinds_when_counted_then_queues_apart_from_other_tables() -> None:
    catalog = Catalog()
    settings = ("", '{"is_queue":false}', '{"is_queue":true}', '{"is_queue":true}')
    for number, each in enumerate(settings):
        catalog.add(StoreRecord(str(number), "replay", str(number), settings=each))
    assert catalog.count_kinds() == {"replay": 2, "queue": 2}
    catalog.remove("2")
    assert catalog.count_kinds() == {"replay": 2, "queue": 1}
