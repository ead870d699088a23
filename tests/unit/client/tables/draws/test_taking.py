from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ClosedError,
    DeadlineExceededError,
    InvalidRequestError,
    NotSupportedError,
    RemoteProtocolError,
    WrongStateError,
)
from tdserve.client.tables.draws import query, taken_batches, taking
from tdserve.client.tables.draws.sampling import receive_sample
from tests.errors import raises
from tests.processes import wait_for


def rows(*numbers: int) -> TensorDict:
    """Rows that tell which they are."""
    return TensorDict({"a": torch.tensor(numbers)}, [len(numbers)])


@pytest.fixture
def queue(client: tdserve.Client, name: str) -> tdserve.QueueHandle:
    """A queue of at most eight, four of them there."""
    made: tdserve.QueueHandle = client.create_queue(name, rows(0)[0], 8)
    made.extend(rows(1, 2, 3, 4))
    return made


@pytest.fixture
def replay(client: tdserve.Client, name: str) -> tdserve.ReplayHandle:
    """A full ring of four."""
    made: tdserve.ReplayHandle = client.create_replay(f"{name}.ring", rows(0)[0], 4)
    made.extend(rows(1, 2, 3, 4))
    return made


def num_leased(table: Any) -> int:
    """Rows that are handed out."""
    return int(table.info()["num_leased"])


