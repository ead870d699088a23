"""Consumers take rows from the shards of a table: all rows that are there, or rows by priority."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest
import torch

import tdserve
from tdserve.base.errors import ClosedError, DeadlineExceededError, EndOfStreamError, WrongStateError
from tdserve.client.cluster.tables.sharded_batches import ShardedTaken
from tdserve.client.tables.draws import query
from tests.errors import raises
from tests.integration.cluster.filling import SIZES, fill_unequally, rows
from tests.integration.rests import at_rest

pytestmark = pytest.mark.integration


def test_take_when_the_shards_have_fewer_rows_then_all_of_them(client: tdserve.ClusterClient, name: str) -> None:
    queue = client.create_queue(name, rows(1)[0], 300, shards="all")
    fill_unequally(queue)
    with queue.take(60, min_rows=10) as batch:
        taken = batch["number"].tolist()
    assert len(taken) == 60
    held = queue.take(60, min_rows=10, ack=False)
    assert sorted(taken + held["number"].tolist()) == list(range(sum(SIZES)))
    with pytest.raises(DeadlineExceededError, match="2 rows of all shards"):
        queue.take(60, min_rows=2, timeout_s=0.1)
    queue.extend(rows(3, start=75))
    assert sorted(queue.take(60, min_rows=2, ack=False)["number"].tolist()) == [75, 76, 77]


def test_batches_when_all_shards_are_closed_then_the_rest_comes_and_it_ends(
    client: tdserve.ClusterClient, name: str
) -> None:
    queue = client.create_queue(name, rows(1)[0], 300, shards="all")
    fill_unequally(queue)
    queue.close()
    found = [number for batch in queue.batches(40, min_rows=8) for number in batch["number"].tolist()]
    assert sorted(found) == list(range(sum(SIZES)))
    with pytest.raises(EndOfStreamError):
        queue.take(1, min_rows=1)


def test_take_when_priorities_are_small_then_each_row_once(client: tdserve.ClusterClient, name: str) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all", sampler=tdserve.Prioritized())
    fill_unequally(table, priority=np.full(sum(SIZES), 1e-3))
    with table.take(30, consumer="judge") as batch:
        taken = batch["number"].tolist()
    with table.take(60, min_rows=1, consumer="judge") as batch:
        taken += batch["number"].tolist()
    assert sorted(taken) == list(range(sum(SIZES)))
    assert sorted(table.sample(sum(SIZES), consumer="trainer")["number"].tolist()) == list(range(sum(SIZES)))


def test_sample_when_rows_of_several_shards_cannot_be_given_their_form_then_the_consumer_has_not_had_them(
    client: tdserve.ClusterClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all")
    fill_unequally(table)
    with monkeypatch.context() as patch:
        patch.setattr(query, "to_arrays", run_out_of_memory)
        with pytest.raises(MemoryError):
            table.sample(60, consumer="trainer", numpy=True)
    assert sorted(table.sample(sum(SIZES), consumer="trainer")["number"].tolist()) == list(range(sum(SIZES)))


def run_out_of_memory(found: Any) -> NoReturn:
    """Fails as the copy of a batch may, to a device or into arrays."""
    raise MemoryError


def test_take_when_a_closed_table_has_named_consumers_then_each_gets_the_rest_and_it_ends(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all", consumers={"trainer", "judge"})
    fill_unequally(table)
    table.close()
    for consumer in ("judge", "trainer"):
        found = [number for batch in table.batches(40, consumer=consumer) for number in batch["number"].tolist()]
        assert sorted(found) == list(range(sum(SIZES)))
        assert table.info()["backlog"] == {"judge": 0, "trainer": sum(SIZES) * (consumer == "judge")}
        with pytest.raises(EndOfStreamError):
            table.take(1, consumer=consumer, timeout_s=20.0)
    assert len(table) == 0


def test_batches_when_a_shard_cannot_acknowledge_in_time_then_the_next_call_does(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], name: str
) -> None:
    queue = client.create_queue(name, rows(1)[0], 300, shards="all")
    fill_unequally(queue)
    queue.close()
    batches = queue.batches(sum(SIZES), timeout_s=1.0)
    assert sorted(next(batches)["number"].tolist()) == list(range(sum(SIZES)))
    with at_rest(servers[queue.placement.servers[1]], f"{name}#1"), pytest.raises(tdserve.TDServeError) as refused:
        next(batches)
    assert refused.value.retryable
    assert list(batches) == []  # the rows of shard 1 are acknowledged, those of the others were
    with pytest.raises(EndOfStreamError):
        queue.take(1, timeout_s=0.0)


def test_batches_when_closed_by_another_thread_while_rows_come_then_they_are_given_back(
    client: tdserve.ClusterClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = client.create_queue(name, rows(1)[0], 300, shards="all")
    fill_unequally(queue)

    def take_and_close(*given: Any) -> ShardedTaken:
        taken = ShardedTaken(*given)
        batches.close()
        return taken

    monkeypatch.setattr("tdserve.client.cluster.tables.shard_takes.ShardedTaken", take_and_close)
    batches = queue.batches(sum(SIZES))
    with pytest.raises(ClosedError):
        next(batches)
    monkeypatch.undo()
    assert sorted(queue.take(sum(SIZES), ack=False)["number"].tolist()) == list(range(sum(SIZES)))


def test_batches_when_on_a_device_then_tensors_for_a_client_of_arrays_too(address: str, name: str) -> None:
    with tdserve.connect(address, numpy=True) as client:
        queue = client.create_queue(name, rows(1)[0], 300, shards="all")
        fill_unequally(queue)
        with queue.batches(4, device="cpu") as batches:
            assert next(batches).device == torch.device("cpu")
        with queue.batches(4) as batches:
            assert isinstance(next(batches)["number"], np.ndarray)
        with raises(tdserve.InvalidRequestError, argument="numpy"):
            queue.batches(4, device="cpu", numpy=True)


def test_draws_when_of_more_different_rows_than_fit_then_refused_at_once(
    client: tdserve.ClusterClient, name: str
) -> None:
    queue = client.create_queue(f"{name}-queue", rows(1)[0], 30, shards="all")
    table = client.create_replay(f"{name}-table", rows(1)[0], 30, shards="all", sampler=tdserve.WithoutReplacement())
    draws = (queue.take, table.sample, lambda num_rows: table.take(num_rows, consumer="trainer"))
    for draw in draws:
        with pytest.raises(tdserve.InvalidRequestError, match="31 different rows never fit into a capacity of 30"):
            draw(31)


@pytest.mark.parametrize("is_shared", [True, False])
def test_taken_rows_when_their_block_acknowledges_or_gives_back_then_its_end_does_neither(
    client: tdserve.ClusterClient, name: str, is_shared: bool
) -> None:
    queue: Any = client.create_queue(name, rows(1)[0], 300, shards="all" if is_shared else 1)
    queue.extend(rows(20))
    held = queue.take(20)
    with held:
        held.give_back()
    held = queue.take(20)
    with held:
        held.ack(timeout_s=20.0)
    assert len(queue) == 0


def test_take_when_the_lease_is_over_then_the_rows_of_all_shards_come_again(
    client: tdserve.ClusterClient, name: str
) -> None:
    queue = client.create_queue(name, rows(1)[0], 300, shards="all")
    fill_unequally(queue)
    everything = list(range(sum(SIZES)))
    held = queue.take(sum(SIZES), lease_s=3600.0)
    held.renew()
    held.renew(0.05)
    again = queue.take(sum(SIZES), ack=False, lease_s=3600.0, timeout_s=60.0)
    assert sorted(again["number"].tolist()) == everything
    with pytest.raises(WrongStateError):
        held.ack()
    queue.renew(again, 0.05)
    with queue.take(sum(SIZES), timeout_s=60.0) as taken:
        assert sorted(taken["number"].tolist()) == everything
    assert len(queue) == 0


def test_batches_when_a_consumer_of_a_shared_table_hangs_then_its_rows_come_again(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all", consumers={"judge"})
    fill_unequally(table)
    with table.batches(sum(SIZES), consumer="judge", lease_s=3600.0) as batches:
        batch = next(batches)
        table.renew(batch, 3600.0, consumer="judge")
        batches.renew(0.05)
        with table.take(sum(SIZES), consumer="judge", timeout_s=60.0) as taken:
            assert sorted(taken["number"].tolist()) == list(range(sum(SIZES)))
        with pytest.raises(WrongStateError):
            next(batches)
    assert len(table) == 0
