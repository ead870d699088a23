"""The parts of a store that servers share, without a handle of the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import WrongStateError
from tdserve.client.cluster.servers.cluster_servers import ClusterRecipe, ClusterServers
from tdserve.client.cluster.stores.divisions import DatasetDivision, KeyDivision, TableDivision
from tdserve.client.cluster.stores.sharded_store import ShardedStore
from tdserve.client.cluster.stores.shared_parts import SharedParts
from tdserve.client.cluster.tables.shard_writes import ShardWrites
from tdserve.client.cluster.tables.sharded_rows import ShardedRows
from tdserve.rules.placement import PlacementRecord, name_part

ROW = TensorDict({"number": torch.tensor(0)})


def make_parts(cluster: ClusterServers, placement: PlacementRecord, name: str, part_capacity: int) -> SharedParts:
    """Parts of a table that its placement names, as if each had this many rows."""
    made = SharedParts(cluster, name, placement, TableDivision(part_capacity))
    made.note_first(cluster.members.get(placement.servers[0]).describe(name_part(name, 0)))
    return made


@pytest.fixture
def table(client: tdserve.ClusterClient, name: str) -> tdserve.ShardedReplayHandle:
    """A table of three parts with ten rows each."""
    made = client.create_replay(name, ROW, 30, shards="all")
    assert isinstance(made, tdserve.ShardedReplayHandle)
    return made


@pytest.fixture
def cluster(servers: list[tdserve.Server], address: str) -> Iterator[ClusterServers]:
    """The servers, as parts of a store know them."""
    with servers[0].client() as one:
        made = ClusterRecipe(replace(one.recipe, address=address)).make()
    yield made
    made.close()


def test_parts_when_opened_then_each_is_bound_to_its_rows_and_opened_once(
    table: tdserve.ShardedReplayHandle, cluster: ClusterServers
) -> None:
    parts = make_parts(cluster, table.placement, table.name, 10)
    assert parts.list_open() == []
    opened = [parts.get_part(shard) for shard in parts.list_live()]
    assert [(part.capacity, part.is_part) for part in opened] == [(10, True)] * 3
    assert [parts.get_part(shard) for shard in range(3)] == opened
    parts.forget_part(1)
    assert parts.list_open() == [opened[0], opened[2]]


def test_parts_when_the_division_is_another_then_none_is_opened(
    table: tdserve.ShardedReplayHandle, cluster: ClusterServers
) -> None:
    parts = make_parts(cluster, table.placement, table.name, 9)
    with pytest.raises(WrongStateError, match="made anew"):
        parts.get_part(0)
    assert parts.list_open() == []


def test_rows_when_written_to_one_shard_and_read_by_number_then_no_handle_is_needed(
    table: tdserve.ShardedReplayHandle, cluster: ClusterServers
) -> None:
    deadline = cluster.make_deadline(None)
    store = ShardedStore(cluster, table.name, table.placement, TableDivision(10), deadline=deadline)
    writes, rows = ShardWrites(cluster, store), ShardedRows(store, is_array=False)
    batch = TensorDict({"number": torch.arange(3)}, [3])
    for shard in (2, 1):
        numbers = writes.write(shard, deadline, lambda part: part.extend(batch))
        assert numbers.tolist() == [10 * shard, 10 * shard + 1, 10 * shard + 2]
    assert rows.read([22, 10, -3], deadline)["number"].tolist() == [2, 0, 0]
    assert rows.read(slice(1, 5), deadline)["number"].tolist() == [1, 2, 0, 1]
    assert rows.ask_lengths(deadline) == {0: 0, 1: 3, 2: 3}
    assert {shard: where.tolist() for shard, where in rows.split([22, 10, 20]).items()} == {1: [1], 2: [0, 2]}
    assert rows.change([11, 21], deadline, lambda part, some, _: int(part.delete(some))) == [1, 1]
    assert rows.find_generations([11, 12], deadline).tolist() == [-1, rows.find_generations([12], deadline).item()]


def test_divisions_when_asked_for_first_rows_then_only_keys_have_none() -> None:
    placement = PlacementRecord("dataset", (0, 1, 2), "{}", capacity=8)
    assert [TableDivision(4).get_first_row(shard) for shard in range(3)] == [0, 4, 8]
    assert [DatasetDivision(placement).get_first_row(shard) for shard in range(3)] == [0, 2, 5]
    assert [KeyDivision(3).get_first_row(shard) for shard in range(3)] == [0, 0, 0]
    assert DatasetDivision(placement).has_rows(1, (3, 7))
    assert not DatasetDivision(placement).has_rows(1, (2, 7))
