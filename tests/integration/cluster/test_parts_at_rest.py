"""Calls about shared stores wait while a part is at rest, as during a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest

import tdserve
from tdserve.client.cluster.tables import shard_draws, sharded_rows
from tdserve.client.cluster.tables.shard_masses import ask_mass
from tdserve.client.tables.draws import taken_batches
from tests.integration.cluster.filling import SIZES, fill_unequally, rows
from tests.integration.rests import Rest, at_rest, wait_through_rest

pytestmark = pytest.mark.integration

TOTAL = sum(SIZES)


def make_queue(client: tdserve.ClusterClient, name: str) -> Any:
    """Makes a queue with rows in each shard."""
    queue = client.create_queue(name, rows(1)[0], 300, shards="all")
    fill_unequally(queue)
    return queue


def make_used_up(client: tdserve.ClusterClient, name: str) -> Any:
    """Makes a table whose rows are drawn once."""
    sampler = tdserve.WithoutReplacement()
    table = client.create_replay(name, rows(1)[0], 300, shards="all", sampler=sampler, max_times_sampled=1)
    fill_unequally(table)
    return table


def find_part(servers: list[tdserve.Server], table: Any, shard: int) -> tuple[tdserve.Server, str]:
    """Returns the server of a shard, and the shard's name there."""
    return servers[table.placement.servers[shard]], f"{table.name}#{shard}"


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "take": (make_queue, lambda queue: queue.take(TOTAL, timeout_s=20.0, ack=False)),
    "used up": (make_used_up, lambda table: table.sample(TOTAL, timeout_s=20.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_draw_when_a_shard_comes_to_rest_after_it_was_asked_what_it_has_then_waits(
    user: tdserve.ClusterClient,
    servers: list[tdserve.Server],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    make, draw = CASES[case]
    table = make(user, name)
    lock, rests = Lock(), list[str]()
    num_asked = 0

    def ask_and_rest(*given: Any) -> Any:
        nonlocal num_asked
        with lock:
            if rests == ["begun"]:
                rest.end()
                rests.append("ended")
        found = ask_mass(*given)
        with lock:
            num_asked += 1
            if num_asked == len(servers):  # all have answered, and none draws yet
                rest.begin()
                rests.append("begun")
        return found

    monkeypatch.setattr(shard_draws, "ask_mass", ask_and_rest)
    with Rest(*find_part(servers, table, 1)) as rest:
        found = draw(table)
    assert sorted(found["number"].tolist()) == list(range(TOTAL))
    assert rests == ["begun", "ended"]


def test_take_when_a_shard_rests_longer_than_one_that_is_slow_may_then_waits(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_draws, "PATIENCE_S", 0.1)
    queue = make_queue(client, name)
    found = wait_through_rest(*find_part(servers, queue, 1), lambda: queue.take(TOTAL, ack=False))
    assert sorted(found["number"].tolist()) == list(range(TOTAL))


def test_take_when_a_shard_rests_until_its_time_is_over_then_a_retryable_error(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], name: str
) -> None:
    queue = make_queue(client, name)
    with at_rest(*find_part(servers, queue, 1)), pytest.raises(tdserve.TDServeError) as refused:
        queue.take(TOTAL, timeout_s=0.2)
    assert refused.value.retryable
    assert len(queue.take(TOTAL, ack=False)) == TOTAL  # all parts were given back


def test_batches_when_a_shard_rests_longer_than_a_step_then_they_wait(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taken_batches, "POLL_S", 0.1)
    queue = make_queue(client, name)
    with queue.batches(TOTAL) as batches:
        found = wait_through_rest(*find_part(servers, queue, 1), lambda: next(batches))
    assert sorted(found["number"].tolist()) == list(range(TOTAL))


def test_length_when_a_shard_rests_longer_than_one_that_is_slow_may_then_waits(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_rows, "PATIENCE_S", 0.1)
    queue = make_queue(client, name)
    assert wait_through_rest(*find_part(servers, queue, 1), lambda: len(queue)) == TOTAL


def test_keys_when_the_first_shard_rests_then_another_is_asked(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], address: str, name: str
) -> None:
    queue = make_queue(client, name)
    with tdserve.connect(address, timeout_s=4.0) as hurried, at_rest(*find_part(servers, queue, 0)):
        assert sorted(hurried.keys(name)) == ["number", "wide"]
