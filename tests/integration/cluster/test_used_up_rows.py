"""Rows of a shared table that leave it when they were drawn often enough: each of them is drawn, and none is lost."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("borrows_nothing")]

NUM_ROWS = 90

ROW = TensorDict({"x": torch.tensor(0), "group": torch.tensor(0)}, [])


def rows(num_rows: int = NUM_ROWS, group_size: int = 1) -> TensorDict:
    """Rows that differ, in groups of neighbours."""
    x = torch.arange(num_rows)
    return TensorDict({"x": x, "group": x // group_size}, [num_rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "times"),
    [
        (tdserve.Uniform(), 1),
        (tdserve.Uniform(), 2),
        (tdserve.Prioritized(), 1),
        (tdserve.Prioritized(), 2),
        (tdserve.Fifo(), 1),
        (tdserve.WithoutReplacement(), 1),
    ],
    ids=str,
)
def test_sample_when_rows_leave_after_their_draws_then_all_of_them_are_drawn(
    user: tdserve.ClusterClient, name: str, sampler: Any, times: int
) -> None:
    table = user.create_replay(
        name, like=ROW, capacity=300, sampler=sampler, max_times_sampled=times, shards="all", shard_by="x"
    )
    for _ in range(2):
        table.extend(rows())
        drawn: Counter[int] = Counter()
        for _ in range(9 * times):
            drawn.update(table.sample(10)["x"].tolist())
        assert drawn == dict.fromkeys(range(NUM_ROWS), times)
        assert len(table) == 0


@pytest.mark.slow
def test_sample_when_whole_groups_leave_then_all_of_them_are_drawn(user: tdserve.ClusterClient, name: str) -> None:
    table = user.create_replay(name, like=ROW, capacity=300, max_times_sampled=1, shards="all", shard_by="group")
    for _ in range(2):
        table.extend(rows(group_size=3))
        drawn = [table.sample(15, group_by="group", group_size=3)["x"] for _ in range(NUM_ROWS // 15)]
        assert torch.cat(drawn).sort().values.tolist() == list(range(NUM_ROWS))


@pytest.mark.slow
def test_sample_when_others_draw_at_the_same_time_then_each_row_goes_to_one_of_them(
    user: tdserve.ClusterClient, address: str, name: str
) -> None:
    table = user.create_replay(name, like=ROW, capacity=300, max_times_sampled=1, shards="all", shard_by="x")
    table.extend(rows())

    def draw(_: int) -> list[int]:
        with tdserve.connect(address) as client:
            found = [client.replay(name).sample(5, timeout_s=60.0)["x"] for _ in range(NUM_ROWS // 3 // 5)]
            return [int(x) for x in torch.cat(found)]

    with ThreadPoolExecutor(3) as threads:
        assert sorted(chain.from_iterable(threads.map(draw, range(3)))) == list(range(NUM_ROWS))


@pytest.mark.slow
def test_sample_when_too_few_rows_are_left_then_none_is_drawn(client: tdserve.ClusterClient, name: str) -> None:
    table = client.create_replay(name, like=ROW, capacity=300, max_times_sampled=1, shards="all", shard_by="x")
    table.extend(rows(10))
    with pytest.raises(tdserve.DeadlineExceededError):
        table.sample(11, timeout_s=0.2)
    assert sorted(table.sample(10)["x"].tolist()) == list(range(10))


def test_rows_when_all_named_consumers_have_had_them_then_leave_every_shard_and_writers_go_on(
    user: tdserve.ClusterClient, name: str
) -> None:
    consumers = ("judge", "trainer")
    table = user.create_replay(name, like=ROW, capacity=30, consumers=consumers, shards="all", shard_by="x")
    table.extend(rows(12))
    for consumer in consumers:
        assert len(table) == 12
        had: list[int] = []
        while len(had) < 12:
            with table.take(4, consumer=consumer) as taken:
                had += taken["x"].tolist()
        assert sorted(had) == list(range(12))
    assert len(table) == 0
    with pytest.raises(tdserve.InvalidRequestError, match="'judge', 'trainer'"):
        table.take(1, consumer="critic", timeout_s=10.0)
    for _ in range(3):
        table.extend(rows(9))
        for consumer in consumers:
            with table.take(9, consumer=consumer):
                pass


@pytest.mark.parametrize("sampler", [tdserve.Uniform(), tdserve.Prioritized()], ids=str)
def test_batches_when_the_rows_of_a_closed_table_have_too_few_draws_left_then_they_end(
    user: tdserve.ClusterClient, name: str, sampler: Any
) -> None:
    for number in range(3):  # which rows are left is chance
        table = user.create_replay(
            f"{name}-{number}", ROW, 64, sampler=sampler, max_times_sampled=2, shards="all", shard_by="x"
        )
        table.extend(rows(9))
        table.close()
        drawn = Counter(chain.from_iterable(batch["x"].tolist() for batch in table.batches(4, timeout_s=20.0)))
        assert drawn.total() == 16
        drawn.update(chain.from_iterable(batch["x"].tolist() for batch in table.batches(1, timeout_s=20.0)))
        assert drawn == dict.fromkeys(range(9), 2)


def test_sample_when_several_readers_use_up_a_closed_table_then_each_row_comes_and_all_of_them_end(
    user: tdserve.ClusterClient, name: str
) -> None:
    table = user.create_replay(name, ROW, 300, max_times_sampled=2, shards="all", shard_by="x")
    table.extend(rows())
    table.close()

    def drain(_: int) -> list[int]:
        return [x for batch in table.batches(7, prefetch=1, timeout_s=20.0) for x in batch["x"].tolist()]

    with ThreadPoolExecutor(4) as threads:
        drawn = Counter(chain.from_iterable(threads.map(drain, range(4))))
    drawn.update(x for batch in table.batches(1, timeout_s=20.0) for x in batch["x"].tolist())
    # A row that two readers draw may have left for one of them before the other has copied it.
    assert set(drawn) == set(range(NUM_ROWS))
    assert max(drawn.values()) <= 2
    assert len(table) == 0
