"""When a sender's thread sends: by its clock, when it is drained, and at the exit of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tdserve.base.deadline import Deadline
from tdserve.client.session import process_exit
from tdserve.client.tables.writers import row_sender
from tests.unit.client.tables.recording import WAIT_S, RecordingTable, put, sender

FOREVER = Deadline.never
SOON = 0.05


@pytest.fixture
def table() -> Iterator[RecordingTable]:
    """Lets everything through at last, so that no thread stays behind."""
    made = RecordingTable()
    yield made
    made.let()


class Clock:
    """Stands for the module ``time``.

    Attributes:
        put_s: The time at which rows are put.
        look_s: The time at which the sender's thread looks at them.
        on_put: Called once while a row is put.
    """

    def __init__(self) -> None:
        self.put_s = self.look_s = 0.0
        self.on_put: Callable[[], None] | None = None

    def monotonic(self) -> float:
        if threading.current_thread() is not threading.main_thread():
            return self.look_s
        on_put, self.on_put = self.on_put, None
        if on_put is not None:
            on_put()
        return self.put_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The sender's clock."""
    made = Clock()
    monkeypatch.setattr(row_sender, "time", made)
    return made


def test_drain_when_the_collector_calls_it_in_the_thread_that_puts_then_no_deadlock(
    table: RecordingTable, clock: Clock
) -> None:
    subject = sender(table)
    clock.on_put = subject.drain
    put(subject, 0)
    subject.join(WAIT_S)
    assert table.numbers == [0]


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """The functions that are registered from now on for the exit of the process."""
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(process_exit, "call_at_exit", calls.append)
    return calls


def test_exit_when_a_sender_is_still_open_then_its_rows_are_sent(
    table: RecordingTable, at_exit: list[Callable[[], None]]
) -> None:
    put(subject := sender(table), 0, 1)
    at_exit[-1]()
    assert table.numbers == [0, 1]
    assert subject.num_acknowledged == 2


def test_exit_when_the_table_waits_then_not_for_ever(
    table: RecordingTable, at_exit: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_exit, "EXIT_FLUSH_S", SOON)
    table.hold()
    put(subject := sender(table), 0)
    at_exit[-1]()
    assert table.numbers == []
    assert subject.num_acknowledged == 0


def test_timing_when_the_newest_row_is_young_then_it_is_held_back(table: RecordingTable, clock: Clock) -> None:
    clock.look_s = 9.999  # the thread looks again each millisecond
    subject = sender(table, batch=100, flush_s=10.0)
    put(subject, 0)
    clock.put_s = 5.0
    put(subject, 1)
    table.hold()
    clock.look_s = 10.0
    table.wait_called()
    clock.look_s = 14.999
    table.let()
    table.wait_stored(1)
    assert table.batches == [[0]]
    clock.look_s = 15.0
    table.wait_stored(2)
    assert table.batches == [[0], [1]]
    subject.close(FOREVER)
