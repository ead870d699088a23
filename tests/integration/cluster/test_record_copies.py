"""Copies of the record of a shared store, by which clients find it while the server with the record is away."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import tdserve
from tdserve.base.errors import ConnectError
from tdserve.client.cluster.servers.placement_records import delete_record
from tdserve.client.session.catalog.catalog_client import CatalogClient
from tests.integration.cluster.losing import connecting, fill_each, join_addresses, rows
from tests.integration.cluster.names import next_name
from tests.integration.crashing import Crashing
from tests.processes import wait_for

pytestmark = pytest.mark.integration


@pytest.fixture
def address(crashing: list[Crashing]) -> str:
    """The address of servers that can be killed."""
    return join_addresses(crashing)


def lose_disk(crashing: Crashing, name: str, shard: int) -> None:
    """Takes the record and the part of a store from a server, as if it started with an empty disk."""
    with tdserve.connect(crashing.server.address) as alone:
        delete_record(alone, name)
        alone.delete(f"{name}#{shard}")


def list_stores(crashing: Crashing) -> list[str]:
    """Returns all names that a server has, also of records and parts."""
    with CatalogClient(crashing.server.address) as asking:
        return asking.stores()


@pytest.mark.slow
def test_table_when_the_server_with_its_record_is_killed_then_new_clients_go_on_with_the_others(
    client: tdserve.ClusterClient, crashing: list[Crashing]
) -> None:
    name = next_name()
    like = rows(1)[0]
    fill_each(client.create_replay(name, like, 300, shards="all"))
    owner = client.find_server(name)
    crashing[owner].kill()
    with connecting(crashing, timeout_s=10.0) as late:
        table = late.replay(name)
        lost = table.placement.servers.index(owner)
        others = {*range(30)} - {*range(10 * lost, 10 * lost + 10)}
        assert set(table.sample(1000)["number"].tolist()) == others
        assert table.info()["degraded"] == [lost]
        assert len(late.create_replay(name, like, 300, shards="all", exists_ok=True)) == 20
        with pytest.raises(tdserve.StoreExistsError, match="exists_ok=True"):
            late.create_replay(name, like, 300, shards="all")
        with pytest.raises(tdserve.StoreExistsError, match="it has 3 shards, asked are 2"):
            late.create_replay(name, like, 300, shards=2, exists_ok=True)
        with pytest.raises(tdserve.StoreExistsError):
            late.create_replay(name, like, 600, shards="all", exists_ok=True)
        assert name in late
        assert name in late.stores()
        assert late.describe(name).num_rows == 20
        written = table.extend(rows(5, 100), writer=1)
        with pytest.raises(ConnectError, match="does not answer"):
            late.delete(name)
        assert len(table) == 25, "nothing was deleted"
        crashing[owner].start()
        wait_for(lambda: not late.replay(name).info()["degraded"], "the lost shard")
        assert sorted(table[:]["number"].tolist()) == [*range(30), *range(100, 105)]
        assert table[written]["number"].tolist() == [*range(100, 105)]
        late.delete(name)
        assert not any(name in list_stores(each) for each in crashing)


@pytest.mark.slow
def test_part_when_moved_while_a_server_with_a_copy_is_away_then_found_by_the_latest_copy(tmp_path: Path) -> None:
    with ExitStack() as stack:
        four = [stack.enter_context(Crashing(tmp_path / f"root{number}")) for number in range(4)]
        with connecting(four) as client:
            table = client.create_replay("rows", rows(1)[0], 300, shards=3)
            fill_each(table)
            owner, leaving, away = table.placement.servers
            (target,) = {*range(4)} - {owner, leaving, away}
            four[away].kill()
            begun_s = time.monotonic()
            assert client.rebalance("rows#1", target) == target
            assert time.monotonic() - begun_s < 15.0, "half of the client's timeout"
        four[away].start()
        four[owner].kill()
        four[leaving].kill()
        with connecting(four) as late:
            moved = late.replay("rows")
            assert moved.placement.servers == (owner, target, away)
            assert set(moved[:]["number"].tolist()) == {*range(10, 30)}
            assert moved.info()["degraded"] == [0]


@pytest.mark.slow
def test_table_when_a_server_has_joined_then_created_again_with_all_it_stays_on_those_that_it_had(
    crashing: list[Crashing],
) -> None:
    name = next_name()
    with connecting(crashing[:2]) as few:
        fill = few.create_replay(name, rows(1)[0], 300, shards="all")
        fill.extend(rows(5))
        kv = few.create_kv(f"{name}-kv", shards="all")
        kv.update({"a": 1, "b": 2})
    with connecting(crashing) as more:
        again = more.create_replay(name, rows(1)[0], 300, shards="all", exists_ok=True)
        assert (again.num_shards, len(again)) == (2, 5)
        assert len(more.create_kv(f"{name}-kv", shards="all", exists_ok=True)) == 2
        more.delete(name)
        more.delete(f"{name}-kv")


@pytest.mark.slow
def test_table_when_the_server_with_its_record_has_lost_its_disk_then_made_whole_by_creating_it_again(
    client: tdserve.ClusterClient, crashing: list[Crashing]
) -> None:
    name, like = next_name(), rows(1)[0]
    table = client.create_replay(name, like, 300, shards="all")
    writers = fill_each(table)
    owner = client.find_server(name)
    lost = table.placement.servers.index(owner)
    lose_disk(crashing[owner], name, lost)
    with connecting(crashing) as late:
        again = late.create_replay(name, like, 300, shards="all", exists_ok=True)
        others = {*range(30)} - {*range(10 * lost, 10 * lost + 10)}
        assert set(again[:]["number"].tolist()) == others
        again.extend(rows(10, 10 * lost), writer=writers[lost])
        assert set(again[:]["number"].tolist()) == {*range(30)}
    assert name in list_stores(crashing[owner])
    with connecting(crashing) as late:
        assert len(late.replay(name)) == 30
    lose_disk(crashing[owner], name, lost)
    with connecting(crashing) as late:
        late.delete(name)
    assert not any(name in list_stores(each) for each in crashing)


@pytest.mark.slow
def test_part_when_moved_then_all_are_found_without_the_server_that_has_the_record(
    client: tdserve.ClusterClient, crashing: list[Crashing]
) -> None:
    name = next_name()
    table = client.create_replay(name, rows(1)[0], 100, shards=2)
    for writer in range(20):
        table.extend(rows(1, writer), writer=writer)
    owner = client.find_server(name)
    before = next(server for server in table.placement.servers if server != owner)
    part = f"{name}#{table.placement.servers.index(before)}"
    (after,) = {0, 1, 2} - {*table.placement.servers}
    client.rebalance(part, after)
    crashing[owner].kill()
    with connecting(crashing, timeout_s=10.0) as late:
        moved = late.replay(name)
        assert after in moved.placement.servers
        assert len(moved) == len(client.replay(name)) > 0
        with pytest.raises(ConnectError, match=f"server {owner} has the record"):
            late.rebalance(part, before)
        crashing[owner].start()
        wait_for(lambda: len(moved) == 20, "the lost shard")
        late.delete(name)
        assert not any(name in list_stores(each) for each in crashing)
