"""Placement: which server owns a name, and records of stores that several share."""

from __future__ import annotations

from collections import Counter

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.placement import (
    PlacementRecord,
    choose_owner,
    choose_writer_shard,
    find_whole,
    hash_to_shard,
    list_shards_to_try,
    name_part,
    name_splits,
    order_servers,
)
from tests.errors import raises

NAMES = [f"store-{number}" for number in range(3000)]


def test_owner_when_there_are_many_names_then_servers_have_about_as_many() -> None:
    counts = Counter(choose_owner(name, 3) for name in NAMES)
    assert all(900 < counts[server] < 1100 for server in range(3))


def test_owner_when_a_server_is_added_then_changes_only_to_that_one() -> None:
    changed = [(choose_owner(name, 3), choose_owner(name, 4)) for name in NAMES]
    assert {new for old, new in changed if new != old} == {3}
    assert 600 < sum(new != old for old, new in changed) < 900


def test_owner_when_asked_in_any_process_then_always_the_same() -> None:
    assert [choose_owner(name, 5) for name in ("replay", "weights", "ä")] == [1, 0, 2]
    assert [hash_to_shard(value, 5) for value in (b"a", b"c")] == [3, 0]


@pytest.mark.parametrize("name", ["\ud800", "", "a/b"])
def test_owner_when_no_store_can_have_the_name_then_refused(name: str) -> None:
    with raises(InvalidRequestError, argument="store name"):
        choose_owner(name, 3)


def test_writers_when_they_have_numbers_or_ranks_then_shards_have_as_many() -> None:
    for given in ({"rank": None}, {"rank": 5}):
        shards = [choose_writer_shard(3, writer=number, identity=b"", **given) for number in range(1, 13)]
        assert Counter(shards) == {0: 4, 1: 4, 2: 4}
    assert [choose_writer_shard(3, writer=0, identity=b"", rank=rank) for rank in range(4)] == [0, 1, 2, 0]


def test_shards_when_one_is_lost_then_its_writers_go_to_all_others() -> None:
    tried = [list_shards_to_try(1, 4, "redirect", salt=b"%d" % number) for number in range(300)]
    assert all(each[0] == 1 and sorted(each) == [0, 1, 2, 3] for each in tried)
    assert all(60 < Counter(each[1] for each in tried)[shard] < 140 for shard in (0, 2, 3))
    assert list_shards_to_try(0, 1, "redirect") == [0]
    assert list_shards_to_try(2, 4, "wait") == [2]


def test_order_when_made_then_has_every_server_once() -> None:
    assert sorted(order_servers("replay", 7)) == list(range(7))


@pytest.mark.parametrize("name", ["replay", "a#b", "a#-1"])
def test_name_when_of_a_part_then_leads_to_the_whole(name: str) -> None:
    assert find_whole(name) is None
    assert find_whole(name_part(name, 12)) == name
    assert find_whole(name_splits(name)) == name


def test_record_when_written_then_read_as_it_was() -> None:
    record = PlacementRecord("replay", (2, 0), '{"limiter":{}}', 101, "wait", ("next", "id"))
    assert PlacementRecord.from_json(record.to_json()) == record
    assert record.part_capacity == 51
    assert record.num_shards == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"kind":"replay"}',
        '{"kind":"other","servers":[0]}',
        '{"kind":"replay","servers":[]}',
        '{"kind":"replay","servers":[1,1]}',
        '{"kind":"replay","servers":[-1]}',
        '{"kind":"replay","servers":[99999]}',
        '{"kind":"replay","servers":0}',
        '{"kind":"replay","servers":[0],"capacity":-1}',
        '{"kind":"replay","servers":[0],"on_shard_loss":"forget"}',
        '{"kind":"replay","servers":[0],"owner":-1}',
        '{"kind":"replay","servers":[0],"more":1}',
    ],
)
def test_record_when_from_a_stranger_then_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        PlacementRecord.from_json(text)
