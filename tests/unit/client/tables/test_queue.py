from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import DeadlineExceededError, EndOfStreamError, InvalidRequestError, WrongStateError


def rows(*numbers: int) -> TensorDict:
    """Returns rows that hold their own numbers."""
    return TensorDict({"a": torch.tensor(numbers)}, [len(numbers)])


@pytest.fixture
def queue(client: tdserve.Client, name: str) -> tdserve.QueueHandle:
    """A queue for six rows that holds four."""
    made: tdserve.QueueHandle = client.create_queue(name, rows(0)[0], 6)
    made.extend(rows(1, 2, 3, 4))
    return made


@pytest.mark.parametrize("num_rows", [0, -1, 1.0, True, None])
def test_take_when_the_number_is_none_then_error(queue: tdserve.QueueHandle, num_rows: Any) -> None:
    for call in (queue.take, queue.batches):
        with pytest.raises(InvalidRequestError) as raised:
            call(num_rows)
        assert raised.value.argument == "num_rows"


def test_take_when_the_block_ends_then_the_rows_are_gone(queue: tdserve.QueueHandle) -> None:
    with queue.take(3) as taken:
        assert taken["a"].tolist() == [1, 2, 3]
        assert queue.info()["num_leased"] == 3
    assert (len(queue), queue.info()["num_leased"]) == (1, 0)


def test_take_when_without_a_block_then_acknowledged_by_hand_and_once(queue: tdserve.QueueHandle) -> None:
    taken = queue.take(2, ack=False)
    assert len(queue) == 4
    queue.ack(taken)
    assert len(queue) == 2
    with pytest.raises(WrongStateError):
        queue.ack(taken)
    assert queue[:]["a"].tolist() == [3, 4]


@pytest.mark.parametrize("numpy", [False, True])
def test_ack_when_the_argument_names_no_rows_then_error_with_what_to_give_and_nothing_changes(
    queue: tdserve.QueueHandle, numpy: bool
) -> None:
    rows, taken = queue.take(2, ack=False, numpy=numpy), queue.take(1)
    unnamed = {
        "a batch without 'index' names": {"a": rows["a"]},
        "which has an ack": taken,
        "list names": [rows, rows],
        " of .*float": rows["a"] / 2,
        "NoneType names": None,
    }
    for match, given in unnamed.items():
        with pytest.raises(InvalidRequestError, match=rf"{match}.*; give the batch that take\(n, ack=False\)"):
            queue.ack(given)
    assert queue.info()["num_leased"] == 3
    queue.ack(rows["index"][:0])
    queue.ack(rows["index"][:1])
    assert queue.info()["num_leased"] == 2
    taken.give_back()


def test_take_when_there_are_too_few_then_error_and_nothing_was_taken(queue: tdserve.QueueHandle) -> None:
    with pytest.raises(DeadlineExceededError, match="size 4 of 6"):
        queue.take(5, timeout_s=0)
    assert queue.info()["num_leased"] == 0
    with pytest.raises(InvalidRequestError, match=r"(max_size|capacity of) 6"):
        queue.take(7)


def test_batches_when_iterated_then_each_is_acknowledged_with_the_next(queue: tdserve.QueueHandle) -> None:
    queue.close()
    seen: list[int] = []
    for batch in queue.batches(3):
        assert len(queue) == 4 - len(seen)
        seen += batch["a"].tolist()
    assert seen == [1, 2, 3, 4]
    assert len(queue) == 0


def test_queue_when_closed_then_drained_and_over(queue: tdserve.QueueHandle) -> None:
    queue.close()
    with pytest.raises(WrongStateError, match="closed"):
        queue.extend(rows(5))
    with queue.take(6) as taken:
        assert taken["a"].tolist() == [1, 2, 3, 4]
    with pytest.raises(EndOfStreamError, match=f"'{queue.name}' is closed, and 0 rows are left"):
        queue.take(1)
    assert queue.info()["is_closed"]
