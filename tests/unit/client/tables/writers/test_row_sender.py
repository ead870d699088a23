from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ClosedError,
    ConnectError,
    DeadlineExceededError,
    ForkedClientError,
    InvalidRequestError,
    PeerLostError,
    StoreNotFoundError,
    WriterFailedError,
)
from tdserve.client.tables.writers import row_sender
from tdserve.client.tables.writers.nstep import NStep
from tdserve.client.tables.writers.row_buffer import NO_PRIORITY
from tests.processes import alarm
from tests.threads import find_threads
from tests.unit.client.tables.recording import WAIT_S, RecordingTable, put, row, sender

FOREVER = Deadline.never
SOON = 0.05


@pytest.fixture
def table() -> Iterator[RecordingTable]:
    """Lets everything through at last, so that no thread stays behind."""
    made = RecordingTable()
    yield made
    made.let()


def test_put_when_a_batch_is_full_then_sent_with_the_next_row(table: RecordingTable) -> None:
    subject = sender(table)
    put(subject, *range(5))
    table.wait_stored(4)
    assert table.batches == [[0, 1, 2, 3]]
    subject.close(FOREVER)
    assert table.batches == [[0, 1, 2, 3], [4]]


def test_put_when_rows_are_too_few_then_nothing_is_sent_until_asked(table: RecordingTable) -> None:
    subject = sender(table)
    put(subject, *range(4))
    assert subject.num_sent == 0
    subject.flush(FOREVER)
    assert (subject.num_sent, subject.num_acknowledged) == (4, 4)
    assert table.numbers == [0, 1, 2, 3]
    subject.close(FOREVER)


def test_put_when_flush_s_has_passed_then_sent_without_being_asked(table: RecordingTable) -> None:
    subject = sender(table, flush_s=0.02)
    for number in range(3):
        put(subject, number)
        table.wait_stored(number + 1)
    assert table.numbers == [0, 1, 2]
    subject.close(FOREVER)


def test_put_when_rows_wait_then_joined_and_in_order(table: RecordingTable) -> None:
    subject = sender(table)
    table.hold()
    put(subject, *range(5))
    table.wait_called()
    put(subject, *range(5, 40))
    table.let()
    subject.close(FOREVER)
    assert table.numbers == list(range(40))
    assert table.batches[0] == [0, 1, 2, 3]
    assert max(map(len, table.batches)) >= 35


def test_put_when_several_threads_put_then_each_ones_rows_in_its_order(table: RecordingTable) -> None:
    subject = sender(table)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(put, subject, *range(start, start + 200)) for start in range(0, 800, 200)]:
            done.result()
    subject.close(FOREVER)
    assert sorted(table.numbers) == list(range(800))
    for start in range(0, 800, 200):
        own = [number for number in table.numbers if start <= number < start + 200]
        assert own == sorted(own)


def test_put_when_memory_is_full_then_error_names_what_it_waits_for_and_the_sender_goes_on(
    table: RecordingTable,
) -> None:
    subject = sender(table, max_bytes=8 * 608)
    table.hold()
    put(subject, *range(4))
    put(subject, 4)
    table.wait_called()
    put(subject, *range(5, 8))
    with pytest.raises(DeadlineExceededError) as raised:
        put(subject, 8, timeout_s=SOON)
    message = str(raised.value)
    assert "'frames'" in message
    assert "4 rows under way and 4 waiting" in message
    assert f"of {8 * 608} bytes" in message
    assert raised.value.timeout_s == SOON
    with pytest.raises(DeadlineExceededError):
        put(subject, 8, timeout_s=0.0)
    assert subject.num_appended == 8
    table.let()
    put(subject, 8)
    subject.close(FOREVER)
    assert table.numbers == list(range(9))


def test_put_when_memory_holds_two_rows_then_still_gets_everything_through(table: RecordingTable) -> None:
    subject = sender(table, max_bytes=2 * 608)
    put(subject, *range(20))
    subject.close(FOREVER)
    assert table.numbers == list(range(20))


def test_end_trajectory_when_the_row_was_not_sent_then_marked(table: RecordingTable) -> None:
    subject = sender(table)
    put(subject, 0, 1, 2)
    subject.end_trajectory()
    subject.end_trajectory()
    put(subject, *range(3, 8))
    subject.end_trajectory()
    subject.close(FOREVER)
    assert table.ends == [2, 7]
    assert len({call["writer"] for call in table.calls}) == 1


