"""What no thread waits for ends when its time is up."""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue

import pytest

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError
from tdserve.client.session.calls.background_calls import MAX_THREADS, BackgroundCalls
from tdserve.client.session.calls.deadline_watch import DeadlineWatch

LIMIT_S = 20.0


def test_watch_when_one_that_was_added_later_is_over_first_then_it_is_called_first() -> None:
    watch, over = DeadlineWatch(), SimpleQueue[str]()
    removed = watch.add(0.001, lambda: over.put("removed"))
    watch.remove(removed)
    watch.add(None, lambda: over.put("never"))
    watch.add(LIMIT_S * 10, lambda: over.put("later"))
    watch.add(0.05, lambda: over.put("second"))
    watch.add(0.0, lambda: over.put("first"))
    assert [over.get(timeout=LIMIT_S) for _ in range(2)] == ["first", "second"]
    assert over.empty()


def test_watch_when_nothing_is_left_then_its_thread_ends_and_another_starts_for_the_next() -> None:
    watch, over = DeadlineWatch(), SimpleQueue[threading.Thread]()
    for _ in range(2):
        watch.add(0.0, lambda: over.put(threading.current_thread()))
        over.get(timeout=LIMIT_S).join(LIMIT_S)


@pytest.mark.parametrize("is_closed_first", [False, True])
def test_watch_when_it_is_closed_then_its_thread_ends_as_soon_as_nothing_is_left(is_closed_first: bool) -> None:
    watch, threads = DeadlineWatch(), SimpleQueue[threading.Thread]()
    number = watch.add(LIMIT_S * 10, lambda: None)
    watch.add(0.0, lambda: threads.put(threading.current_thread()))
    thread = threads.get(timeout=LIMIT_S)
    for step in (watch.close, partial(watch.remove, number))[:: 1 if is_closed_first else -1]:
        step()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_background_calls_when_all_threads_are_held_then_a_call_ends_in_time_and_is_not_made() -> None:
    calls, go_on, made = BackgroundCalls("held"), threading.Event(), SimpleQueue[str]()
    held = [calls.run(lambda: go_on.wait(LIMIT_S), deadline=Deadline.after(LIMIT_S)) for _ in range(MAX_THREADS)]
    late = calls.run(lambda: made.put("late"), deadline=Deadline.after(0.01))
    in_turn = [calls.run(lambda: made.put("in turn"), deadline=Deadline.after(s), in_turn="a") for s in (0.01, LIMIT_S)]
    for each in (late, in_turn[0]):
        with pytest.raises(DeadlineExceededError):
            each.result(LIMIT_S)
    go_on.set()
    assert [each.result(LIMIT_S) for each in held] == [True] * MAX_THREADS
    in_turn[1].result(LIMIT_S)
    assert made.get(timeout=LIMIT_S) == "in turn"
    assert made.empty()
    calls.close()
