"""A shard whose server is killed is left out, joins again, and has every row that was acknowledged."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import ConnectError, DeadlineExceededError, PeerLostError, StoreMovedError
from tdserve.base.ids import make_uid
from tdserve.client.session.catalog.catalog_client import CatalogClient
from tests.integration.cluster.losing import connecting, fill_each, join_addresses, rows
from tests.integration.cluster.moving import release_only
from tests.integration.cluster.names import name_owned_by, next_name
from tests.integration.crashing import Crashing, Writer
from tests.processes import wait_for

pytestmark = pytest.mark.integration


@pytest.fixture
def address(crashing: list[Crashing]) -> str:
    """The address of servers that can be killed."""
    return join_addresses(crashing)


def list_degraded(crashing: Crashing) -> list[str]:
    """Returns the stores that clients of a server report as degraded."""
    with CatalogClient(crashing.server.address) as asking:
        return [name for session in asking.observe(max_sessions=100).sessions for name in session.degraded]


@pytest.mark.slow
def test_table_when_a_server_is_killed_then_goes_on_without_its_rows_until_it_is_back(
    client: tdserve.ClusterClient, crashing: list[Crashing]
) -> None:
    table = client.create_replay(next_name(), rows(1)[0], 300, shards="all")
    writers = fill_each(table)
    lost = table.placement.servers[1]
    crashing[lost].kill()
    others = {*range(10), *range(20, 30)}
    assert set(table.sample(100)["number"].tolist()) <= others
    assert table.is_degraded
    info = table.info()
    assert (info["degraded"], info["shard_by"], info["on_shard_loss"]) == ([1], (), "redirect")
    assert len(table) == 20
    assert client.stats()["lost"] == [lost]
    assert list_degraded(crashing[table.placement.servers[0]]) == [table.name]
    written = table.extend(rows(5, 100), writer=writers[1])  # of the writer that has lost its shard
    assert set((written // table.part_capacity).tolist()) & {0, 2}
    assert set(table.sample(200)["number"].tolist()) <= others | set(range(100, 105))
    with tdserve.connect(client.address) as later:  # one that starts again meanwhile
        again = later.create_replay(table.name, rows(1)[0], 300, shards="all", exists_ok=True)
        assert len(again.sample(16)) == 16
    crashing[lost].start()
    wait_for(lambda: len(table) == 35, "the return of the shard")
    assert set(table[:]["number"].tolist()) == {*range(30), *range(100, 105)}
    wait_for(lambda: set(table.sample(100)["number"].tolist()) & set(range(10, 20)), "a sample of the shard")
    assert not table.is_degraded
    assert len(table) == 35  # its calls bring the report
    assert list_degraded(crashing[table.placement.servers[0]]) == []


@pytest.mark.slow
def test_rows_when_their_server_restarts_then_reading_and_writing_them_waits_for_it(
    client: tdserve.ClusterClient, crashing: list[Crashing], caplog: pytest.LogCaptureFixture
) -> None:
    table = client.create_replay(next_name(), rows(1)[0], 300, shards="all")
    fill_each(table)
    frames: Any = client.memmap(rows(30), next_name(), shards="all")
    wanted = torch.tensor([0, 101, 202])
    lost = table.placement.servers[1]
    crashing[lost].kill()
    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(lambda: table[wanted]), pool.submit(lambda: frames[:])]
        writing = pool.submit(lambda: frames.set_at_("number", -1, [29]))
        wait_for(lambda: caplog.text.count("no server answers") >= 1, "tries that failed")
        crashing[lost].start()
        assert reading[0].result()["number"].tolist() == [0, 11, 22]
        assert reading[1].result()["number"].tolist()[:29] == [*range(29)]
        writing.result()
    assert frames[29]["number"] == -1


@pytest.mark.slow
def test_extend_when_its_shard_is_down_then_raises_or_waits_as_the_table_was_created(
    client: tdserve.ClusterClient, crashing: list[Crashing], caplog: pytest.LogCaptureFixture
) -> None:
    raising = client.create_replay(next_name(), rows(1)[0], 300, shards="all", on_shard_loss="raise")
    waiting = client.create_replay(next_name(), rows(1)[0], 300, shards="all", on_shard_loss="wait")
    writers = fill_each(raising), fill_each(waiting)
    server = 0
    crashing[server].kill()
    with pytest.raises(ConnectError):
        raising.extend(rows(1), writer=writers[0][raising.placement.servers.index(server)])
    with pytest.raises(ConnectError):
        raising.clear(timeout_s=0.3)
    assert raising.is_degraded
    assert not [record for record in caplog.records if "continues without" in record.message]
    writer = writers[1][waiting.placement.servers.index(server)]
    with pytest.raises((ConnectError, DeadlineExceededError)):
        waiting.extend(rows(1, 50), writer=writer, timeout_s=0.3)
    later = client.cluster.run_later(lambda: waiting.extend(rows(1, 51), writer=writer, timeout_s=60.0))
    crashing[server].start()
    assert int(later.result(60.0)[0]) // waiting.part_capacity == waiting.placement.servers.index(server)
    assert 51 in waiting[:]["number"].tolist()


@pytest.mark.slow
def test_extend_when_its_shard_has_stored_it_and_dies_before_the_answer_then_no_other_shard_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TDSERVE_FAILPOINT", f"@{tmp_path / 'failpoint'}")
    with ExitStack() as stack:
        own = [stack.enter_context(Crashing(tmp_path / f"root{number}")) for number in range(2)]
        client = stack.enter_context(connecting(own))
        queue = client.create_queue("todo", rows(1)[0], 300, shards="all")
        shard = int(queue.extend(rows(1))[0]) // queue.part_capacity
        (tmp_path / "failpoint").write_text("commit.shown")
        with pytest.raises(PeerLostError, match="may yet carry out"):
            queue.extend(rows(3, 1), timeout_s=3.0)
        own[queue.placement.servers[shard]].start()
        wait_for(lambda: len(queue) == 4, "the return of the shard")
        assert sorted(queue[:]["number"].tolist()) == [0, 1, 2, 3]


def fill_first_of_two(client: tdserve.ClusterClient) -> tuple[Any, int, int]:
    """Returns a table on two servers with ten rows in its first shard, their writer, and the server without a shard."""
    table = client.create_replay(next_name(), rows(1)[0], 300, shards=2)
    writer = next(each for each in range(1, 1000) if table.choose_shard(each) == 0)
    table.extend(rows(10), writer=writer)
    (free,) = {0, 1, 2} - set(table.placement.servers)
    return table, writer, free


@pytest.mark.slow
def test_extend_when_its_shard_has_moved_and_all_servers_are_down_then_waits_for_the_first(
    client: tdserve.ClusterClient, crashing: list[Crashing]
) -> None:
    table, writer, free = fill_first_of_two(client)
    with tdserve.connect(client.address) as mover:
        assert isinstance(mover, tdserve.ClusterClient)
        mover.rebalance(f"{table.name}#0", free)
    others = {each for each in range(3) if each != table.placement.servers[0]}  # the handle does not know of the move
    for server in others:
        crashing[server].kill()
    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(table.extend, rows(5, 10), writer=writer, timeout_s=60.0)
        wait_for(lambda: table.placement.servers[0] == free or written.done(), "an attempt that is given up")
        assert not written.done()
        crashing[free].start()
        assert (written.result() // table.part_capacity).tolist() == [0] * 5
    for server in others - {free}:
        crashing[server].start()
    wait_for(lambda: len(table) == 15, "the return of the other shard")


@pytest.mark.slow
def test_leaves_when_a_server_is_down_then_none_is_added_until_it_is_back(
    client: tdserve.ClusterClient, crashing: list[Crashing]
) -> None:
    table = client.create_replay(next_name(), rows(1)[0], 300, shards="all")
    fill_each(table)
    crashing[1].kill()
    like = TensorDict({"late": torch.tensor(0.0)}, [])
    with pytest.raises(ConnectError, match="server 1"):
        table.add_leaves(like)
    assert "late" not in table.sample(64).keys()  # noqa: SIM118 (a tensordict's keys)
    crashing[1].start()
    wait_for(lambda: len(table) == 30, "the return of the shard")
    table.add_leaves(like)
    crashing[1].restart()
    wait_for(lambda: len(table) == 30, "the return of the shard")
    assert not table[:]["late"].any()


@pytest.mark.slow
def test_table_when_a_shard_has_moved_and_its_server_is_down_then_that_server_alone_is_left_out(
    client: tdserve.ClusterClient, crashing: list[Crashing]
) -> None:
    table = client.create_replay(next_name(), rows(1)[0], 300, shards=2)
    for shard in (0, 1):
        writer = next(each for each in range(1, 1000) if table.choose_shard(each) == shard)
        table.extend(rows(10, 10 * shard), writer=writer)
    (free,) = {0, 1, 2} - set(table.placement.servers)
    with tdserve.connect(client.address) as mover:
        assert isinstance(mover, tdserve.ClusterClient)
        mover.rebalance(f"{table.name}#0", free)
    crashing[free].kill()
    assert set(table.sample(50)["number"].tolist()) <= set(range(10, 20))
    assert client.members.lost == [free]
    assert table.info()["degraded"] == [0]
    assert table.placement.servers[0] == free
    crashing[free].start()
    wait_for(lambda: len(table) == 20, "the return of the shard")


@pytest.mark.slow
def test_store_when_it_has_moved_and_no_server_that_has_a_record_of_it_answers_then_waits_for_where_it_went(
    client: tdserve.ClusterClient, crashing: list[Crashing]
) -> None:
    name = name_owned_by(0, 3)
    client.init_remote(rows(3), name)
    client.rebalance(name, 1)
    with crashing[0].server.client() as one, pytest.raises(StoreMovedError) as refused:
        one.from_remote_init(name)
    for server in (0, 1):
        crashing[server].kill()
    with ThreadPoolExecutor(1) as threads:
        finding = threads.submit(client.cluster.find_moved, refused.value, Deadline.after(60.0))
        wait_for(lambda: 1 in client.members.lost, "a question to the server that is down")
        crashing[1].start()
        found = finding.result(60.0)
    assert found.address == crashing[1].server.address
    assert found.from_remote_init(name)["number"].tolist() == [0, 1, 2]
    crashing[0].start()
    client.delete(name)


@pytest.mark.slow
def test_store_when_its_new_server_is_killed_before_it_shows_it_then_read_there_once_that_is_back(
    client: tdserve.ClusterClient, crashing: list[Crashing]
) -> None:
    name = name_owned_by(0, 3)
    client.init_remote(rows(3), name)
    store = client[name]
    release_only(client, name, 1, move=make_uid())
    crashing[1].kill()
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(store.get, "number")
        wait_for(lambda: 1 in client.members.lost, "a question to the server that is down")
        crashing[1].start()
        assert reading.result(60.0).tolist() == [0, 1, 2]
    client.delete(name)


@pytest.mark.slow
def test_shard_when_its_new_server_is_killed_before_it_shows_it_then_back_with_its_rows(
    client: tdserve.ClusterClient, crashing: list[Crashing]
) -> None:
    table, writer, free = fill_first_of_two(client)
    release_only(client, f"{table.name}#0", free, move=make_uid())
    crashing[free].kill()
    written = table.extend(rows(5, 10), writer=writer)
    assert set((written // table.part_capacity).tolist()) == {1}
    crashing[free].start()
    wait_for(lambda: len(table) == 15, "the return of the shard")
    assert sorted(table[:]["number"].tolist()) == list(range(15))


@pytest.mark.slow
def test_stores_when_servers_are_killed_in_turn_then_no_acknowledged_row_is_lost_and_none_taken_twice(
    client: tdserve.ClusterClient, crashing: list[Crashing], tmp_path: Path
) -> None:
    table = client.create_replay(next_name(), rows(1)[0], 300_000, shards="all")
    queue = client.create_queue(next_name(), rows(1)[0], 300_000, shards="all")
    fill_each(table)
    fill_each(queue)
    taken: list[int] = []

    def write(number: int) -> None:
        table.extend(rows(1, 100 + number), writer=number % 7 + 1)

    def put(number: int) -> None:
        queue.extend(rows(1, 100 + number), writer=number % 7 + 1)

    def sample(_: int) -> None:
        assert len(table.sample(8)) == 8

    def take(_: int) -> None:
        try:
            batch = queue.take(1, timeout_s=0.5)
        except (DeadlineExceededError, tdserve.TransportError):
            return
        try:
            with batch as got:
                numbers = got["number"].tolist()
        except (tdserve.WrongStateError, tdserve.TransportError):
            return  # its session was lost: others get the rows, or have them already
        taken.extend(numbers)

    workers = [Writer(each) for each in (write, put, sample, take)]
    for server in range(3):
        for worker in workers:
            worker.goes_on()
        crashing[server].restart()
    for worker in workers:
        worker.goes_on()
    stored, put_numbers, *_ = [worker.end() for worker in workers]
    wait_for(lambda: not table.is_degraded or len(table), "the return of all shards")
    wait_for(lambda: len(table.info()["degraded"]) == 0, "the return of all shards")
    kept = table[:]["number"].tolist()
    assert {100 + number for number in stored} <= set(kept)
    assert len(kept) == len(set(kept))
    queue.close()
    with queue.batches(16) as batches:
        for batch in batches:
            taken += batch["number"].tolist()
    assert len(taken) == len(set(taken))
    assert {100 + number for number in put_numbers} <= set(taken)


@pytest.mark.slow
def test_calls_when_a_server_has_stopped_then_end_in_time_and_go_on_without_it(
    client: tdserve.ClusterClient, crashing: list[Crashing]
) -> None:
    table = client.create_replay(next_name(), rows(1)[0], 300, shards="all")
    writers = fill_each(table)
    server = table.placement.servers[2]
    with tdserve.connect(client.address, timeout_s=20.0) as fresh:
        opened = fresh.replay(table.name)
        os.kill(crashing[server].server.pid, signal.SIGSTOP)
        try:
            for handle in (table, opened):  # one of them has used every shard before, the other none
                began_s = time.monotonic()
                assert set(handle.sample(50, timeout_s=8.0)["number"].tolist()) <= set(range(20))
                assert time.monotonic() - began_s < 9.0
                assert len(handle) == 20
            assert len(table[:]) == 20
            written = table.extend(rows(1, 40), writer=writers[2], timeout_s=8.0)
            assert int(written[0]) // table.part_capacity != 2
        finally:
            os.kill(crashing[server].server.pid, signal.SIGCONT)
        wait_for(lambda: len(opened) == 31, "the return of the shard")


@pytest.mark.slow
def test_store_when_the_owner_of_its_name_has_stopped_then_looked_for_no_longer_than_the_timeout(
    client: tdserve.ClusterClient, crashing: list[Crashing]
) -> None:
    here, moved = name_owned_by(0, 3), name_owned_by(0, 3)
    for name in (here, moved):
        client.init_remote(rows(3), name)
    client.rebalance(moved, 1)
    os.kill(crashing[0].server.pid, signal.SIGSTOP)
    try:
        for timeout_s in (0.0, 3.0):
            with tdserve.connect(client.address, timeout_s=60.0) as fresh:
                began_s = time.monotonic()
                with pytest.raises(ConnectError):
                    fresh.from_remote_init(here, timeout_s=timeout_s)
                assert time.monotonic() - began_s < timeout_s + 5.0
        with tdserve.connect(client.address, timeout_s=60.0) as fresh:
            began_s = time.monotonic()
            assert fresh.from_remote_init(moved, timeout_s=8.0)["number"].tolist() == [0, 1, 2]
            assert time.monotonic() - began_s < 9.0
    finally:
        os.kill(crashing[0].server.pid, signal.SIGCONT)
