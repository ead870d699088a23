from __future__ import annotations

import gc
import os
from threading import Event, Thread, enumerate as running_threads
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import ClosedError, DeadlineExceededError, ForkedClientError
from tdserve.client.datasets.epoch_batches import CHUNK_ROWS, EpochBatches, EpochPlan, end_all
from tdserve.client.session.calls.cancellation import get_cancellation
from tdserve.rules.replay.samplers.epochs import EncipheredOrder, NumberOrder
from tests.processes import wait_for


def _rows(rows: Any) -> TensorDict:
    numbers = torch.arange(100_000)[rows]
    return TensorDict({"a": numbers}, [len(numbers)])


def _batches(read: Any = _rows, *, num_rows: int = 4, share: range = range(3, 20), start: int = 0) -> EpochBatches:
    return EpochBatches("it", read, EpochPlan(NumberOrder(), share, num_rows), start=start, prefetch=3, device=None)


def test_plan_when_batches_do_not_divide_a_chunk_then_each_place_comes_once() -> None:
    order = EncipheredOrder(3 * CHUNK_ROWS, seed=1, epoch=0)
    plan = EpochPlan(order, range(5, 3 * CHUNK_ROWS - 7), 1000)
    found = [row for batch in plan.iter_batches(0) for row in batch.tolist()]  # type: ignore[union-attr]
    assert found == order.list_rows(5, 3 * CHUNK_ROWS - 7).tolist()
    lengths = [len(batch) for batch in plan.iter_batches(0)]  # type: ignore[arg-type]
    assert len(plan) == len(lengths)
    assert set(lengths[:-1]) == {1000}


def test_batches_when_iterated_then_all_rows_in_order_and_then_no_more() -> None:
    batches = _batches()
    assert len(batches) == 5
    assert [batch["a"].tolist() for batch in batches] == [[*range(at, min(at + 4, 20))] for at in range(3, 20, 4)]
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize(("start", "expected"), [(2, [11, 15, 19]), (5, []), (9, [])])
def test_batches_when_started_later_then_what_is_left(start: int, expected: list[int]) -> None:
    batches = _batches(start=start)
    assert len(batches) == len(expected)
    assert [int(batch["a"][0]) for batch in batches] == expected


def test_next_when_a_batch_could_not_be_read_then_the_next_call_tries_it_again() -> None:
    failing = [True]

    def read(rows: Any) -> TensorDict:
        if rows.start == 7 and failing:
            failing.clear()
            raise DeadlineExceededError(what="it", timeout_s=0.1)
        return _rows(rows)

    batches = _batches(read)
    assert int(next(batches)["a"][0]) == 3
    with pytest.raises(DeadlineExceededError):
        next(batches)
    assert [int(batch["a"][0]) for batch in batches] == [7, 11, 15, 19]


def test_close_when_another_thread_waits_then_it_gets_a_closed_error() -> None:
    begun, errors, go_on = Event(), [], Event()

    def read(rows: Any) -> TensorDict:
        begun.set()
        go_on.wait(20.0)
        raise DeadlineExceededError(what="it", timeout_s=0.1)

    batches = _batches(read)

    def wait() -> None:
        with pytest.raises(ClosedError) as error:
            next(batches)
        errors.append(error)

    thread = Thread(target=wait)
    thread.start()
    assert begun.wait(20.0)
    batches.close()
    batches.close()
    go_on.set()
    thread.join(20.0)
    assert len(errors) == 1
    with pytest.raises(ClosedError, match="it"):
        next(batches)


@pytest.mark.slow
def test_batches_when_dropped_then_their_threads_end() -> None:
    batches: Any = _batches()
    next(batches)
    del batches
    gc.collect()
    wait_for(lambda: not [t for t in running_threads() if t.name.startswith("tdserve-epoch-it")], "their end")


def test_next_when_in_a_forked_child_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with _batches() as batches:
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: 1)
            with pytest.raises(ForkedClientError):
                next(batches)
        assert len(next(batches)) == 4


def test_batches_when_the_process_exits_then_reads_are_given_up_before_their_threads_are_waited_for() -> None:
    begun, is_given_up = Event(), Event()

    def read(rows: Any) -> TensorDict:
        cancellation = get_cancellation()
        assert cancellation is not None
        cancellation.follow(is_given_up.set)
        begun.set()
        is_given_up.wait(20.0)
        raise DeadlineExceededError(what="it", timeout_s=0.1)

    batches = _batches(read)
    errors: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(ClosedError) as error:
            next(batches)
        errors.append(error.value)

    thread = Thread(target=wait)
    thread.start()
    assert begun.wait(20.0)
    end_all()
    assert is_given_up.is_set()
    thread.join(20.0)
    assert len(errors) == 1
