from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import InvalidRequestError, SelectionError, SpecMismatchError
from tdserve.client.tables import change_requests
from tests.errors import raises
from tests.processes import wait_for


def rows(num_rows: int, start: int = 0) -> TensorDict:
    """Rows that tell which they are."""
    return TensorDict({"a": torch.arange(start, start + num_rows)}, [num_rows])


@pytest.fixture
def replay(client: tdserve.Client, name: str) -> tdserve.ReplayHandle:
    """A ring of five rows, three of them live."""
    made: tdserve.ReplayHandle = client.create_replay(name, rows(1)[0], 5)
    made.extend(rows(3, 10))
    return made


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (rows(6).reshape(2, 3), SpecMismatchError),
        (TensorDict({"b": torch.zeros(2)}, [2]), SpecMismatchError),
        (TensorDict({"a": torch.zeros(2)}, [2]), SpecMismatchError),
    ],
)
def test_extend_when_it_does_not_fit_then_refused_before_anything_is_sent(
    replay: tdserve.ReplayHandle, batch: TensorDict, error: type[Exception]
) -> None:
    with pytest.raises(error, match=replay.name):
        replay.extend(batch)
    assert replay.info()["inserts"] == 3


def test_extend_when_of_no_rows_then_nothing_happens(replay: tdserve.ReplayHandle) -> None:
    assert replay.extend(rows(0)).tolist() == []
    assert replay.extend(rows(0), return_early=True).result(20.0).tolist() == []
    assert len(replay) == 3


@pytest.mark.parametrize(
    ("index", "content"),
    [(1, 11), (-1, 12), ([2, 0], [12, 10]), (slice(1, None), [11, 12]), (..., [10, 11, 12])],
)
def test_getitem_when_rows_are_live_then_theirs_and_not_counted(
    replay: tdserve.ReplayHandle, index: Any, content: Any
) -> None:
    assert replay[index]["a"].tolist() == content
    assert replay.info()["samples"] == 0


@pytest.mark.parametrize("index", [3, [0, 4], 5, -6])
def test_getitem_when_a_row_is_not_live_then_error(replay: tdserve.ReplayHandle, index: Any) -> None:
    with pytest.raises(SelectionError):
        _ = replay[index]


def test_getitem_when_of_two_dimensions_then_error(replay: tdserve.ReplayHandle) -> None:
    with pytest.raises(SelectionError, match="one dimension"):
        _ = replay[0, 0]


def test_sample_when_a_device_is_named_then_the_rows_are_there(replay: tdserve.ReplayHandle) -> None:
    assert replay.sample(2, device="cpu").device == torch.device("cpu")
    assert replay.sample(2).device is None
    with replay.batches(2, device="cpu") as batches:
        assert next(batches).device == torch.device("cpu")


def test_batches_when_they_waited_too_long_then_dropped_and_a_fresh_one_comes(replay: tdserve.ReplayHandle) -> None:
    with replay.batches(2, prefetch=1, drop=1e-9, timeout_s=60.0) as batches, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(next, batches)
        wait_for(lambda: replay.info()["samples"] >= 6, "the third batch")
        assert not waiting.done(), "none is ever that fresh"
        batches.close()
        with pytest.raises(tdserve.ClosedError):
            waiting.result(20.0)
    with replay.batches(2, prefetch=1, drop=20.0) as batches:
        assert len(next(batches)) == 2


def test_batches_when_none_is_ever_fresh_enough_then_the_wait_ends_all_the_same(replay: tdserve.ReplayHandle) -> None:
    with replay.batches(2, drop=1e-9, timeout_s=0.2) as batches, pytest.raises(tdserve.DeadlineExceededError):
        next(batches)


@pytest.mark.parametrize("drop", [0, 0.0, -1, True, "soon", float("nan")])
def test_batches_when_drop_is_no_number_of_seconds_then_refused(replay: tdserve.ReplayHandle, drop: Any) -> None:
    with raises(InvalidRequestError, argument="drop"):
        replay.batches(2, drop=drop)


def test_sample_when_the_device_is_none_then_refused_before_anything_is_drawn(replay: tdserve.ReplayHandle) -> None:
    before = replay.info()["samples"]
    with raises(InvalidRequestError, argument="device"):
        replay.sample(2, device="nonsense")
    assert replay.info()["samples"] == before


def test_update_priority_when_the_table_has_none_then_refused(replay: tdserve.ReplayHandle) -> None:
    with pytest.raises(InvalidRequestError, match=replay.name):
        replay.update_priority([0], 1.0)


def test_update_priority_when_a_late_one_of_very_many_rows_is_wrong_then_none_is_changed(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_requests, "MAX_MESSAGE_ROWS", 3)
    rows = TensorDict({"x": torch.arange(8)}, [8])
    table = client.create_replay(name, like=rows[0], capacity=16, sampler=tdserve.Prioritized())
    numbers = table.extend(rows)
    with pytest.raises(SelectionError):
        table.update_priority([*range(7), 9], 5.0)
    before = table.sample(64)
    assert set(before["priority"].tolist()) == {1.0}
    table.delete([4])
    assert table.update_priority(numbers, [*range(8)], generation=before["generation"][:1].expand(8)) == 1
    sample = table.sample(64)
    assert sample["priority"].tolist() == sample["index"].tolist()
