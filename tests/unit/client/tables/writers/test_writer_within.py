"""Calls of a writer in a block that has a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import tdserve
from tdserve.base.errors import DeadlineExceededError
from tdserve.client.tables.writers import writer
from tdserve.client.tables.writers.writer import ReplayWriter
from tests.unit.client.tables.recording import WAIT_S, TimedTable, row


def append_and_raise(subject: ReplayWriter) -> None:
    """Appends a row in a block that raises."""
    with subject:
        subject.append(row(1))
        raise ZeroDivisionError


@pytest.mark.parametrize("what", ["append", "flush", "close"])
def test_writer_when_a_call_is_within_a_block_then_it_ends_by_its_time(what: str) -> None:
    table = TimedTable(timeout_s=WAIT_S)
    subject = ReplayWriter(table, max_bytes=2000, timeout_s=WAIT_S)
    table.hold()
    subject.append(row(0))

    def append() -> None:
        for number in range(1, 100):
            subject.append(row(number))

    calls: dict[str, Callable[[], None]] = {"append": append, "flush": subject.flush, "close": subject.close}
    with tdserve.within(0.05), pytest.raises(DeadlineExceededError, match=r"within 0\.05 s"):
        calls[what]()
    with tdserve.within(WAIT_S), pytest.raises(DeadlineExceededError, match=r"within 0\.02 s"):
        subject.flush(timeout_s=0.02)
    table.let()
    subject.close()
    assert table.numbers == list(range(subject.num_appended))


def test_writer_when_its_block_raises_as_the_time_is_over_then_rows_are_sent_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "ABANDON_FLUSH_S", WAIT_S)
    table = TimedTable()
    with pytest.raises(ZeroDivisionError), tdserve.within(0.0):
        append_and_raise(ReplayWriter(table))
    assert table.numbers == [1]
    table.hold()
    began_s = time.monotonic()
    with pytest.raises(ZeroDivisionError), tdserve.within(0.0):
        append_and_raise(ReplayWriter(table))
    assert time.monotonic() - began_s < WAIT_S / 2
    table.let()
