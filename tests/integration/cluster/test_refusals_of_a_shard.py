"""A shard that refuses or does not answer requests costs the other shards of its table no rows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import DamagedRowError
from tdserve.client.tables.draws.taking import acknowledge
from tests.integration.cluster.losing import connecting, fill_each, rows
from tests.integration.cluster.names import next_name
from tests.integration.crashing import Crashing
from tests.processes import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[list[Crashing]]:
    """Three servers, of which one is damaged, killed or stopped."""
    with ExitStack() as stack:
        yield [stack.enter_context(Crashing(tmp_path / f"root{number}")) for number in range(3)]


def take_on_and_on(queue: tdserve.ShardedQueueHandle) -> None:
    """Takes rows and acknowledges them until that is refused."""
    while True:
        queue.ack(queue.take(6, timeout_s=20.0, ack=False))


def test_take_when_a_shard_has_a_damaged_row_then_others_get_the_rows_of_all_shards(own: list[Crashing]) -> None:
    with connecting(own) as client:
        queue = client.create_queue(next_name(), rows(1)[0], 300, shards=3, checksum=True)
        fill_each(queue)
        servers = queue.placement.servers
        own[servers[1]].server.shutdown()
        (column,) = (own[servers[1]].root / "stores" / f"{queue.name}#1").rglob("number.memmap")
        with column.open("r+b") as file:
            file.write(b"\x77")
        own[servers[1]].start()
        for _ in range(3):
            with pytest.raises(DamagedRowError):
                take_on_and_on(queue)
        wait_for(lambda: not any(shard["num_leased"] for shard in queue.info()["shards"]), "rows that are given back")


def test_sample_when_a_server_is_lost_before_its_rows_are_acknowledged_then_gets_others(
    own: list[Crashing], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[int] = []

    def kill_and_acknowledge(client: Any, *arguments: Any) -> None:
        if not lost:
            lost.append(next(server for server, each in members.used.items() if each is client))
            own[lost[0]].kill()
        acknowledge(client, *arguments)

    with connecting(own) as client:
        members = client.members
        table = client.create_replay(next_name(), rows(1)[0], 300, shards=3, consumers=("learner",))
        fill_each(table)
        monkeypatch.setattr("tdserve.client.cluster.tables.sharded_replay.acknowledge", kill_and_acknowledge)
        drawn = table.sample(15, consumer="learner", timeout_s=4.8)
        assert len({*drawn["index"].tolist()}) == 15
        left_out = {shard for shard, server in enumerate(table.placement.servers) if server in lost}
        assert not left_out & {*(drawn["index"] // table.part_capacity).tolist()}
        assert [each["num_leased"] for each in table.info()["shards"] if each] == [0, 0]


def test_sample_of_a_rank_when_a_server_stands_still_then_goes_on_without_it(own: list[Crashing]) -> None:
    with connecting(own) as client:
        table = client.create_replay(next_name(), rows(1)[0], 300, shards=3)
        fill_each(table)
        table.sample(4, rank=0, world_size=1, step=0)
        stopped = own[table.placement.servers[2]].server.pid
        os.kill(stopped, signal.SIGSTOP)
        deadline = Deadline.after(16.0)
        try:
            drawn = table.sample(8, rank=0, world_size=1, step=1, timeout_s=16.0)
            assert not deadline.expired, "all the time that the call had"
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert {*(drawn["index"] // table.part_capacity).tolist()} <= {0, 1}
