from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError
from tdserve.client.session.calls.call_order import CallOrder

TIMEOUT_S = 20.0


@pytest.fixture
def order() -> CallOrder:
    return CallOrder()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def begin(threads: ThreadPoolExecutor, job: Callable[[], Any]) -> Callable[[], Future[Any]]:
    return lambda: threads.submit(job)


def fail() -> None:
    raise ValueError("it failed")


def test_run_when_jobs_are_of_one_store_then_each_begins_after_the_one_before(
    order: CallOrder, threads: ThreadPoolExecutor
) -> None:
    may_end, others_ran = Event(), Event()
    ran: list[int] = []
    order.run("a", begin(threads, lambda: may_end.wait(TIMEOUT_S) and ran.append(0)))  # type: ignore[func-returns-value]
    for number in range(1, 20):
        order.run("a", begin(threads, lambda number=number: ran.append(number)))  # type: ignore[misc]
    order.run("b", begin(threads, others_ran.set))
    assert others_ran.wait(TIMEOUT_S)
    assert ran == []
    may_end.set()
    order.wait("a", Deadline.after(TIMEOUT_S))
    assert ran == list(range(20))


def test_run_when_a_job_fails_then_the_next_one_begins(order: CallOrder, threads: ThreadPoolExecutor) -> None:
    has_begun = Event()
    order.run("a", begin(threads, fail))
    order.run("a", begin(threads, has_begun.set))
    assert has_begun.wait(TIMEOUT_S)


def test_wait_when_jobs_have_not_ended_then_the_deadline_counts(order: CallOrder, threads: ThreadPoolExecutor) -> None:
    may_end = Event()
    order.run("a", begin(threads, lambda: may_end.wait(TIMEOUT_S)))
    with pytest.raises(DeadlineExceededError, match="'a'"):
        order.wait("a", Deadline.after(0.0))
    order.wait("b", Deadline.after(0.0))
    may_end.set()
    order.wait("a", Deadline.after(TIMEOUT_S))
