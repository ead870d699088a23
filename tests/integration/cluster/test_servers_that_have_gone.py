"""Open handles and clients find stores that have moved away from a server, after that server has ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import tdserve
from tdserve.rules.placement import OnShardLoss, choose_servers
from tests.integration.cluster.losing import connecting, rows
from tests.integration.cluster.names import name_owned_by
from tests.integration.crashing import Crashing
from tests.processes import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def leaving(tmp_path: Path) -> Iterator[list[Crashing]]:
    """Three servers, of which the second one leaves for good."""
    with ExitStack() as stack:
        yield [stack.enter_context(Crashing(tmp_path / f"root{number}")) for number in range(3)]


def next_shared_name() -> str:
    """Returns a new name of a store that the first two servers share."""
    return next(name for name in iter(lambda: name_owned_by(0, 3), None) if choose_servers(name, 2, 3) == (0, 1))


@pytest.mark.parametrize("on_shard_loss", ["wait", "raise", "redirect"])
def test_table_when_a_server_was_drained_and_has_gone_then_writes_go_where_the_shard_is(
    leaving: list[Crashing], on_shard_loss: OnShardLoss
) -> None:
    with connecting(leaving, timeout_s=20.0) as client, connecting(leaving) as mover:
        table = client.create_replay(next_shared_name(), rows(1)[0], 30, shards=2, on_shard_loss=on_shard_loss)
        writer = next(each for each in range(1, 100) if table.choose_shard(each) == 1)
        table.extend(rows(5), writer=writer)
        mover.drain(1)
        leaving[1].kill()
        written = table.extend(rows(5, 5), writer=writer)
        assert set((written // table.part_capacity).tolist()) == {1}
        assert table.placement.servers == (0, 2)
        assert table[:]["number"].tolist() == [*range(10)]


def test_keyed_store_when_a_server_was_drained_and_has_gone_then_all_keys_are_there(leaving: list[Crashing]) -> None:
    keys = [f"key{number}" for number in range(12)]
    with connecting(leaving, timeout_s=20.0) as client, connecting(leaving) as mover:
        keyed = client.create_kv(next_shared_name(), shards=2)
        keyed.put(keys, [*range(12)])
        mover.drain(1)
        leaving[1].kill()
        assert [keyed.get(key) for key in keys] == [*range(12)]
        keyed.put(keys, [*range(12, 24)])
        assert keyed.get(keys) == [*range(12, 24)]


def test_table_when_its_server_was_lost_before_it_was_drained_then_samples_are_whole_again(
    leaving: list[Crashing],
) -> None:
    with connecting(leaving, timeout_s=20.0) as client, connecting(leaving) as mover:
        table = client.create_replay(next_shared_name(), rows(1)[0], 30, shards=2)
        for shard in range(2):
            writer = next(each for each in range(1, 100) if table.choose_shard(each) == shard)
            table.extend(rows(5), writer=writer)
        leaving[1].kill()
        table.sample(4)
        assert table.is_degraded
        leaving[1].start()
        mover.drain(1)
        leaving[1].kill()
        wait_for(lambda: len(table) == 10, "the rows of the shard that has moved")
        assert table.placement.servers == (0, 2)


def test_weights_when_their_server_was_drained_and_has_gone_then_read_published_and_opened(
    leaving: list[Crashing],
) -> None:
    with connecting(leaving, timeout_s=20.0) as client, connecting(leaving) as mover:
        weights, content = name_owned_by(1, 3), name_owned_by(1, 3)
        client.publish(weights, rows(3))
        client.init_remote(rows(3), content)
        mover.drain(1)
        leaving[1].kill()
        assert client.publish(weights, rows(3)) == 2
        assert client.from_remote_init(content)["number"].tolist() == [0, 1, 2]
        assert client[content]["number"].tolist() == [0, 1, 2]


def test_handles_when_the_server_of_their_store_was_drained_and_has_gone_then_they_find_it(
    leaving: list[Crashing],
) -> None:
    with connecting(leaving, timeout_s=20.0) as client, connecting(leaving) as mover:
        names = [name_owned_by(1, 3) for _ in range(4)]
        content = client.memmap(rows(3), names[0])
        table = client.create_replay(names[1], rows(1)[0], 30)
        queue = client.create_queue(names[2], rows(1)[0], 30)
        keyed = client.create_kv(names[3])
        table.extend(rows(4))
        queue.extend(rows(4))
        keyed.put("a", 1)
        mover.drain(1)
        leaving[1].kill()
        assert table.sample(2)["number"].shape == (2,)
        assert table.extend(rows(1, 4)).tolist() == [4]
        with queue.take(4) as taken:
            assert taken["number"].tolist() == [0, 1, 2, 3]
        keyed.put("a", 2)
        assert keyed.get("a") == 2
        assert content[1]["number"] == 1
        content[1] = rows(1, 8)[0]
        assert content[1]["number"] == 8
        assert client.find_server(names[1]) != 1


def test_read_when_it_was_sent_to_a_server_that_was_drained_and_then_ended_then_it_finds_the_store(
    leaving: list[Crashing],
) -> None:
    with connecting(leaving, timeout_s=20.0) as client, connecting(leaving) as mover, ThreadPoolExecutor(1) as thread:
        content = client.memmap(rows(3), name_owned_by(1, 3))
        table = client.create_replay(name_owned_by(1, 3), rows(1)[0], 30)
        table.extend(rows(4))
        assert content[1]["number"] == 1
        mover.drain(1)
        os.kill(leaving[1].server.pid, signal.SIGSTOP)  # it takes requests, and answers none
        for read in (lambda: int(content[1]["number"]), lambda: len(table)):
            later = thread.submit(read)
            if leaving[1].server.is_alive:
                with pytest.raises(TimeoutError):
                    later.result(0.5)
                leaving[1].kill()
            assert later.result(15.0) in (1, 4)


def test_iterators_when_the_server_of_their_store_was_drained_and_has_gone_then_they_go_on(
    leaving: list[Crashing],
) -> None:
    with connecting(leaving, timeout_s=20.0) as client, connecting(leaving) as mover:
        weights, name = name_owned_by(1, 3), name_owned_by(1, 3)
        client.publish(weights, rows(3))
        table = client.create_replay(name, rows(1)[0], 30)
        table.extend(rows(4))
        with client.subscribe(weights) as versions, table.batches(2, timeout_s=20.0) as batches:
            assert next(versions).version == 1
            next(batches)
            mover.drain(1)
            leaving[1].kill()
            for _ in range(20):  # more than were drawn ahead
                assert next(batches)["number"].shape == (2,)
            mover.publish(weights, rows(4))
            assert next(versions).version == 2


def test_handle_when_its_server_is_away_and_no_other_has_the_store_then_a_call_waits(
    leaving: list[Crashing],
) -> None:
    with connecting(leaving, timeout_s=20.0) as client:
        name = name_owned_by(1, 3)
        with tdserve.connect(leaving[0].server.address) as direct:  # as one that was restored there
            direct.create_replay(name, rows(1)[0], 30).extend(rows(4))
        table = client[name]
        leaving[0].kill()
        waiting = client.run_later(lambda: table.sample(2))
        wait_for(lambda: 0 in client.members.lost, "that the server is missed")
        leaving[0].start()
        assert waiting.result(20.0)["number"].shape == (2,)


def test_drain_when_a_store_is_deleted_after_it_was_listed_then_the_others_move(
    leaving: list[Crashing], monkeypatch: pytest.MonkeyPatch
) -> None:
    with connecting(leaving) as client, connecting(leaving) as mover:
        stays, goes = name_owned_by(1, 3), name_owned_by(1, 3)
        client.init_remote(rows(3), stays)
        client.init_remote(rows(3), goes)
        list_names = tdserve.Client.stores

        def list_and_delete(asked: tdserve.Client, prefix: str = "") -> list[str]:
            names = list_names(asked, prefix)
            if goes in names:
                client.delete(goes)
            return names

        monkeypatch.setattr(tdserve.Client, "stores", list_and_delete)
        assert mover.drain(1) == [stays]
