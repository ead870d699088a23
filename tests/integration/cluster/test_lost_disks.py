"""Shared stores of which one server has lost its disk and is back, empty."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

import pytest

import tdserve
from tdserve.base.errors import ShardLostError, StoreNotFoundError
from tests.errors import raises
from tests.integration.cluster.losing import connecting, fill_each, join_addresses, rows
from tests.integration.cluster.names import next_name
from tests.integration.crashing import Crashing

pytestmark = pytest.mark.integration


@pytest.fixture
def address(crashing: list[Crashing]) -> str:
    """The address of servers that can be killed."""
    return join_addresses(crashing)


def lose_disk(crashing: list[Crashing], server: int) -> None:
    """Starts a server again with an empty disk."""
    crashing[server].kill()
    shutil.rmtree(crashing[server].root)
    crashing[server].start()


@contextmanager
def at_once(seconds: float = 5.0) -> Iterator[None]:
    """Checks that a block takes far less than the client's timeout."""
    begun_s = time.monotonic()
    yield
    assert time.monotonic() - begun_s < seconds


@pytest.mark.slow
@pytest.mark.parametrize("loses_record", [False, True])
def test_table_when_a_disk_is_lost_then_goes_on_without_that_part_until_it_is_made_anew(
    crashing: list[Crashing], caplog: pytest.LogCaptureFixture, loses_record: bool
) -> None:
    name = next_name()
    with connecting(crashing, timeout_s=60.0) as client:
        table = client.create_replay(name, rows(1)[0], 300, shards="all")
        writers = fill_each(table)
        owner = client.find_server(name)
        lost = table.placement.servers.index(owner) if loses_record else (table.placement.servers.index(owner) + 1) % 3
        lose_disk(crashing, table.placement.servers[lost])
        others = {*range(30)} - {*range(10 * lost, 10 * lost + 10)}
        with connecting(crashing, timeout_s=60.0) as late, caplog.at_level(logging.WARNING, "tdserve.client"):
            for handle in (table, late.replay(name)):
                with at_once(15.0):
                    assert set(handle.sample(1000)["number"].tolist()) == others
                    assert set(handle[:]["number"].tolist()) == others
                    assert handle.info()["degraded"] == [lost]
                    assert handle.is_degraded
                with at_once(), pytest.raises(ShardLostError, match=f"lost shard {lost} of '{name}'.*exists_ok=True"):
                    handle[lost * 100]
                with at_once():
                    late.describe(name)
            assert [record.message for record in caplog.records].count(_describe_going_on(table, lost)) == 2
        numbers = table.extend(rows(5, 100), writer=writers[lost])
        assert not {*range(100 * lost, 100 * lost + 100)} & set(numbers.tolist())
        client.create_replay(name, rows(1)[0], 300, shards="all", exists_ok=True)
        again = table.extend(rows(5, 200), writer=writers[lost])
        assert set(again.tolist()) <= {*range(100 * lost, 100 * lost + 100)}
        assert set(table[:]["number"].tolist()) == {*others, *range(100, 105), *range(200, 205)}
        assert not table.is_degraded
        client.delete(name)
        with pytest.raises(StoreNotFoundError):
            table[:]


def _describe_going_on(table: Any, shard: int) -> str:
    server = table.placement.servers[shard]
    why = f"which server {server} has lost; creating the store again with exists_ok=True makes an empty one"
    return f"store {table.name!r} continues without shard {shard}, {why}"


@pytest.mark.slow
def test_stores_when_a_call_needs_the_lost_part_then_refused_at_once(crashing: list[Crashing]) -> None:
    table_name, keyed_name, dataset_name = next_name(), next_name(), next_name()
    with connecting(crashing, timeout_s=60.0) as client:
        table = client.create_replay(table_name, rows(1)[0], 300, shards="all", on_shard_loss="raise")
        writers = fill_each(table)
        keyed = client.create_kv(keyed_name, shards="all")
        keyed.update({str(number): number for number in range(20)})
        dataset = client.memmap(rows(30), dataset_name, shards="all")
        lose_disk(crashing, 0)
        shard = table.placement.servers.index(0)
        with at_once(), pytest.raises(ShardLostError, match=f"server 0 .*{crashing[0].port}"):
            table.extend(rows(1), writer=writers[shard])
        with at_once(), raises(ShardLostError, name=keyed_name):
            [keyed[str(number)] for number in range(20)]
        with at_once():
            assert 0 < len(keyed) == len(keyed.keys()) < 20
        with at_once(), raises(ShardLostError, name=dataset_name):
            dataset[0:30]
        for name in (table_name, keyed_name, dataset_name):
            client.delete(name)


@pytest.mark.slow
def test_part_when_it_is_being_created_then_waited_for(client: tdserve.ClusterClient, crashing: list[Crashing]) -> None:
    name = next_name()
    table = client.create_replay(name, rows(1)[0], 300, shards="all")
    fill_each(table)
    server = table.placement.servers[2]
    with tdserve.connect(crashing[server].server.address) as alone, connecting(crashing) as late:
        alone.delete(f"{name}#2")
        opened = late.replay(name)

        def create() -> None:
            alone.create_replay(f"{name}#2", rows(1)[0], 100).extend(rows(10, 20))

        creation = Timer(0.5, create)
        creation.start()
        assert 20 <= len(opened) <= 30
        creation.join()
        assert not opened.is_degraded
        assert set(opened[:]["number"].tolist()) == {*range(30)}
    client.delete(name)
