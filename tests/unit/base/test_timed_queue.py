"""tdserve/base/timed_queue.py: objects come in order. Waits end in time, also if something interrupts them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from tdserve.base.timed_queue import TimedQueue
from tests.processes import wait_for


def test_get_when_objects_were_put_then_in_their_order_and_none_twice() -> None:
    queue: TimedQueue[int] = TimedQueue()
    for number in range(3):
        queue.put(number)
    assert [queue.get(0.0), queue.get_now(), queue.get(30.0)] == [0, 1, 2]
    assert queue.get(0.0) is queue.get_now() is None
    queue.put(3)
    assert queue.get(30.0) == 3


def test_get_when_an_object_comes_later_then_wakes() -> None:
    there, back = TimedQueue[int](), TimedQueue[int]()

    def answer() -> None:
        while (number := there.get(30.0)) is not None and number >= 0:
            back.put(number + 1)

    thread = Thread(target=answer)
    thread.start()
    for number in range(2000):
        there.put(number)
        assert back.get(30.0) == number + 1
    there.put(-1)
    thread.join(30.0)
    assert not thread.is_alive()


def test_get_when_many_put_at_once_then_all_objects_come() -> None:
    queue: TimedQueue[int] = TimedQueue()

    def put_all() -> None:
        for number in range(500):
            queue.put(number)

    threads = [Thread(target=put_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    found = [queue.get(30.0) for _ in range(2000)]
    assert sorted(each for each in found if each is not None) == sorted([*range(500)] * 4)
    assert queue.get(0.0) is None


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 1e-6, 1e-4])
def test_get_when_the_time_is_very_short_then_ends(timeout_s: float) -> None:
    for _ in range(2000):
        assert TimedQueue[int]().get(timeout_s) is None


@pytest.fixture
def slow_handler() -> Iterator[list[float]]:
    """A handler of SIGALRM that takes 0.3 s; holds when it was over."""
    over_s: list[float] = []

    def spin(*_: Any) -> None:
        end_s = time.monotonic() + 0.3
        wait_for(lambda: time.monotonic() >= end_s, "the end of the handler")
        over_s.append(time.monotonic())

    before = signal.signal(signal.SIGALRM, spin)
    yield over_s
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_get_when_the_handler_of_a_signal_takes_longer_than_is_left_then_ends(slow_handler: list[float]) -> None:
    queue: TimedQueue[int] = TimedQueue()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    assert queue.get(0.2) is None
    assert len(slow_handler) == 1
