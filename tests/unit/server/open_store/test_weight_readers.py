"""tdserve/server/open_store/weight_readers.py: versions that sessions have, and for how long they lack newer ones."""

from __future__ import annotations

import asyncio

import pytest

from tdserve.rules.weights import STEP_AFTER_LOSS
from tdserve.server.open_store import weight_readers
from tdserve.server.open_store.weight_readers import MAX_PUBLICATIONS, MAX_SHOWN, Readers
from tdserve.v1 import control_pb2


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the readers."""
    clock = Clock()
    monkeypatch.setattr(weight_readers, "time", clock)
    return clock


class Reader:
    """A session as its readers see it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.hello = control_pb2.Hello(host="there", pid=7)
        self.ended = asyncio.Event()


def look(found: Readers, newest: int) -> control_pb2.StoreFigures:
    """Returns the figures with the readers."""
    figures = control_pb2.StoreFigures()
    found.add_figures(newest, figures)
    return figures


def test_reader_when_newer_versions_come_then_lags_since_the_first_of_them(clock: Clock) -> None:
    found, session = Readers(), Reader(1)
    found.note_published(1)
    found.note_read(session, 1)
    (reader,) = look(found, 1).readers
    assert (reader.host, reader.pid, reader.session, reader.version) == ("there", 7, 1, 1)
    assert (reader.lag, reader.age_s) == (0, 0.0)
    for version in (2, 3):
        clock.now_s += 10
        found.note_published(version)
    clock.now_s += 5
    (reader,) = look(found, 3).readers
    assert (reader.lag, reader.age_s, reader.read_s) == (2, 15.0, 25.0)
    found.note_read(session, 2)
    (reader,) = look(found, 3).readers
    assert (reader.lag, reader.age_s, reader.read_s) == (1, 5.0, 0.0)


def test_reader_when_numbers_were_skipped_then_these_do_not_count(clock: Clock) -> None:
    found, session = Readers(), Reader(1)
    found.note_read(session, 3)
    (reader,) = look(found, 3 + STEP_AFTER_LOSS + 2).readers
    assert reader.lag == 2


def test_reader_when_its_session_ends_then_gone(clock: Clock) -> None:
    found, session = Readers(), Reader(1)
    found.note_read(session, 1)
    session.ended.set()
    assert look(found, 1).num_readers == 0


def test_readers_when_there_are_very_many_then_those_that_lag_most_are_named(clock: Clock) -> None:
    found = Readers()
    for number in range(2 * MAX_PUBLICATIONS):
        found.note_published(number + 1)
        found.note_read(Reader(number), number + 1)
    figures = look(found, 2 * MAX_PUBLICATIONS)
    assert figures.num_readers == 2 * MAX_PUBLICATIONS
    assert [reader.version for reader in figures.readers] == list(range(1, MAX_SHOWN + 1))


def test_figures_when_nothing_was_published_since_the_start_then_the_age_is_unknown(clock: Clock) -> None:
    found = Readers()
    found.note_read(Reader(1), 3)
    (reader,) = look(found, 5).readers
    assert (reader.lag, reader.age_s) == (2, 0.0)