@pytest.mark.slow
def test_take_when_its_result_is_read_without_a_block_then_error_has_the_remedy_and_rows_are_given_back(
    queue: tdserve.QueueHandle,
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{queue.name}.*with queue.take.*ack=False"):
        queue.take(2)["a"]
    gc.collect()
    wait_for(lambda: num_leased(queue) == 0, "the rows to be given back")
    with queue.take(4) as taken:
        assert taken["a"].tolist() == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("is_seen", [False, True])
def test_take_when_its_result_is_dropped_then_given_back_unless_the_rows_are_in_use(
    queue: tdserve.QueueHandle, is_seen: bool
) -> None:
    taken = queue.take(2)
    seen = taken.rows if is_seen else None
    assert num_leased(queue) == 2
    del taken
    gc.collect()
    if seen is None:
        wait_for(lambda: num_leased(queue) == 0, "the rows to be given back")
        assert queue.take(4, ack=False)["a"].tolist() == [1, 2, 3, 4]
    else:
        queue.ack(seen)
        assert len(queue) == 2


def next_of(batches: Any) -> Any:
    """A batch that is there. On a busy machine one short wait may not suffice, so it is asked for again and again."""

    def look() -> Any:
        try:
            return next(batches)
        except DeadlineExceededError:
            return None

    return wait_for(look, "a batch")


def test_taken_when_shown_then_repr_explains_how_to_get_the_rows(queue: tdserve.QueueHandle) -> None:
    assert repr(queue.take(2)) == f"<Taken: 2 rows of {queue.name!r} on lease; use it in a with block or take .rows>"


def test_taken_when_the_block_raises_then_the_rows_are_in_front_again(queue: tdserve.QueueHandle) -> None:
    with pytest.raises(KeyError), queue.take(3):
        raise KeyError
    with queue.take(4) as taken:
        assert taken["a"].tolist() == [1, 2, 3, 4]


def test_taken_when_acknowledged_within_the_block_then_its_end_raises_wrong_state(queue: tdserve.QueueHandle) -> None:
    taken = queue.take(2)
    with pytest.raises(WrongStateError), taken as batch:
        queue.ack(batch)
    assert queue[:]["a"].tolist() == [3, 4]


def test_taken_when_given_back_twice_then_the_second_does_nothing(queue: tdserve.QueueHandle) -> None:
    taken = queue.take(2)
    taken.give_back()
    taken.give_back()
    assert num_leased(queue) == 0
    assert len(queue) == 4


def test_batches_when_the_session_of_the_last_one_is_lost_then_said_once_and_the_next_comes(
    client: tdserve.Client, queue: tdserve.QueueHandle
) -> None:
    with queue.batches(2, timeout_s=20.0) as batches:
        assert next_of(batches)["a"].tolist() == [1, 2]
        client.session(Deadline.after(20.0)).close()
        with pytest.raises(WrongStateError):
            next(batches)
        assert next_of(batches)["a"].tolist() == [1, 2]
        assert next_of(batches)["a"].tolist() == [3, 4]
    assert len(queue) == 0


def test_taken_when_its_session_is_lost_then_acknowledged_no_more(
    client: tdserve.Client, queue: tdserve.QueueHandle
) -> None:
    batch = queue.take(2, ack=False)
    client.session(Deadline.after(20.0)).close()
    with pytest.raises(WrongStateError):
        queue.ack(batch)
    wait_for(lambda: num_leased(queue) == 0, "the end of the lost session's leases")
    assert len(queue) == 4


def test_batches_when_closed_then_what_was_not_acknowledged_is_there_again(queue: tdserve.QueueHandle) -> None:
    batches = queue.batches(2)
    next(batches)
    assert next(batches)["a"].tolist() == [3, 4]
    batches.close()
    assert queue.take(2, ack=False)["a"].tolist() == [3, 4]
    with pytest.raises(ClosedError, match=queue.name):
        next(batches)


def test_batches_when_their_block_ends_then_the_last_one_is_acknowledged(queue: tdserve.QueueHandle) -> None:
    with queue.batches(2) as batches:
        next(batches)
    assert len(queue) == 2
    again = queue.batches(2)
    next(again)
    with pytest.raises(KeyError), again:
        raise KeyError
    assert (len(queue), num_leased(queue)) == (2, 0)


def test_batches_when_one_cannot_be_moved_to_the_device_then_it_is_given_back_and_not_acknowledged(
    queue: tdserve.QueueHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    batches = queue.batches(2)
    next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(taken_batches, "to_device", fail)
        with pytest.raises(torch.OutOfMemoryError):
            next(batches)
    wait_for(lambda: num_leased(queue) == 0, "the return of rows that nobody has seen")
    assert next(batches)["a"].tolist() == [3, 4]


@pytest.mark.parametrize("is_iterated", [False, True])
def test_take_when_rows_cannot_be_shown_as_asked_then_they_are_given_back(
    queue: tdserve.QueueHandle, monkeypatch: pytest.MonkeyPatch, is_iterated: bool
) -> None:
    def fail(_: Any) -> Any:
        raise MemoryError

    batches, taken = queue.batches(2, numpy=True), queue.take(1, numpy=True)
    monkeypatch.setattr(query, "to_arrays", fail)
    show = batches.__next__ if is_iterated else taken.__enter__
    with pytest.raises(MemoryError):
        show()
    with pytest.raises(MemoryError):
        assert taken.rows
    del taken, show
    gc.collect()
    wait_for(lambda: num_leased(queue) == 0, "the return of rows that nobody has seen")
    assert len(queue) == 4


def test_batches_when_dropped_then_the_rows_are_there_again(queue: tdserve.QueueHandle) -> None:
    batches = queue.batches(2)
    next(batches)
    del batches
    gc.collect()
    wait_for(lambda: num_leased(queue) == 0, "the return of the dropped iterator's rows")
    assert len(queue) == 4


@pytest.mark.parametrize("timeout_s", [0, 0.1, 0.6])
def test_batches_when_none_comes_in_time_then_error_and_goes_on_later(
    queue: tdserve.QueueHandle, timeout_s: float
) -> None:
    with queue.batches(3, timeout_s=timeout_s) as batches:
        assert len(next_of(batches)) == 3
        with pytest.raises(DeadlineExceededError, match=queue.name) as raised:
            next(batches)
        assert raised.value.timeout_s == timeout_s
        queue.extend(rows(5, 6))
        assert next_of(batches)["a"].tolist() == [4, 5, 6]


def test_batches_when_closed_while_a_thread_waits_then_it_ends(queue: tdserve.QueueHandle) -> None:
    batches = queue.batches(8, timeout_s=20.0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(next, batches)
        batches.close()
        with pytest.raises(ClosedError):
            waiting.result(20.0)


def test_take_when_what_comes_is_nonsense_then_the_rows_are_there_for_others(
    client: tdserve.Client, queue: tdserve.QueueHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def garble(*asked: Any, **fields: Any) -> Any:
        receive_sample(*asked, **fields)
        raise RemoteProtocolError(expected="rows", received="garbage")

    session = client.session(Deadline.after(20.0))
    with monkeypatch.context() as patch:
        patch.setattr(taking, "receive_sample", garble)
        with pytest.raises(RemoteProtocolError):
            queue.take(2, ack=False)
    wait_for(lambda: num_leased(queue) == 0, "the return of the rows")
    assert client.session(Deadline.after(20.0)) is session


def test_take_when_for_a_consumer_then_its_own_and_the_rows_stay(replay: tdserve.ReplayHandle) -> None:
    with replay.take(4, consumer="b") as taken:
        assert sorted(taken["a"].tolist()) == [1, 2, 3, 4]
    assert sorted(replay.sample(4, consumer="c")["a"].tolist()) == [1, 2, 3, 4]
    assert len(replay) == 4
    for consumer in ("b", "c"):
        with pytest.raises(DeadlineExceededError, match=f"consumer '{consumer}' has not had"):
            replay.sample(1, consumer=consumer, timeout_s=0)


def test_ack_when_the_consumer_is_another_then_error_and_nothing_changed(replay: tdserve.ReplayHandle) -> None:
    taken = replay.take(2, consumer="b", ack=False)
    with pytest.raises(WrongStateError):
        replay.ack(taken, consumer="c")
    assert num_leased(replay) == 2
    replay.ack(taken, consumer="b")
    assert num_leased(replay) == 0


def test_batches_when_for_a_consumer_then_each_row_once(replay: tdserve.ReplayHandle) -> None:
    with replay.batches(2, consumer="b", timeout_s=0.1) as batches:
        numbers = [*next_of(batches)["a"].tolist(), *next_of(batches)["a"].tolist()]
        with pytest.raises(DeadlineExceededError):
            next(batches)
    assert sorted(numbers) == [1, 2, 3, 4]


def test_take_when_rows_cannot_be_padded_as_asked_then_they_are_in_front_again(
    client: tdserve.Client, name: str
) -> None:
    lengths = torch.nested.nested_tensor([torch.arange(1), torch.arange(2)], layout=torch.jagged)
    queue = client.create_queue(name, rows(0)[0].set("t", torch.arange(2)), 8, ragged=["t"])
    queue.extend(rows(1, 2).set("t", lengths))
    with raises(InvalidRequestError, argument="pad"):
        queue.take(2, pad={"u": 0})
    assert num_leased(queue) == 0
    with raises(InvalidRequestError, argument="pad"), queue.batches(2, pad={"u": 0}) as batches:
        next(batches)
    with queue.take(2, pad=0) as taken:
        assert taken["t"].tolist() == [[0, 0], [0, 1]]


def test_take_when_its_values_may_not_be_decoded_then_the_rows_are_in_front_again_at_once(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    values = [Fraction(1, 3), Fraction(2, 3)]
    with server.client(transport="gloo", allow_pickle=True, timeout_s=20.0) as allowing:
        written = rows(1, 2).set("v", NonTensorStack(*values))
        allowing.create_queue(name, written[0], 8).extend(written)
        queue = client.queue(name)
        with pytest.raises(NotSupportedError, match=r"'v'.*allow_pickle=True"):
            queue.take(2)
        assert num_leased(queue) == 0
        with pytest.raises(NotSupportedError, match="'v'"), queue.batches(2) as batches:
            next(batches)
        assert num_leased(queue) == 0
        with allowing.queue(name).take(2) as taken:
            assert (taken["a"].tolist(), taken["v"].tolist()) == ([1, 2], values)
