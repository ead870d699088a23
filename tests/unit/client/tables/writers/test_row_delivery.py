from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tdserve.base.errors import CapacityError, InvalidRequestError, PeerLostError, StoreNotFoundError, TDServeError
from tdserve.client.tables.writers.row_buffer import NO_PRIORITY, Batch, RowBuffer
from tdserve.client.tables.writers.row_delivery import MIN_RING_BATCHES, Delivery, compute_max_rows
from tdserve.rules.replay.limiter import MinSize, Queue, SampleToInsertRatio
from tdserve.rules.replay.settings import Settings
from tests.unit.client.tables.recording import RecordingTable


def batch(num_rows: int, *, priority: float = NO_PRIORITY, stream: int = 7) -> Batch:
    """Rows 0, 1, ..., of which number 2 ends a trajectory."""
    buffer = RowBuffer(RecordingTable().spec, page_rows=num_rows, max_bytes=1 << 20)
    for number in range(num_rows):
        page = buffer.find_page(stream)
        assert page is not None
        page.put([torch.tensor(number)], priority, 0.0)
        page.ends[number] = number == 2
    return buffer.take(num_rows)


def sent(table: RecordingTable, num_rows: int, **arguments: float) -> list[int]:
    """What was told of a batch's progress."""
    progress: list[int] = []
    Delivery(table, batch=4, num_joined=100).send(batch(num_rows, **arguments), progress.append)  # type: ignore[arg-type]
    return progress


def test_send_when_the_table_takes_it_then_in_one_call_that_waits_for_ever() -> None:
    table = RecordingTable()
    assert sent(table, 6) == [6]
    assert table.numbers == list(range(6))
    assert table.calls[0]["writer"] == 7
    assert table.calls[0]["timeout_s"] == math.inf
    assert table.calls[0]["priority"] is None
    assert table.ends == [2]


def test_send_when_rows_have_priorities_then_they_go_along() -> None:
    table = RecordingTable()
    sent(table, 2, priority=0.5)
    assert table.calls[0]["priority"].tolist() == [0.5, 0.5]
    assert table.calls[0]["ends"] is None


@pytest.mark.parametrize("fault", [InvalidRequestError(argument="num_rows", reason="many"), CapacityError(what="rows")])
def test_send_when_so_many_are_refused_then_smaller_from_then_on(fault: TDServeError) -> None:
    table = RecordingTable()
    table.faults = [fault, fault]
    delivery = Delivery(table, batch=4, num_joined=100)
    progress: list[int] = []
    delivery.send(batch(9, priority=1.0), progress.append)
    assert progress == [2, 2, 2, 2, 1]
    assert table.numbers == list(range(9))
    assert table.ends == [2]
    assert [len(call["priority"]) for call in table.calls] == progress
    assert delivery.max_rows == 2


def test_send_when_even_one_row_is_refused_then_raised() -> None:
    table = RecordingTable()
    table.faults = [InvalidRequestError(argument="x", reason="y")] * 4
    with pytest.raises(InvalidRequestError):
        sent(table, 8)
    assert len(table.faults) == 0


@pytest.mark.parametrize("fault", [StoreNotFoundError(name="frames"), PeerLostError(peer="server", reason="gone")])
def test_send_when_it_fails_otherwise_then_raised_at_once_and_progress_known(fault: TDServeError) -> None:
    table = RecordingTable()
    table.faults = [InvalidRequestError(argument="num_rows", reason="many"), None, fault]
    progress: list[int] = []
    with pytest.raises(type(fault)):
        Delivery(table, batch=4, num_joined=100).send(batch(4), progress.append)
    assert progress == [2]
    assert table.numbers == [0, 1]


def test_max_rows_when_no_limiter_makes_writers_wait_then_joined_as_far_as_the_ring_allows() -> None:
    assert Delivery(RecordingTable(capacity=10_000), batch=4, num_joined=100).max_rows == 100
    assert Delivery(RecordingTable(capacity=10_000), batch=4, num_joined=9999).max_rows == 10_000 // MIN_RING_BATCHES
    assert Delivery(RecordingTable(capacity=8), batch=4, num_joined=100).max_rows == 4


@pytest.mark.parametrize("limiter", [Queue(50), SampleToInsertRatio(1.0, min_size=1, error_buffer=100.0)])
def test_max_rows_when_the_limiter_makes_writers_wait_then_what_was_asked_for(
    limiter: Queue | SampleToInsertRatio,
) -> None:
    table = RecordingTable()
    delivery = Delivery(table, batch=4, num_joined=100)
    table.settings = Settings(limiter=limiter)
    assert delivery.max_rows == 4
    table.settings = Settings(limiter=MinSize(3))
    assert delivery.max_rows == 100


def test_most_rows_when_it_is_a_queue_then_half_of_it() -> None:
    assert compute_max_rows(RecordingTable(capacity=50)) == 50
    assert compute_max_rows(RecordingTable(capacity=50, settings=Settings(limiter=Queue(50)))) == 25
    assert compute_max_rows(RecordingTable(capacity=50, settings=Settings(limiter=Queue(1)))) == 1


def test_send_when_ends_are_split_then_each_call_has_its_own() -> None:
    table = RecordingTable()
    table.faults = [InvalidRequestError(argument="num_rows", reason="many")]
    sent(table, 6)
    assert [None if call["ends"] is None else np.asarray(call["ends"]).tolist() for call in table.calls] == [
        [False, False, True],
        None,
    ]


def test_send_when_rows_have_policy_versions_then_they_go_along_in_smaller_calls_too() -> None:
    table = RecordingTable()
    table.faults = [InvalidRequestError(argument="num_rows", reason="many")]
    versions = np.array([4, 4, 5, 6])
    progress: list[int] = []
    Delivery(table, batch=4, num_joined=100).send(replace(batch(4), policy_versions=versions), progress.append)
    assert [call["policy_version"].tolist() for call in table.calls] == [[4, 4], [5, 6]]
