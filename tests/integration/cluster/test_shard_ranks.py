"""Draws for ranks from a shared table: the rows that may be drawn divide a step among shards, not all rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.cluster.tables import shard_shares
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.sampling import draw_whole_rows

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0

ROW = TensorDict({"number": torch.tensor(0), "group": torch.tensor(0), "reward": torch.tensor(0.0)}, [])


def fill(table: Any, num_rows: int, start: int = 0) -> None:
    """Writes so many rows with rewards to each shard, in groups of four neighbours."""
    for shard in range(3):
        writer = next(number for number in range(1, 1000) if table.choose_shard(number) == shard)
        number = torch.arange(num_rows) + start + shard * num_rows
        reward = torch.ones(num_rows)
        table.extend(TensorDict({"number": number, "group": number // 4, "reward": reward}, [num_rows]), writer=writer)


def draw(table: Any, num_rows: int, **arguments: Any) -> list[int]:
    """Returns the rows of two ranks."""
    shares = [table.sample(num_rows, rank=rank, world_size=2, **arguments)["number"].tolist() for rank in (0, 1)]
    return [*shares[0], *shares[1]]


def prioritize(table: Any, num_rows: int, num_least: int) -> torch.Tensor:
    """Writes so many rows to each shard, the least likely ones first; returns their priorities by number, as they would
    be in one table."""
    fill(table, num_rows)
    each = torch.cat([torch.full((num_least,), 0.01), torch.linspace(1.5, 2.0, num_rows - num_least)])
    priorities = torch.cat([each * factor for factor in (1, 2, 4)]).double()
    table.update_priority(
        torch.cat([torch.arange(num_rows) + shard * table.part_capacity for shard in range(3)]), priorities
    )
    return priorities


def test_sample_when_prioritized_then_ranks_have_probabilities_and_weights_of_one_table(
    user: tdserve.ClusterClient, address: str, name: str
) -> None:
    table = user.create_replay(name, ROW, 900, shards="all", sampler=tdserve.Prioritized(alpha=1.0, beta=0.5, eps=0.0))
    priorities = prioritize(table, 200, 20)
    with tdserve.connect(address) as other:
        other.replay(name).set_sampler(tdserve.Prioritized(alpha=1.0, beta=0.9, eps=0.0))
    for rank in (0, 1):
        sample = table.sample(4, rank=rank, world_size=2, step=0, timeout_s=TIMEOUT_S)
        mine = priorities[sample["number"]]
        # A row that is drawn after others of its shard is up to 5% more likely, since those are gone.
        expected = mine / priorities.sum()
        torch.testing.assert_close(sample["probability"].double(), expected, rtol=0.06, atol=0)
        expected = (priorities.min() / mine) ** 0.9
        torch.testing.assert_close(sample["priority_weight"].double(), expected, rtol=1e-3, atol=0)
        table.update_priority(torch.arange(200), torch.full((200,), 1e3))  # after the step was divided


def test_sample_when_rows_are_drawn_again_to_differ_then_weights_have_the_exponent_of_the_sampler(
    client: tdserve.ClusterClient, name: str
) -> None:
    sampler = tdserve.Prioritized(alpha=0.7, beta=0.9, eps=0.1)
    table = client.create_replay(name, ROW, 300, shards="all", sampler=sampler)
    masses = (prioritize(table, 12, 10) + 0.1) ** 0.7  # the two likely rows of a shard are often drawn twice
    for step in range(16):
        for rank in (0, 1):
            sample = table.sample(3, rank=rank, world_size=2, step=step, timeout_s=TIMEOUT_S)
            expected = (masses.min() / masses[sample["number"]]) ** 0.9
            torch.testing.assert_close(sample["priority_weight"].double(), expected, rtol=1e-3, atol=0)


def test_sample_when_the_leaf_of_all_rows_comes_late_then_ranks_wait_for_it(
    user: tdserve.ClusterClient, name: str
) -> None:
    table = user.create_replay(name, ROW, 300, shards="all", shard_by="number")
    numbers = torch.arange(40)
    index = table.extend(TensorDict({"number": numbers, "group": numbers}, [40]))
    arguments: dict[str, Any] = {"world_size": 2, "consumer": "trainer"}
    with pytest.raises(tdserve.DeadlineExceededError, match=r"it has 40 live rows .* of which too few have all leaves"):
        table.sample(4, rank=0, timeout_s=0.1, **arguments)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(table.sample, 4, rank=rank, timeout_s=TIMEOUT_S, **arguments) for rank in (0, 1)]
        table.set_at_("reward", torch.ones(40), index)
        shares = [each.result(TIMEOUT_S) for each in waiting]
    assert len({number for share in shares for number in share["number"].tolist()}) == 8


@pytest.mark.slow
@pytest.mark.parametrize("grouping", [{}, {"group_by": "group", "group_size": 4}], ids=["rows", "groups"])
def test_sample_when_the_consumer_has_had_earlier_rows_then_it_gets_all_others(
    user: tdserve.ClusterClient, name: str, grouping: dict[str, Any]
) -> None:
    table = user.create_replay(name, ROW, 900, shards="all")
    for step in range(4):
        fill(table, 24, 72 * step)
        found = draw(table, 36, step=step, consumer="trainer", timeout_s=TIMEOUT_S, **grouping)
        assert sorted(found) == list(range(72 * step, 72 * step + 72))
    with pytest.raises(
        tdserve.DeadlineExceededError, match=r"at shard 2 .*that 'trainer' has had are kept for the ranks"
    ):
        table.sample(36, rank=0, world_size=2, step=4, consumer="trainer", timeout_s=0, **grouping)


@pytest.mark.slow
def test_sample_when_each_step_takes_what_has_come_then_a_rank_that_waits_gets_its_part(
    user: tdserve.ClusterClient, address: str, name: str
) -> None:
    table = user.create_replay(name, ROW, 900, shards="all")

    def read(rank: int) -> list[int]:
        with tdserve.connect(address) as client:
            mine, found = client.replay(name), list[int]()
            for step in range(4):
                options: dict[str, Any] = {"rank": rank, "world_size": 2, "step": step, "timeout_s": TIMEOUT_S}
                found += mine.sample(12, consumer="trainer", **options)["number"].tolist()
            return found

    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(read, rank) for rank in (0, 1)]
        for step in range(4):
            fill(table, 8, 24 * step)
        found = [number for rank in ranks for number in rank.result(4 * TIMEOUT_S)]
    assert sorted(found) == list(range(96))


@pytest.mark.slow
def test_sample_when_without_replacement_then_the_next_epoch_follows(user: tdserve.ClusterClient, name: str) -> None:
    table = user.create_replay(name, ROW, 300, shards="all", sampler=tdserve.WithoutReplacement())
    fill(table, 8)
    for _ in range(3):
        first, second = draw(table, 6, timeout_s=TIMEOUT_S), draw(table, 6, timeout_s=TIMEOUT_S)
        assert sorted(first + second) == list(range(24))


def test_sample_when_no_rows_could_make_it_possible_then_refused_and_the_step_is_free(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, ROW, 300, shards="all")
    fill(table, 16)
    arguments: dict[str, Any] = {"rank": 0, "world_size": 2, "step": 0, "group_by": "group", "group_size": 4}
    with pytest.raises(tdserve.InvalidRequestError, match="6 rows per rank are not a whole number of groups of 4"):
        table.sample(6, **arguments)
    with pytest.raises(tdserve.InvalidRequestError, match="ranks at most 144 each"):
        table.sample(148, **arguments)
    assert len(table.sample(8, **arguments)) == 8


@pytest.mark.slow
def test_sample_when_rows_go_after_the_step_was_divided_then_its_error_names_the_next(
    client: tdserve.ClusterClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = client.create_replay(name, ROW, 300, shards="all")
    fill(table, 4)

    def strike(part: Any, query: Query, *arguments: Any, **options: Any) -> Any:
        if query.name.endswith("#0"):
            table.delete(torch.arange(4))
        return draw_whole_rows(part, query, *arguments, **options)

    arguments: dict[str, Any] = {"rank": 0, "world_size": 2}
    with monkeypatch.context() as patch:
        patch.setattr(shard_shares, "draw_whole_rows", strike)
        with pytest.raises(tdserve.DeadlineExceededError, match=r"step 0 was divided .* go on with step=1"):
            table.sample(6, timeout_s=1.0, **arguments)
    assert sorted(draw(table, 4, step=1, timeout_s=TIMEOUT_S)) == list(range(4, 12))
