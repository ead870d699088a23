"""Handles of shared stores that were made anew with other shards or rows: they refuse, and change nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tdserve
from tdserve.base.errors import WrongStateError
from tdserve.rules.placement import hash_to_shard
from tests.integration.cluster.losing import fill_each, rows

pytestmark = pytest.mark.integration

ANEW = r"was made anew with other shards, rows or kind; open it again: client\["


@pytest.fixture
def other(address: str) -> Iterator[tdserve.ClusterClient]:
    """Another client of all servers."""
    with tdserve.connect(address) as made:
        assert isinstance(made, tdserve.ClusterClient)
        yield made


@pytest.mark.parametrize("is_used", [False, True])
def test_table_when_made_anew_with_more_rows_then_handles_refuse_all_calls(
    user: tdserve.ClusterClient, other: tdserve.ClusterClient, name: str, is_used: bool
) -> None:
    table = user.create_replay(name, rows(1)[0], 30, shards=3)
    if is_used:
        fill_each(table)
    other.delete(name)
    anew = other.create_replay(name, rows(1)[0], 300, shards=3)
    fill_each(anew)
    before = anew[:]["number"].tolist()
    every = torch.arange(30)
    for _ in range(2):
        with pytest.raises(WrongStateError, match=ANEW):
            table.extend(rows(3))
        with pytest.raises(WrongStateError, match=ANEW):
            table.delete(every)
        with pytest.raises(WrongStateError, match=ANEW):
            table.update_priority(every, torch.zeros(30))
        with pytest.raises(WrongStateError, match=ANEW):
            table.get_priorities(every)
        with pytest.raises(WrongStateError, match=ANEW):
            table.find_generations(every)
        with pytest.raises(WrongStateError, match=ANEW):
            table.set_at_("number", torch.zeros(30, dtype=torch.int64), every)
        with pytest.raises(WrongStateError, match=ANEW):
            table.sample(3)
    assert anew[:]["number"].tolist() == before
    again = user.replay(name)
    again.extend(rows(1, 1000))
    assert len(again) == 31


def test_keyed_store_when_made_anew_with_fewer_shards_then_handles_refuse_all_keys(
    user: tdserve.ClusterClient, other: tdserve.ClusterClient, name: str
) -> None:
    keyed = user.create_kv(name, shards=3)
    keys = [f"key{number}" for number in range(12)]
    keyed.put(keys, [*range(12)])
    other.delete(name)
    anew = other.create_kv(name, shards=2)
    anew.put(keys[:6], [*range(6)])
    for key in keys:
        with pytest.raises(WrongStateError, match=ANEW):
            keyed.put(key, 100)
        with pytest.raises(WrongStateError, match=ANEW):
            keyed.get(key)
        if hash_to_shard(key.encode(), 2) != hash_to_shard(key.encode(), 3):
            with pytest.raises(WrongStateError, match=ANEW):
                keyed.delete(key, missing_ok=True)
    with pytest.raises(WrongStateError, match=ANEW):
        keyed.put(keys, [*range(12)])
    assert all(anew.get(key) == number for number, key in enumerate(keys[:6]) if key in anew)
    assert not [key for key in keys[6:] if key in anew]
    user.kv(name).put(keys, [*range(12)])
    assert anew.get(keys) == [*range(12)]


def test_dataset_when_made_anew_with_more_rows_then_handles_refuse_all_rows(
    user: tdserve.ClusterClient, other: tdserve.ClusterClient, name: str
) -> None:
    dataset = user.memmap(rows(9), name, shards=3)
    assert len(dataset[:]) == 9
    other.delete(name)
    anew = other.memmap(rows(90), name, shards=3)
    for _ in range(2):
        with pytest.raises(WrongStateError, match=ANEW):
            dataset[4] = rows(1, 1000)[0]
        with pytest.raises(WrongStateError, match=ANEW):
            dataset[:]
        with pytest.raises(WrongStateError, match=ANEW):
            dataset.get_at("number", [3, 4])
        with pytest.raises(WrongStateError, match=ANEW):
            dataset.to_tensordict()
    assert anew["number"].tolist() == [*range(90)]
    assert user[name][[40]]["number"].tolist() == [40]
