"""Calls that need a shard whose server is away: they end in time, and their errors say what was done at other
servers."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import pytest
import torch

import tdserve
from tdserve.base.errors import ConnectError, DeadlineExceededError, SelectionError, TDServeError
from tdserve.rules.placement import hash_to_shard
from tests.integration.cluster.losing import connecting, fill_each, rows
from tests.integration.cluster.names import next_name
from tests.integration.crashing import Crashing
from tests.processes import stopped, wait_for

pytestmark = pytest.mark.integration


@contextmanager
def without(crashing: list[Crashing], server: int) -> Iterator[None]:
    """A block during which a server is away."""
    crashing[server].kill()
    try:
        yield
    finally:
        crashing[server].start()


def measure_failure_s(call: Callable[[], object]) -> float:
    """Returns after how many seconds a call has not reached its shard."""
    begun_s = time.monotonic()
    with pytest.raises(ConnectError):
        call()
    return time.monotonic() - begun_s


@pytest.mark.slow
def test_keyed_store_when_the_server_of_a_key_is_away_then_each_call_takes_its_own_timeout(
    crashing: list[Crashing],
) -> None:
    name, value = next_name(), torch.arange(3)
    by_shard = [
        next(key for key in map(str, range(100)) if hash_to_shard(key.encode(), 3) == each) for each in range(3)
    ]
    key = by_shard[1]
    with connecting(crashing) as client:
        client.create_kv(name, shards="all").put(by_shard, [value] * 3)
    with connecting(crashing, timeout_s=6.0) as client:
        unused: Any = client.kv(name)
        calls: list[Callable[[], object]] = [
            lambda: unused.get(key, timeout_s=1),
            lambda: unused.get(by_shard, timeout_s=1),
            lambda: unused.get_with_versions(key, timeout_s=1),
            lambda: unused.pop(key, timeout_s=1),
            lambda: unused.put(key, value, timeout_s=1),
            lambda: unused.put(by_shard, [value] * 3, timeout_s=1),
            lambda: unused.delete(key, timeout_s=1),
        ]
        with without(crashing, unused.placement.servers[1]):
            for call in calls:
                assert measure_failure_s(call) < 4.0
            assert measure_failure_s(lambda: unused.put(key, value, timeout_s=8)) > 7.5
            assert measure_failure_s(lambda: unused.get(key)) > 5.5  # 0 is about absent keys alone
        assert unused.get(key, timeout_s=20).tolist() == [0, 1, 2]


@pytest.mark.slow
def test_queue_when_a_shard_is_away_then_an_ack_has_done_the_rows_of_the_others_and_the_error_names_the_rest(
    crashing: list[Crashing],
) -> None:
    with connecting(crashing, timeout_s=3.0) as client:
        queue: Any = client.create_queue(next_name(), rows(1)[0], 300, shards="all")
        fill_each(queue)
        batch = queue.take(30, ack=False)
        with without(crashing, queue.placement.servers[1]), pytest.raises(ConnectError) as failed:
            queue.ack(batch)
        assert (
            "20 of these 30 rows were acknowledged, those of shards [0, 2]; repeat it with the other 10 alone, whose "
            "index is 100 to 199"
        ) in str(failed.value)
        assert pickle.loads(pickle.dumps(failed.value)).shards_done == (0, 2)


@pytest.mark.slow
def test_rows_when_two_of_their_servers_stand_still_then_their_writes_are_unanswered_and_carried_out_later(
    crashing: list[Crashing],
) -> None:
    with connecting(crashing) as client:
        table: Any = client.create_replay(next_name(), rows(1)[0], 300, shards="all", consumers=("trainer",))
        fill_each(table)
        batch = table.take(30, consumer="trainer", ack=False)
        pids = [crashing[table.placement.servers[shard]].server.pid for shard in (0, 1)]
        calls: list[Callable[[], Any]] = [
            lambda: table.set_at_("number", torch.arange(100, 130), batch, timeout_s=2),
            lambda: table.ack(batch, consumer="trainer", timeout_s=2),
        ]
        unanswered = r"an answer of shards \[0, 1\] of .* the other 20 alone"
        with stopped(pids[0]), stopped(pids[1]):
            for call in calls:
                with pytest.raises(DeadlineExceededError, match=unanswered) as failed:
                    call()
                assert failed.value.shards_done == (2,)
                assert failed.value.retryable
        wait_for(lambda: len(table) == 0, "the acknowledgements, which had been sent")


@pytest.mark.slow
def test_taken_rows_when_a_shard_is_away_then_the_error_of_their_block_counts_what_was_acknowledged(
    crashing: list[Crashing],
) -> None:
    with connecting(crashing, timeout_s=3.0) as client:
        queue: Any = client.create_queue(next_name(), rows(1)[0], 300, shards="all")
        fill_each(queue)
        taken = queue.take(30)
        expected = r"20 of these 30 rows were acknowledged, those of shards \[0, 2\]"
        with without(crashing, queue.placement.servers[1]), pytest.raises(ConnectError, match=expected), taken:
            pass


@pytest.mark.slow
def test_queue_when_a_shard_is_away_then_closed_only_once_the_same_call_has_closed_it_too(
    crashing: list[Crashing],
) -> None:
    with connecting(crashing, timeout_s=3.0) as client:
        queue: Any = client.create_queue(next_name(), rows(1)[0], 300, shards="all")
        with without(crashing, queue.placement.servers[1]):
            with pytest.raises(ConnectError, match=r"shards \[0, 2\] of .* have done it; the same call, made again"):
                queue.close()
            assert not queue.info()["is_closed"]
        queue.close(timeout_s=30)
        wait_for(lambda: queue.info()["is_closed"], "figures of the shard that is back")


def test_table_when_a_row_was_not_written_then_the_error_has_the_number_that_was_asked(
    crashing: list[Crashing],
) -> None:
    with connecting(crashing) as client:
        table: Any = client.create_replay(next_name(), rows(1)[0], 300, shards="all")
        fill_each(table)
        with pytest.raises(SelectionError, match=r"index 150 .* \(shard 1\) is not live now, nor are 1 others"):
            table[torch.tensor([3, 105, 150, 151])]


@pytest.mark.slow
def test_table_when_none_of_its_servers_answers_then_calls_wait_for_the_first(crashing: list[Crashing]) -> None:
    with connecting(crashing, timeout_s=60.0) as client, ThreadPoolExecutor(2) as threads:
        table = client.create_replay(next_name(), rows(1)[0], 300, shards="all")
        fill_each(table)
        with ExitStack() as away:
            for server in range(3):
                away.enter_context(without(crashing, server))
            calls = [threads.submit(table.sample, 8), threads.submit(len, table)]
            wait_for(lambda: client.members.lost == [0, 1, 2] or any(each.done() for each in calls), "failed attempts")
            assert not any(each.done() for each in calls)
        sample, length = (each.result() for each in calls)
        assert len(sample) == 8
        assert length in (10, 20, 30)


@pytest.mark.slow
def test_sample_when_the_only_drawn_shard_is_away_then_drawn_from_others(crashing: list[Crashing]) -> None:
    with connecting(crashing, timeout_s=60.0) as client:
        table = client.create_replay(next_name(), rows(1)[0], 300, shards="all")
        fill_each(table)
        with without(crashing, table.placement.servers[1]):
            numbers = [int(table.sample(1)["number"][0]) for _ in range(20)]
        assert not {*range(10, 20)} & set(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("on_loss", ["raise", "wait"])
def test_extend_when_a_shard_of_its_rows_is_away_then_the_error_has_what_was_written(
    crashing: list[Crashing], on_loss: Literal["raise", "wait"]
) -> None:
    with connecting(crashing, timeout_s=3.0) as client:
        table = client.create_replay(
            next_name(), rows(1)[0], 300, shards="all", shard_by="number", on_shard_loss=on_loss
        )
        table.extend(rows(30))
        num_away = table.info()["shards"][2]["num_rows"]
        with without(crashing, table.placement.servers[2]):
            written = rf"{30 - num_away} of 30 rows, those of shards \[0, 1\], are written"
            with pytest.raises(ConnectError, match=written) as failed:
                table.extend(rows(30))
            assert failed.value.shards_done == (0, 1)
            if on_loss == "raise":  # it is known by now, before anything is written
                with pytest.raises(ConnectError, match=r"which has shard \d of .*it did not when it was last asked$"):
                    table.extend(rows(30))
        wait_for(lambda: len(table) == 60 - num_away, "all of its rows")


@pytest.mark.slow
def test_pop_when_a_shard_is_away_then_the_error_has_what_others_popped(crashing: list[Crashing]) -> None:
    with connecting(crashing, timeout_s=30.0) as client:
        entries: Any = client.create_kv(next_name(), shards="all")
        keys = [f"key-{number}" for number in range(30)]
        entries.put(keys, list(range(30)))
        with (
            without(crashing, entries.placement.servers[1]),
            tdserve.within(5.0),
            pytest.raises(TDServeError) as failed,
        ):
            entries.pop(keys, None)
        popped = {key: value for some, values in failed.value.values for key, value in zip(some, values, strict=True)}
        assert 0 < len(popped) < 30
        left = entries.pop([key for key in keys if key not in popped], None)
        assert sorted([*popped.values(), *left]) == list(range(30))
