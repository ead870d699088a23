from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from tdserve.control import forking
from tdserve.control.forking import sent_beside_forks, watch_forks
from tests.integration.processes import wait_for

TIMEOUT_S = 20.0


def queue_of(*messages: int | None) -> SimpleQueue[int | None]:
    """A queue that holds these."""
    queue: SimpleQueue[int | None] = SimpleQueue()
    for message in messages:
        queue.put(message)
    return queue


def test_messages_when_nobody_forks_then_all_up_to_the_end() -> None:
    assert list(sent_beside_forks(queue_of(1, 2, None, 3))) == [1, 2]


def fork_and_ask_for_a_message() -> int:
    """The exit code of a forked child that asks for a message, and gets it."""
    pid = os.fork()
    if pid == 0:
        os._exit(next(sent_beside_forks(queue_of(7))))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fork_when_a_message_is_being_sent_then_waits_for_it_and_the_next_one_for_the_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forking, "SENT_TIMEOUT_S", TIMEOUT_S)
    watch_forks()
    messages = sent_beside_forks(queue_of(1, 2))
    assert next(messages) == 1
    with ThreadPoolExecutor(1) as thread:
        forks = thread.submit(fork_and_ask_for_a_message)
        wait_for(lambda: forking._current[-1]._is_held, "the fork's wait")
        assert not forks.done()
        assert next(messages) == 2  # the first has left; comes when the fork is over
        assert forks.result(TIMEOUT_S) == 7


def test_fork_when_a_message_does_not_leave_then_not_held_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "SENT_TIMEOUT_S", 0.01)
    watch_forks()
    messages = sent_beside_forks(queue_of(1, 2))
    assert next(messages) == 1
    assert fork_and_ask_for_a_message() == 7
    assert next(messages) == 2