def test_end_trajectory_when_it_completes_a_batch_then_sent_at_once(table: RecordingTable) -> None:
    subject = sender(table)
    put(subject, *range(4))
    subject.end_trajectory()
    table.wait_stored(4)
    assert table.ends == [3]
    subject.close(FOREVER)


def test_end_trajectory_when_the_row_was_sent_then_what_follows_is_another_stream(table: RecordingTable) -> None:
    subject = sender(table)
    put(subject, 0)
    subject.flush(FOREVER)
    put(subject, 1)
    subject.flush(FOREVER)
    subject.end_trajectory()
    put(subject, 2, 3)
    subject.close(FOREVER)
    assert table.batches == [[0], [1], [2, 3]]
    streams = [call["writer"] for call in table.calls]
    assert streams[0] == streams[1] != streams[2]
    assert table.ends == []


def test_streams_when_there_are_two_senders_then_never_the_same(table: RecordingTable) -> None:
    subjects = [sender(table) for _ in range(2)]
    for subject in subjects:
        put(subject, 0)
        subject.close(FOREVER)
    writers = [call["writer"] for call in table.calls]
    assert len(set(writers)) == 2
    assert min(writers) > 0


def test_put_when_only_some_rows_have_a_priority_then_in_batches_of_their_own(table: RecordingTable) -> None:
    subject = sender(table)
    put(subject, 0, 1)
    put(subject, 2, priority=0.5)
    put(subject, 3)
    subject.close(FOREVER)
    assert table.batches == [[0, 1], [2], [3]]
    assert [None if call["priority"] is None else list(call["priority"]) for call in table.calls] == [None, [0.5], None]


def test_window_when_given_then_rows_leave_when_their_horizon_is_complete() -> None:
    def step(number: int, done: bool = False) -> list[torch.Tensor]:
        td = transition(number, done)
        return [td["done"], td["next", "x"], td["reward"], td["x"]]

    table = RecordingTable(transition(0))
    subject = sender(table, batch=2, n_step=NStep(3, 0.5))
    for number in range(4):
        subject.put(step(number), [], 0, NO_PRIORITY, WAIT_S)
    table.wait_stored(2)
    subject.flush(FOREVER)
    assert table.numbers == [0, 1]
    for number in (4, 5):
        subject.put(step(number, done=number == 4), [], 0, NO_PRIORITY, WAIT_S)
    subject.flush(FOREVER)
    assert table.numbers == [0, 1, 2, 3, 4]
    assert table.ends == [4]
    subject.put(step(6), [], 0, NO_PRIORITY, WAIT_S)
    subject.close(FOREVER)
    assert table.numbers == list(range(7))
    rows = [each for content in table.contents for each in content]
    assert [each["reward"].item() for each in rows] == [1.75, 1.75, 1.75, 1.5, 1.0, 1.5, 1.0]
    assert [each["next", "x"].item() for each in rows] == [3, 4, 5, 5, 5, 7, 7]
    assert table.ends == [4]


def test_window_when_values_of_rows_with_an_open_horizon_fill_the_memory_then_further_rows_are_let_in() -> None:
    table = RecordingTable(
        row(0, reward=torch.tensor(1.0), done=torch.tensor(False), next={"x": torch.tensor(1)}, t="")
    )
    subject = sender(table, batch=2, max_bytes=100_000, n_step=NStep(5, 0.5))
    for number in range(8):
        leaves = [torch.tensor(False), torch.tensor(number + 1), torch.tensor(1.0), torch.tensor(number)]
        subject.put(leaves, [str(number)], 90_000, NO_PRIORITY, WAIT_S)
    subject.flush(FOREVER)
    assert table.numbers == [0, 1, 2, 3]
    subject.close(FOREVER)
    assert table.numbers == list(range(8))


def transition(number: int, done: bool = False) -> Any:
    """A step whose observation is its number."""
    return row(number, reward=torch.tensor(1.0), done=torch.tensor(done), next={"x": torch.tensor(number + 1)})


def test_window_when_memory_cannot_hold_its_rows_then_refused() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        sender(RecordingTable(transition(0)), max_bytes=100_000, n_step=NStep(1000, 0.9))
    assert raised.value.argument == "max_bytes"


