"""tdserve/transport/blocking_threads.py: callers get the results or errors of their calls, or are released."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tdserve.transport.blocking_threads import BlockingThreads


def test_wait_when_the_call_ends_then_so_does_the_wait() -> None:
    waiters = BlockingThreads("test-waiter")
    seen: list[str] = []
    assert waiters.wait(lambda: seen.append(threading.current_thread().name))
    assert seen == ["test-waiter"]
    with pytest.raises(ZeroDivisionError):
        waiters.wait(lambda: 1 // 0)
    waiters.close()


def test_close_when_a_call_blocks_then_its_caller_is_let_go_and_the_thread_ends_with_the_call() -> None:
    waiters = BlockingThreads("test-blocked")
    has_begun, may_end = threading.Event(), threading.Event()

    def block() -> None:
        has_begun.set()
        may_end.wait(30.0)

    with ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(waiters.wait, block)
        assert has_begun.wait(30.0)
        waiters.close()
        assert waiting.result(30.0) is False
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "test-blocked"]
    may_end.set()
    thread.join(30.0)
    assert not thread.is_alive()


def test_wait_when_closed_then_is_not_begun() -> None:
    waiters = BlockingThreads("test-closed")
    waiters.close()
    assert waiters.wait(lambda: 1 // 0) is False


def test_wait_when_several_then_none_waits_for_another() -> None:
    waiters = BlockingThreads("test-several")
    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as callers:
        assert list(callers.map(waiters.wait, [lambda: both.wait(30.0)] * 2)) == [True, True]
    waiters.close()
