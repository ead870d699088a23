"""Readers of a table that is closed: they get the rows that are left, also those that are completed later, and then the
end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration

LIKE = TensorDict({"x": torch.tensor(0), "reward": torch.tensor(0.0)})


def make_rows(num_rows: int, *, is_whole: bool = True) -> TensorDict:
    """Returns numbered rows; those that are not whole lack the reward."""
    rows = TensorDict({"x": torch.arange(num_rows)}, [num_rows])
    return rows.set("reward", torch.ones(num_rows)) if is_whole else rows


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of one server, and of two."""
    folder = tmp_path_factory.mktemp("closed")
    with tdserve.Server(folder / "0") as first, tdserve.Server(folder / "1") as second:
        yield {"alone": first.address, "shared": f"{first.address},{second.address}"}


@pytest.fixture(params=[("alone", "shm"), ("alone", "gloo"), ("shared", "auto")], ids=lambda param: param[1])
def user(request: pytest.FixtureRequest, addresses: dict[str, str]) -> Iterator[Any]:
    where, transport = request.param
    with tdserve.connect(addresses[where], transport=transport) as client:
        yield client


def create(user: Any, name: str, call: str = "create_replay", **options: Any) -> Any:
    """Creates a table, of several shards if there are several servers."""
    shards = {"shards": "all"} if isinstance(user, tdserve.ClusterClient) else {}
    return getattr(user, call)(name, LIKE, 128, **shards, **options)


def test_batches_when_rows_are_used_up_then_they_end_with_the_last_whole_one(user: Any, name: str) -> None:
    table = create(user, name, max_times_sampled=1)
    table.extend(make_rows(11))
    table.close()
    with table.batches(4, timeout_s=20) as batches:
        had = [int(number) for batch in batches for number in batch["x"]]
        assert len(had) == len({*had}) == 8
        with pytest.raises(StopIteration):
            next(batches)
    with pytest.raises(tdserve.EndOfStreamError, match="closed, and 3 rows are left to draw, where 4 are needed"):
        table.sample(4, timeout_s=20)
    assert sorted([*had, *table.sample(3)["x"].tolist()]) == [*range(11)]


def test_batches_when_of_ranks_then_all_end_after_the_same_step(user: Any, name: str) -> None:
    table = create(user, name, max_times_sampled=1)
    table.extend(make_rows(30))
    table.close()
    had = []
    for rank in (0, 1):
        with table.batches(4, rank=rank, world_size=2, step=0, timeout_s=20) as batches:
            had.append([batch["x"].tolist() for batch in batches])
    assert len(had[0]) == len(had[1]) >= 2
    numbers = [number for batches in had for batch in batches for number in batch]
    assert len({*numbers}) == len(numbers)


@pytest.mark.parametrize(
    "options",
    [
        {"min_size": 30},
        {"limiter": tdserve.SampleToInsertRatio(ratio=1, min_size=30, error_buffer=60)},
        {"sampler": tdserve.WithoutReplacement()},
    ],
    ids=["min_size", "ratio", "without replacement"],
)
def test_batches_when_a_rule_waits_for_more_rows_then_the_end_of_a_closed_table_strands_none(
    user: Any, name: str, options: dict[str, Any]
) -> None:
    table = create(user, name, max_times_sampled=1, **options)
    table.extend(make_rows(40))
    table.close()
    with table.batches(7, timeout_s=20) as batches:
        had = [int(number) for batch in batches for number in batch["x"]]
    assert len({*had}) == len(had) == 35
    with pytest.raises(tdserve.EndOfStreamError) as raised:
        table.sample(7, timeout_s=20)
    assert sorted([*had, *table.sample(raised.value.num_left)["x"].tolist()]) == [*range(40)]


def test_sample_when_too_few_rows_are_left_for_all_ranks_then_the_end_names_their_number(user: Any, name: str) -> None:
    table = create(user, name)
    table.extend(make_rows(10))
    table.close()
    with pytest.raises(tdserve.EndOfStreamError, match=r"and 10 rows are left to draw, where 12 are needed$") as caught:
        table.sample(6, rank=0, world_size=2, timeout_s=20)
    assert (caught.value.num_left, caught.value.num_needed) == (10, 12)


