"""The state of a table besides its rows, after its server was shut down or killed, and started again on the same
root."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.crashing import Crashing

pytestmark = pytest.mark.integration


def rows(*numbers: int) -> TensorDict:
    """Rows that show their numbers; each ten are one trajectory."""
    number = torch.tensor(numbers, dtype=torch.int64)
    truncated = torch.zeros(len(numbers), 1, dtype=torch.bool)
    return TensorDict({"number": number, "next": {"truncated": truncated}, "tenth": number // 10}, [len(numbers)])


def numbers(td: Any) -> list[int]:
    """The number of each row."""
    found: list[int] = td["number"].tolist()
    return found


SETTINGS: dict[str, Any] = {
    "sampler": tdserve.Slices(num_slices=2, end_key=("next", "truncated"), strict_length=False),
    "limiter": tdserve.SampleToInsertRatio(2.5, min_size=3, error_buffer=50.0),
}


class Tables:
    """A filled table for each rule, and the state that each shows."""

    server: tdserve.Server
    """The one that was started again."""

    def __init__(self, client: tdserve.Client) -> None:
        like = rows(0)[0]
        self.prioritized: Any = client.create_replay(
            "prioritized", like, 8, sampler=tdserve.Prioritized(alpha=1.0, eps=0.0)
        )
        self.prioritized.extend(rows(*range(6)), priority=torch.arange(6.0))
        self.prioritized.update_priority([1, 2], [7.0, 0.0])
        self.counted: Any = client.create_replay("counted", like, 8, sampler=tdserve.Fifo(), max_times_sampled=3)
        self.counted.extend(rows(*range(6)))
        for num_rows in (4, 4, 2):  # now 3, 3, 2, 2, 0, 0 times
            self.counted.sample(num_rows)
        self.newest: Any = client.create_replay("newest", like, 6, sampler=tdserve.Lifo())
        self.newest.extend(rows(*range(6)))
        self.newest.extend(rows(6, 7, 8))
        self.newest.delete([4])
        self.lowest: Any = client.create_replay("lowest", like, 4, remover=tdserve.LowestPriority())
        self.lowest.extend(rows(0, 1, 2, 3), priority=[4.0, 1.0, 3.0, 2.0])
        self.first: Any = client.create_replay("first", like, 4, remover=tdserve.Lifo())
        self.first.extend(rows(0, 1, 2, 3))
        self.shared: Any = client.create_replay("shared", like, 8)
        self.shared.extend(rows(*range(6)))
        self.had = {consumer: numbers(self.shared.sample(3, consumer=consumer)) for consumer in ("a", "b")}
        self.shared.take(2, consumer="a", ack=False)
        self.sliced: Any = client.create_replay(
            "sliced", like, 16, sampler=tdserve.Slices(slice_len=3, trajectory_key="tenth")
        )
        for start in range(0, 20, 2):  # goes round
            self.sliced.extend(rows(start, start + 1))
        self.limited: Any = client.create_replay("limited", like, 8)
        self.limited.extend(rows(*range(4)))
        self.limited.sample(2)
        self.limited.set_limiter(tdserve.SampleToInsertRatio(1.0, min_size=2, error_buffer=4.0))
        ratio = tdserve.SampleToInsertRatio(1.0, min_size=1, error_buffer=4.0)
        self.rationed: Any = client.create_replay("rationed", like, 8, limiter=ratio)
        self.rationed.extend(rows(0, 1))
        self.rationed.sample(4)
        self.rationed.extend(rows(2))
        self.rationed.sample(1)  # nothing puts this on record
        self.weighted: Any = client.create_replay("weighted", like, 8, sampler=tdserve.Prioritized(beta=0.4))
        self.weighted.set_sampler(tdserve.Prioritized(beta=0.8))
        self.closed: Any = client.create_queue("closed", like, 8)
        self.closed.extend(rows(*range(5)))
        with self.closed.take(2):
            pass
        self.closed.take(2, ack=False)
        self.closed.close()
        self.described = client.create_replay("described", like, 10, **SETTINGS).info()["settings"]


@pytest.fixture(scope="module", params=["shut down", "killed"])
def tables(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tables]:
    """Tables that have been through it."""
    folder = tmp_path_factory.mktemp("restarted")
    with Crashing(folder) as crashing, crashing.server.client(timeout_s=60.0) as client:
        found = Tables(client)
        if request.param == "killed":
            crashing.kill()
        crashing.start()
        found.server = crashing.server
        yield found


@pytest.mark.slow
def test_priorities_when_restarted_then_as_before(tables: Tables) -> None:
    replay = tables.prioritized
    batch = replay.sample(600)
    expected = {1: 7.0, 3: 3.0, 4: 4.0, 5: 5.0}
    assert dict(zip(numbers(batch), batch["priority"].tolist(), strict=True)) == expected
    share = {number: value / sum(expected.values()) for number, value in expected.items()}
    assert batch["probability"].tolist() == pytest.approx([share[number] for number in numbers(batch)])
    replay.extend(rows(6))
    batch = replay.sample(600)
    assert set(batch["priority"][batch["number"] == 6].tolist()) == {7.0}, "the highest so far"


def test_times_sampled_when_restarted_then_counts_on(tables: Tables) -> None:
    replay = tables.counted
    assert sorted(numbers(replay[:])) == [2, 3, 4, 5]
    batch = replay.sample(4)
    assert (numbers(batch), batch["times_sampled"].tolist()) == ([2, 3, 4, 5], [3, 3, 1, 1])
    assert sorted(numbers(replay[:])) == [4, 5]


def test_order_when_restarted_then_rows_are_as_old_as_before(tables: Tables) -> None:
    replay = tables.newest
    assert numbers(replay.sample(5)) == [8, 7, 6, 5, 3]
    replay.extend(rows(9))
    assert numbers(replay.sample(2)) == [9, 8]


def test_removers_when_restarted_then_the_least_important_row_goes(tables: Tables) -> None:
    tables.lowest.extend(rows(4), priority=2.5)
    tables.lowest.extend(rows(5), priority=9.0)
    assert sorted(numbers(tables.lowest[:])) == [0, 2, 4, 5]
    tables.first.extend(rows(4))
    tables.first.extend(rows(5, 6))
    assert sorted(numbers(tables.first[:])) == [0, 1, 5, 6]


def test_consumers_when_restarted_then_each_has_had_what_it_acknowledged(tables: Tables) -> None:
    for consumer, had in tables.had.items():
        left = numbers(tables.shared.sample(3, consumer=consumer))
        assert sorted(had + left) == [*range(6)]
        with pytest.raises(tdserve.DeadlineExceededError, match=consumer):
            tables.shared.sample(1, consumer=consumer, timeout_s=0)
    assert tables.shared.info()["num_leased"] == 0


def test_trajectories_when_restarted_then_slices_are_those_of_before(tables: Tables) -> None:
    starts = [7, *range(10, 18)]  # 4 to 19 are left, and 10 begins a trajectory
    assert set(tables.sliced.sample(3000)["number"][::3].tolist()) == {4, 5, 6, *starts}
    tables.sliced.extend(rows(20, 21, 22))
    assert set(tables.sliced.sample(3000)["number"][::3].tolist()) == {*starts, 20}


def test_limiter_when_restarted_then_the_one_that_was_set_last(tables: Tables) -> None:
    with pytest.raises(tdserve.DeadlineExceededError, match=r"inserts 4, samples 2.*ratio=1\.0") as raised:
        tables.limited.sample(7, timeout_s=0)
    assert "at least -2" in str(raised.value)
    assert len(tables.limited.sample(4)) == 4


def test_ratio_when_restarted_then_all_samples_before_count(tables: Tables) -> None:
    with pytest.raises(tdserve.DeadlineExceededError, match="inserts 3, samples 5"):
        tables.rationed.sample(2, timeout_s=0)
    assert len(tables.rationed.sample(1)) == 1


def test_queue_when_restarted_then_closed_with_what_was_not_acknowledged(tables: Tables) -> None:
    queue = tables.closed
    assert queue.info()["is_closed"]
    with pytest.raises(tdserve.WrongStateError, match="closed"):
        queue.extend(rows(9))
    assert [numbers(batch) for batch in queue.batches(2)] == [[2, 3], [4]]
    with pytest.raises(tdserve.EndOfStreamError):
        queue.take(1)


def test_sampler_when_changed_before_the_restart_then_it_stays_changed(tables: Tables) -> None:
    with tables.server.client(timeout_s=60.0) as fresh:
        like, created = rows(0)[0], tdserve.Prioritized(beta=0.4)
        found = fresh.create_replay("weighted", like, 8, sampler=created, exists_ok=True)
        assert found.settings.sampler == tdserve.Prioritized(beta=0.8)


def test_settings_when_restarted_then_a_new_client_finds_them(tables: Tables) -> None:
    with tables.server.client(timeout_s=60.0) as fresh:
        found = fresh.replay("described")
        assert found.info()["settings"] == tables.described
        assert found.settings.sampler == SETTINGS["sampler"]
        assert found.settings.limiter == SETTINGS["limiter"]
        assert len(fresh.create_replay("described", rows(0)[0], 10, exists_ok=True, **SETTINGS)) == 0