@pytest.mark.parametrize(
    ("fault", "num_unknown"),
    [
        (StoreNotFoundError(name="frames"), 0),
        (PeerLostError(peer="the server", reason="gone"), 4),
        (MemoryError("no more"), 4),
    ],
)
def test_failure_when_a_batch_fails_then_every_error_has_the_numbers_of_stored_rows(
    table: RecordingTable, fault: Exception, num_unknown: int
) -> None:
    subject = sender(table)
    put(subject, 0, 1)
    subject.flush(FOREVER)
    table.faults = [fault]
    table.hold()
    put(subject, *range(2, 7))
    table.wait_called()
    table.let()
    with pytest.raises(WriterFailedError) as raised:
        subject.flush(FOREVER)
    assert raised.value.fields == {
        "store": "frames",
        "num_acknowledged": 2,
        "num_unknown": num_unknown,
        "num_unsent": 5 - num_unknown,
        "reason": str(fault),
    }
    assert raised.value.__cause__ is fault
    calls: list[Callable[[], None]] = [
        lambda: put(subject, 9),
        subject.end_trajectory,
        lambda: subject.close(FOREVER),
        lambda: put(subject, 9),
    ]
    for call in calls:
        with pytest.raises(WriterFailedError):
            call()
    subject.close(FOREVER)
    assert table.numbers == [0, 1]


def test_failure_when_the_server_does_not_answer_then_it_is_asked_and_missed(
    table: RecordingTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_sender, "PROBE_S", SOON)
    table.info_fault = ConnectError(address="host:1", reason="nobody there")
    subject = sender(table)
    table.hold()
    put(subject, *range(5))
    table.wait_called()
    with pytest.raises(WriterFailedError) as raised:
        subject.flush(Deadline.after(WAIT_S))
    assert raised.value.__cause__ is table.info_fault
    assert (raised.value.num_acknowledged, raised.value.num_unknown, raised.value.num_unsent) == (0, 4, 1)


def test_flush_when_only_the_limiter_waits_then_it_is_asked_and_nothing_fails(
    table: RecordingTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_sender, "PROBE_S", SOON / 4)
    subject = sender(table)
    table.hold()
    put(subject, *range(5))
    table.wait_called()
    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(subject.flush, Deadline.after(WAIT_S))
        table.wait_asked(2)
        with pytest.raises(DeadlineExceededError, match="4 rows under way and 1 waiting"):
            subject.flush(Deadline.after(SOON))
        table.let()
        flushing.result(WAIT_S)
    subject.close(FOREVER)
    assert table.numbers == list(range(5))


def test_close_when_time_is_up_then_still_open_and_may_be_closed_again(table: RecordingTable) -> None:
    subject = sender(table)
    table.hold()
    put(subject, 0)
    with pytest.raises(DeadlineExceededError):
        subject.close(Deadline.after(SOON))
    put(subject, 1)
    table.let()
    subject.close(FOREVER)
    subject.close(FOREVER)
    assert table.numbers == [0, 1]


def test_close_when_closed_then_other_calls_raise_closed_error_and_the_thread_is_over(table: RecordingTable) -> None:
    subject = sender(table)
    put(subject, 0)
    subject.close(FOREVER)
    calls: list[Callable[[], None]] = [lambda: put(subject, 1), subject.end_trajectory, lambda: subject.flush(FOREVER)]
    for call in calls:
        with pytest.raises(ClosedError, match="frames"):
            call()
    assert not find_threads(f"tdserve-writer-{table.name}-")


def test_put_when_closed_while_it_waits_for_room_then_closed_error(table: RecordingTable) -> None:
    subject = sender(table, max_bytes=2 * 608)
    table.hold()
    put(subject, 0, 1)
    table.wait_called()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(put, subject, 2, timeout_s=None)
        subject.stop()
        with pytest.raises(ClosedError):
            waiting.result(WAIT_S)


def test_drain_when_called_then_everything_is_sent_and_the_thread_ends(table: RecordingTable) -> None:
    subject = sender(table)
    put(subject, *range(6))
    subject.drain()
    subject.join(WAIT_S)
    assert table.numbers == list(range(6))
    with pytest.raises(ClosedError):
        put(subject, 6)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("num_before", [0, 1, 4])
def test_put_when_in_a_forked_child_then_refused_and_the_parent_goes_on(table: RecordingTable, num_before: int) -> None:
    subject = sender(table)
    put(subject, *range(num_before))
    child = os.fork()
    if not child:
        num_refused = 0
        calls: list[Callable[[], None]] = [
            lambda: put(subject, 9),
            subject.end_trajectory,
            lambda: subject.flush(FOREVER),
        ]
        try:
            with alarm(WAIT_S, "the end of the child"):
                for call in calls:
                    try:
                        call()
                    except ForkedClientError as error:
                        num_refused += error.pid == os.getppid()
                subject.drain()
                subject.join(WAIT_S)
        finally:
            os._exit(num_refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    put(subject, 9)
    subject.close(FOREVER)
    assert table.numbers == [*range(num_before), 9]
