"""Takes of all rows that are there (``min_rows``), and takes by priority."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

import tdserve
from tdserve.client.session.calls.cancellation import Cancellation
from tdserve.client.tables.draws import query
from tests.integration.numbered_rows import LARGE, SMALL, numbers, rows
from tests.processes import wait_for

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_take_when_fewer_rows_are_there_then_all_of_them(client: tdserve.Client, name: str, size: int) -> None:
    queue = client.create_queue(name, rows(0, size=size)[0], 12)
    queue.extend(rows(*range(5), size=size))
    with queue.take(8, min_rows=2) as batch:
        assert numbers(batch) == [0, 1, 2, 3, 4]
    queue.extend(rows(*range(5, 15), size=size))
    assert numbers(queue.take(8, min_rows=2, ack=False)) == [*range(5, 13)]
    with pytest.raises(tdserve.DeadlineExceededError, match="a sample of 3 rows"):
        queue.take(8, min_rows=3, timeout_s=0)
    assert numbers(queue.take(100, min_rows=1, ack=False)) == [13, 14]  # more than it ever holds


def test_take_when_too_few_rows_are_there_then_waits_for_the_fewest(client: tdserve.Client, name: str) -> None:
    queue = client.create_queue(name, rows(0)[0], 12)
    waiting = client.run_later(lambda: queue.take(8, min_rows=3, ack=False, timeout_s=30.0))
    wait_for(lambda: queue.info()["num_waiting"] == 1, "a taker that waits")
    queue.extend(rows(0, 1))
    queue.extend(rows(2))
    assert numbers(waiting.result(20.0)) == [0, 1, 2]


def test_batches_when_rows_come_slowly_then_it_hands_out_what_is_there(client: tdserve.Client, name: str) -> None:
    queue = client.create_queue(name, rows(0)[0], 12)
    found = []
    with queue.batches(4, min_rows=1) as batches:
        for sent in ([0], [1, 2], [3, 4, 5, 6]):
            queue.extend(rows(*sent))
            found.append(numbers(next(batches)))
    assert found == [[0], [1, 2], [3, 4, 5, 6]]
    assert len(queue) == 0


@pytest.mark.parametrize("min_rows", [0, 9, 1.5, "1"])
def test_take_when_the_fewest_rows_are_impossible_then_refused(
    client: tdserve.Client, name: str, min_rows: Any
) -> None:
    queue = client.create_queue(name, rows(0)[0], 12)
    queue.extend(rows(*range(8)))
    with pytest.raises(tdserve.InvalidRequestError) as caught:
        queue.take(8, min_rows=min_rows)
    assert caught.value.argument == "min_rows"
    assert len(queue) == 8


def test_take_when_groups_are_taken_then_whole_ones(client: tdserve.Client, name: str) -> None:
    row = rows(0).set("prompt", torch.zeros(1, dtype=torch.int64))[0]
    table = client.create_replay(name, row, 20)
    table.extend(rows(*range(7)).set("prompt", torch.arange(7) // 3))
    grouped: dict[str, Any] = {"consumer": "trainer", "group_by": "prompt", "group_size": 3}
    with table.take(12, min_rows=4, **grouped) as batch:
        assert sorted(numbers(batch)) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(tdserve.DeadlineExceededError):
        table.take(12, min_rows=1, timeout_s=0, **grouped)


def test_take_when_some_rows_have_no_priority_then_the_others(client: tdserve.Client, name: str) -> None:
    table = client.create_replay(name, rows(0)[0], 8, sampler=tdserve.Prioritized(eps=0.0))
    table.extend(rows(*range(4)), priority=[1.0, 0.0, 0.01, 3.0])
    with table.take(4, min_rows=1, consumer="trainer") as batch:
        assert sorted(numbers(batch)) == [0, 2, 3]


def test_take_when_a_queue_goes_by_priority_then_the_most_urgent_first_and_the_oldest_of_them(
    client: tdserve.Client, name: str
) -> None:
    queue = client.create_queue(name, rows(0)[0], 12, sampler=tdserve.HighestPriority())
    queue.extend(rows(0, 1, 2), priority=[1.0, 5.0, 1.0])
    queue.extend(rows(3, 4), priority=5.0)
    taken = queue.take(2)
    with pytest.raises(KeyError), taken:
        raise KeyError
    assert numbers(queue.take(9, min_rows=1, ack=False)) == [1, 3, 4, 0, 2]


@pytest.mark.parametrize("consumer", [None, "trainer"])
def test_take_when_its_lease_was_freed_and_another_call_has_the_rows_then_it_cannot_end_that_lease(
    client: tdserve.Client, name: str, consumer: str | None
) -> None:
    table: Any = client.create_queue(name, rows(0)[0], 8)
    options = {} if consumer is None else {"consumer": consumer}
    if consumer is not None:
        table = client.create_replay(f"{name}-replay", rows(0)[0], 8)
    table.extend(rows(0, 1))
    cancellation = Cancellation()
    with cancellation.watch():
        earlier = table.take(2, **options)
    cancellation.cancel()  # as when a task ends that does not get them
    wait_for(lambda: table.info()["num_leased"] == 0, "the end of the lease")
    later = table.take(2, **options)
    earlier.give_back()
    assert table.info()["num_leased"] == 2
    with pytest.raises(tdserve.WrongStateError):
        earlier.ack()
    assert table.info()["num_leased"] == 2
    later.ack()
    assert table.info()["num_leased"] == 0


def test_sample_when_its_rows_cannot_be_given_the_form_that_was_asked_for_then_the_consumer_has_not_had_them(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = client.create_replay(name, rows(0)[0], 8)
    table.extend(rows(0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(query, "to_arrays", run_out_of_memory)
        with pytest.raises(MemoryError):
            table.sample(2, consumer="trainer", numpy=True)
    assert sorted(numbers(table.sample(2, consumer="trainer"))) == [0, 1]


def run_out_of_memory(found: Any) -> NoReturn:
    """Fails as the copy of a batch may, to a device or into arrays."""
    raise MemoryError