def test_sample_when_the_table_is_closed_meanwhile_then_its_wait_ends(user: Any, name: str) -> None:
    table = create(user, name, max_times_sampled=1)
    table.extend(make_rows(3))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(table.sample, 4, timeout_s=60)
        with pytest.raises(tdserve.DeadlineExceededError):
            table.sample(4, timeout_s=0.1)
        table.close()
        with pytest.raises(tdserve.EndOfStreamError):
            waiting.result(20)


@pytest.mark.parametrize("call", ["create_replay", "create_queue"])
def test_batches_when_rows_get_their_last_leaf_after_the_close_then_they_come_too(
    user: Any, name: str, call: str
) -> None:
    table = create(user, name, call)
    index = table.extend(make_rows(6, is_whole=False))
    table.close()
    consumer = {} if call == "create_queue" else {"consumer": "trainer"}
    with pytest.raises(tdserve.DeadlineExceededError, match=r"reward|all leaves"):
        table.take(2, timeout_s=0.2, **consumer)
    table.set_at_("reward", torch.ones(6), index)
    with table.batches(4, timeout_s=20, **consumer) as batches:
        assert sorted(int(number) for batch in batches for number in batch["x"]) == [*range(6)]


def test_batches_when_another_consumer_has_rows_on_lease_then_they_end_nevertheless(user: Any, name: str) -> None:
    table = create(user, name, consumers=("judge", "trainer"))
    table.extend(make_rows(6))
    table.close()
    with table.take(2, consumer="trainer"), table.batches(4, consumer="judge", timeout_s=20) as batches:
        assert sorted(int(number) for batch in batches for number in batch["x"]) == [*range(6)]


def test_take_when_a_lease_of_the_same_consumer_may_come_back_then_it_waits(user: Any, name: str) -> None:
    table = create(user, name, "create_queue")
    table.extend(make_rows(4))
    table.close()
    with suppress(InterruptedError), table.take(4):
        with pytest.raises(tdserve.DeadlineExceededError):
            table.take(4, timeout_s=0.2)
        raise InterruptedError
    with table.take(4, timeout_s=20) as rows:
        assert len(rows) == 4
    with pytest.raises(tdserve.EndOfStreamError):
        table.take(4, timeout_s=20)


@pytest.mark.parametrize("consumers", [None, ("judge", "trainer")], ids=["free", "named"])
@pytest.mark.parametrize(
    "sampler",
    [
        tdserve.Uniform(),
        tdserve.Fifo(),
        tdserve.Lifo(),
        tdserve.WithoutReplacement(),
        tdserve.Prioritized(),
        tdserve.HighestPriority(),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_take_when_rows_are_enough_then_as_many_as_asked_and_the_rest_after_the_close(
    user: Any, name: str, sampler: Any, consumers: tuple[str, ...] | None
) -> None:
    table = create(user, name, sampler=sampler, consumers=consumers)
    table.extend(make_rows(10))
    taken = table.take(4, consumer="judge", ack=False, timeout_s=20)["x"].tolist()  # on lease from now on
    with table.take(4, consumer="judge", timeout_s=20) as rows:
        taken += rows["x"].tolist()
    with pytest.raises(tdserve.DeadlineExceededError):
        table.take(4, consumer="judge", timeout_s=0.1)
    assert len(taken) == 8
    table.close()
    with table.take(4, consumer="judge", timeout_s=20) as rows:
        taken += rows["x"].tolist()
    assert sorted(taken) == [*range(10)]
    batches = [batch["x"].tolist() for batch in table.batches(4, consumer="trainer", timeout_s=20)]
    assert [len(numbers) for numbers in batches] == [4, 4, 2]
    assert sorted(number for numbers in batches for number in numbers) == [*range(10)]


def test_take_when_a_closed_table_had_to_have_more_rows_then_no_more_than_asked(user: Any, name: str) -> None:
    table = create(user, name, min_size=20)
    table.extend(make_rows(10))
    table.close()
    batches = [batch["x"].tolist() for batch in table.batches(4, consumer="trainer", timeout_s=20)]
    assert [len(numbers) for numbers in batches] == [4, 4, 2]
