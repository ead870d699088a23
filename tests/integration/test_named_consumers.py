"""Tables with named consumers: a row leaves once all of them have had it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.crashing import Crashing
from tests.processes import wait_for

pytestmark = pytest.mark.integration

CAPACITY = 12
LIKE = TensorDict({"x": torch.tensor(0), "reward": torch.tensor(0.0), "prompt": torch.tensor(0)}, [])
BOTH = ("judge", "trainer")


def rows(first: int, num_rows: int) -> TensorDict:
    """Returns rows without a reward, in groups of two."""
    x = torch.arange(first, first + num_rows)
    return TensorDict({"x": x, "prompt": x // 2}, [num_rows])


def test_rows_when_both_consumers_have_had_them_then_leave_and_a_writer_that_waits_goes_on(
    client: tdserve.Client, name: str
) -> None:
    table = client.create_replay(name, LIKE, CAPACITY, sampler=tdserve.Fifo(), consumers=BOTH)
    table.extend(rows(0, CAPACITY))
    written = table.extend(rows(CAPACITY, 4), return_early=True)
    with table.take(CAPACITY, consumer="judge", require="x") as taken:
        table.set_at_("reward", taken["x"] * 2.0, taken)
    assert not written.done()
    with pytest.raises(tdserve.DeadlineExceededError, match="'judge' has not had 0 rows, 'trainer' has not had 12"):
        table.extend(rows(99, 1), timeout_s=0.1)
    with table.take(4, consumer="trainer") as taken:
        assert torch.equal(taken["reward"], taken["x"] * 2.0)
    assert written.result(timeout=30).tolist() == [0, 1, 2, 3]
    assert table.info()["num_rows"] == len(table) == CAPACITY
    with table.take(CAPACITY - 4, consumer="trainer") as taken:
        assert taken["x"].tolist() == list(range(4, CAPACITY))
    assert len(table) == 4


def test_rows_when_a_consumer_gives_them_back_then_stay(client: tdserve.Client, name: str) -> None:
    table = client.create_replay(name, LIKE, CAPACITY, consumers=BOTH)
    table.extend(rows(0, 4))
    with table.take(4, consumer="judge", require="x"):
        pass
    with pytest.raises(ZeroDivisionError), table.take(4, consumer="trainer", require="x"):
        raise ZeroDivisionError
    assert len(table) == 4
    with table.take(4, consumer="trainer", require="x"):
        pass
    assert len(table) == 0


def test_rows_when_ranks_draw_them_for_a_consumer_then_writers_get_their_room_with_the_next_step(
    client: tdserve.Client, name: str
) -> None:
    table = client.create_replay(name, LIKE, CAPACITY, consumers=("trainer",))
    table.extend(rows(0, CAPACITY))
    options: dict[str, Any] = {"world_size": 2, "consumer": "trainer", "require": "x", "timeout_s": 60.0}

    def train(rank: int) -> list[int]:
        shares = [table.sample(CAPACITY // 2, rank=rank, step=step, **options) for step in range(4)]
        return [x for share in shares for x in share["x"].tolist()]

    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(train, rank) for rank in range(2)]
        for first in range(CAPACITY, 4 * CAPACITY, CAPACITY // 2):
            table.extend(rows(first, CAPACITY // 2), timeout_s=60.0)
        seen = [x for rank in ranks for x in rank.result()]
    assert sorted(seen) == list(range(4 * CAPACITY))


def test_sample_when_too_few_are_left_for_a_consumer_then_the_error_counts_what_its_draws_keep(
    client: tdserve.Client, name: str
) -> None:
    table = client.create_replay(name, LIKE, CAPACITY, consumers=BOTH)
    table.extend(rows(0, CAPACITY))
    table.take(CAPACITY, consumer="judge", require="x")
    options: dict[str, Any] = {"consumer": "trainer", "require": "x", "group_by": "prompt", "group_size": 2}
    for rank in range(2):
        table.sample(4, rank=rank, world_size=2, **options)
    assert len(table) == CAPACITY
    with pytest.raises(tdserve.DeadlineExceededError, match=r"of whose 12 rows .*\(8 that 'trainer' has had are kept"):
        table.sample(4, rank=0, world_size=2, step=1, timeout_s=0, **options)


def test_rows_when_too_old_for_a_consumer_then_leave(client: tdserve.Client, name: str) -> None:
    policy = f"policy-{name}"
    weights = TensorDict({"w": torch.zeros(1)})
    client.publish(policy, weights)
    table = client.create_replay(name, LIKE, CAPACITY, policy=policy, consumers=BOTH)
    table.extend(rows(0, 6))
    for _ in range(2):
        client.publish(policy, weights)
    table.extend(rows(6, 2))
    with table.take(2, consumer="trainer", require="x", max_lag=1) as taken:
        assert sorted(taken["x"].tolist()) == [6, 7]
    assert (len(table), table.info()["num_discarded"]) == (2, 6)


def test_consumer_when_it_is_none_of_those_named_then_refused_and_nothing_changes(
    client: tdserve.Client, name: str
) -> None:
    table = client.create_replay(name, LIKE, CAPACITY, consumers=BOTH)
    table.extend(rows(0, 4))
    for consumer in ("critic", ""):
        with pytest.raises(tdserve.InvalidRequestError, match="'judge', 'trainer'"):
            table.take(1, consumer=consumer, require="x")
    assert len(table.sample(3, require="x")) == 3
    assert table.info()["num_leased"] == 0
    with pytest.raises(tdserve.StoreExistsError):
        client.create_replay(name, LIKE, CAPACITY, consumers=("judge",), exists_ok=True)


@pytest.mark.slow
def test_rows_when_the_server_is_killed_again_and_again_then_each_comes_once_to_both_and_leaves(tmp_path: Path) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(timeout_s=60.0) as client:
        table = client.create_replay("jobs", LIKE, CAPACITY, sampler=tdserve.Fifo(), consumers=BOTH)
        had: dict[str, list[int]] = {consumer: [] for consumer in BOTH}
        for turn in range(4):
            table.extend(rows(8 * turn, 8))
            for consumer, num_rows in (("judge", 8), ("trainer", 5), ("trainer", 3)):
                held = table.take(num_rows, consumer=consumer, require="x")
                with held as taken:
                    had[consumer] += taken["x"].tolist()
                crashing.restart()
            wait_for(lambda: table.info()["num_rows"] == 0, "the end of all rows")
        assert {consumer: sorted(numbers) for consumer, numbers in had.items()} == {
            consumer: list(range(32)) for consumer in BOTH
        }


def test_rows_when_there_is_one_consumer_then_leave_with_its_acknowledgement(client: tdserve.Client, name: str) -> None:
    table = client.create_replay(name, LIKE, CAPACITY, consumers=["trainer"])
    table.extend(rows(0, 4))
    assert table.info()["backlog"] == {"trainer": 4}
    with table.take(CAPACITY, min_rows=1, consumer="trainer", require="x") as taken:
        assert taken["x"].tolist() == [0, 1, 2, 3]
    assert len(table) == 0
    table.extend(rows(4, 2))
    with table.batches(CAPACITY, min_rows=1, consumer="trainer", require="x") as batches:
        assert next(batches)["x"].tolist() == [4, 5]
    with pytest.raises(tdserve.InvalidRequestError) as caught:
        table.batches(CAPACITY, min_rows=1)
    assert caught.value.argument == "min_rows"
