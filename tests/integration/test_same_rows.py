"""A row number names a place: after an overwrite, a row that was read, taken or sampled there is a different row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve

pytestmark = pytest.mark.integration

CAPACITY = 8


def rows(first: int, num_rows: int = CAPACITY) -> TensorDict:
    """Returns rows with their numbers, not yet scored."""
    return TensorDict({"v": torch.arange(first, first + num_rows)}, [num_rows])


@pytest.fixture
def replay(client: tdserve.Client, name: str) -> Any:
    like = TensorDict({"v": torch.tensor(0), "score": torch.tensor(0.0)}, [])
    return client.create_replay(name, like, CAPACITY, sampler=tdserve.Prioritized())


def test_ack_when_the_rows_were_overwritten_and_taken_by_another_then_those_are_not_acknowledged(replay: Any) -> None:
    replay.extend(rows(0))
    first = replay.take(CAPACITY, consumer="y", require=("v",), ack=False)
    replay.extend(rows(100))
    taken = replay.take(CAPACITY, consumer="y", require=("v",))
    second = taken.rows
    with pytest.raises(tdserve.WrongStateError):
        replay.ack(first, consumer="y")
    taken.give_back()
    again = replay.sample(CAPACITY, consumer="y", require=("v",), timeout_s=20.0)
    assert sorted(again["v"].tolist()) == sorted(second["v"].tolist()) == list(range(100, 108))


def test_ack_when_a_part_was_overwritten_then_the_others_are_had(replay: Any) -> None:
    replay.extend(rows(0))
    taken = replay.take(CAPACITY, consumer="y", require=("v",), ack=False)
    replay.extend(rows(100, 4))
    replay.ack(taken, consumer="y")
    assert sorted(replay.sample(4, consumer="y", require=("v",))["v"].tolist()) == [100, 101, 102, 103]
    with pytest.raises(tdserve.DeadlineExceededError):
        replay.sample(1, consumer="y", require=("v",), timeout_s=0)


def test_ack_when_a_queue_has_given_the_places_to_other_rows_then_refused(client: tdserve.Client, name: str) -> None:
    queue = client.create_queue(name, rows(0)[0], CAPACITY)
    queue.extend(rows(0))
    first = queue.take(CAPACITY, ack=False)
    queue.ack(first)
    queue.extend(rows(50))
    second = queue.take(CAPACITY, ack=False)
    with pytest.raises(tdserve.WrongStateError):
        queue.ack(first)
    assert len(queue) == CAPACITY
    queue.ack(second)
    assert len(queue) == 0


def test_set_at_when_a_batch_was_overwritten_then_refused_and_the_new_rows_stay(replay: Any) -> None:
    replay.extend(rows(0))
    batch = replay.sample(CAPACITY, require=("v",))
    replay.extend(rows(100))
    with pytest.raises(tdserve.SelectionError, match="overwritten"):
        replay.set_at_("score", torch.ones(CAPACITY), batch)
    assert (replay[:]["score"] == 0).all()


def test_set_at_when_a_row_is_written_leaf_by_leaf_then_it_stays_the_same_row(replay: Any) -> None:
    index = replay.extend(rows(0))
    batch = replay.sample(CAPACITY, require=("v",))
    taken = replay.take(CAPACITY, consumer="y", require=("v",), ack=False)
    for value in (1.0, 2.0):
        replay.set_at_("score", torch.full((CAPACITY,), value), index)
        replay.set_at_("score", batch["v"].float() + value, batch)
    assert replay.update_priority(batch, 3.0) == 0
    replay.ack(taken, consumer="y")
    assert (replay[index]["score"] <= torch.arange(CAPACITY) + 2.0).all()


def test_extend_when_a_value_is_left_out_then_none_also_where_another_row_had_one(
    client: tdserve.Client, name: str
) -> None:
    like = TensorDict({"v": torch.tensor(0), "text": "x"}, [])
    replay = client.create_replay(name, like, CAPACITY)
    replay.extend(rows(0).set("text", NonTensorStack(*"abcdefgh")))
    index = replay.extend(rows(100, 4))
    found = replay[index]
    assert found["v"].tolist() == [100, 101, 102, 103]
    assert set(found.get("text").tolist() if hasattr(found.get("text"), "tolist") else [found["text"]]) == {None}
    replay.set_at_("text", ["new"] * 4, index)
    assert list(replay[index]["text"]) == ["new"] * 4


@pytest.mark.slow
def test_extend_when_its_future_is_cancelled_then_it_is_on_its_way_and_others_go_on(replay: Any) -> None:
    futures = [replay.extend(rows(number), return_early=True) for number in range(60)]
    assert not any(future.cancel() for future in futures[20:])
    assert len(replay.extend(rows(500), timeout_s=30.0)) == CAPACITY
    assert all(len(future.result(30.0)) == CAPACITY for future in futures)


@pytest.mark.slow
def test_extend_early_when_the_server_is_away_then_returns_at_once(fresh_server: Any) -> None:
    server = fresh_server()
    with server.client(timeout_s=60.0) as client:
        replay = client.create_replay("replay", rows(0)[0], CAPACITY)
        replay.extend(rows(0))
        server.shutdown()
        client.timeout_s = 2.0
        with pytest.raises(tdserve.TDServeError):
            len(replay)  # from now on the client knows
        future = replay.extend(rows(8), return_early=True)
        assert not future.done()
        assert isinstance(future.exception(20.0), tdserve.TDServeError)


@pytest.mark.parametrize("index", [5, 7, 8, 10_000, [0, 7], [0, 10_000]])
def test_read_when_a_row_was_never_written_then_the_error_names_how_many_were(replay: Any, index: Any) -> None:
    replay.extend({**rows(0, 5), "score": torch.zeros(5)})
    with pytest.raises(tdserve.SelectionError, match="is out of range for dimension 0 of size 5"):
        replay[index]


def test_append_when_like_was_a_batch_then_the_error_explains_it(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, rows(0, 5), CAPACITY)
    with replay.writer() as writer, pytest.raises(tdserve.SpecMismatchError, match=r"like= of the table was a batch"):
        writer.append(rows(0, 5)[0])
    assert len(replay) == 0
