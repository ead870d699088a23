from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock

import pytest

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError
from tdserve.client.session.requests.request_numbers import MAX_WRITES_UNDER_WAY, REPORT_EVERY, RequestNumbers
from tdserve.rules.request_log import RequestLog
from tdserve.v1 import control_pb2
from tests.processes import wait_for

CLIENT = b"client"


@pytest.fixture
def numbers() -> RequestNumbers:
    """Request numbers of a client that may have two writes under way."""
    return RequestNumbers(window=2)


def test_next_when_numbers_are_taken_then_from_one_on_and_no_two_alike(numbers: RequestNumbers) -> None:
    assert [
        numbers.take_number(),
        numbers.begin_change(),
        numbers.begin_write(Deadline.never),
        numbers.take_number(),
    ] == [1, 2, 3, 4]
    assert numbers.newest == 4


def test_report_when_changes_are_under_way_then_all_below_but_these(numbers: RequestNumbers) -> None:
    first, _, second, third = (
        numbers.begin_change(),
        numbers.take_number(),
        numbers.begin_change(),
        numbers.begin_change(),
    )
    numbers.end(second)
    answered = numbers.report_answered()
    assert (answered.below, list(answered.but_for)) == (third + 1, [first, third])


def test_report_with_when_it_is_not_due_or_the_request_changes_nothing_then_nothing(numbers: RequestNumbers) -> None:
    numbers.report_answered()
    for _ in range(REPORT_EVERY - 1):
        request = numbers.begin_change()
        assert numbers.report_with(request) is None
        numbers.end(request)
    assert numbers.report_with(numbers.take_number()) is None
    request = numbers.begin_change()
    answered = numbers.report_with(request)
    assert answered is not None
    assert list(answered.but_for) == [request]
    assert numbers.report_with(request) is None
    numbers.report_again()
    assert numbers.report_with(request) == answered


def test_begin_write_when_the_window_is_full_then_waits_until_one_ends(numbers: RequestNumbers) -> None:
    first = numbers.begin_write(Deadline.never)
    numbers.begin_write(Deadline.never)
    with pytest.raises(DeadlineExceededError):
        numbers.begin_write(Deadline.after(0.0))
    numbers.begin_change()  # requests that make room for writes must not wait for writes
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(numbers.begin_write, Deadline.after(20.0))
        numbers.end(first)
        assert waiting.result(20.0) > first
    assert numbers.num_writes == 2


def test_try_begin_write_when_the_window_is_full_then_called_once_when_there_is_room(numbers: RequestNumbers) -> None:
    calls: list[str] = []
    first, second = numbers.begin_write(Deadline.never), numbers.begin_write(Deadline.never)
    assert numbers.try_begin_write(lambda: calls.append("a")) is None
    assert numbers.try_begin_write(lambda: calls.append("b")) is None
    numbers.end(first)
    assert calls == ["a", "b"]  # the first caller had nothing to send
    numbers.end(second)
    assert calls == ["a", "b"]
    assert numbers.try_begin_write(lambda: calls.append("c")) is not None


def test_try_begin_write_when_one_in_line_takes_the_room_then_the_others_wait_on(numbers: RequestNumbers) -> None:
    first, second = numbers.begin_write(Deadline.never), numbers.begin_write(Deadline.never)
    taken: list[int | None] = []
    for _ in range(3):
        numbers.try_begin_write(lambda: taken.append(numbers.try_begin_write(lambda: None)))
    numbers.end(first)
    assert len(taken) == 1
    numbers.end(second)
    assert len(taken) == 2
    assert None not in taken


def test_begin_write_when_three_hundred_threads_write_then_no_more_than_the_window_at_once() -> None:
    numbers, lock, most = RequestNumbers(), Lock(), [0, 0]
    begin = Barrier(300)

    def write() -> None:
        begin.wait(20.0)
        request = numbers.begin_write(Deadline.after(20.0))
        with lock:
            most[0] += 1
            most[1] = max(most)
        if most[1] < MAX_WRITES_UNDER_WAY:
            wait_for(lambda: most[1] == MAX_WRITES_UNDER_WAY, "a full window")
        with lock:
            most[0] -= 1
        numbers.end(request)

    with ThreadPoolExecutor(300) as pool:
        for done in [pool.submit(write) for _ in range(300)]:
            done.result(20.0)
    assert most == [0, MAX_WRITES_UNDER_WAY]


class Server:
    """Keeps answers as the service does; after ``crash`` it has only what was on disk."""

    def __init__(self) -> None:
        self.log = RequestLog()
        self.applied: Counter[int] = Counter()

    def hear(self, answered: control_pb2.Answered | None) -> None:
        """Takes the report of a message."""
        if answered is not None:
            self.log.forget(CLIENT, answered.below, frozenset(answered.but_for))

    def serve(self, request: int) -> bytes:
        """Returns the answer to a change."""
        answer = self.log.find_answer(CLIENT, request)
        if answer is None:
            self.applied[request] += 1
            answer = b"answer %d" % request
            self.log.record(CLIENT, request, answer)
        return answer

    def crash(self) -> None:
        self.log = RequestLog.restore(list(self.log.iter_entries()))


def lives(seed: int) -> Iterator[tuple[int, Server, int]]:
    """Simulates a client whose requests, answers and sessions get lost, and a server that crashes. Yields after each
    step the received answers, the server, and the changes under way."""
    chance, numbers, server = random.Random(seed), RequestNumbers(), Server()
    under_way: list[int] = []
    num_answered = 0
    for _ in range(3_000):
        if chance.random() < 0.3:
            numbers.take_number()
        request = None
        if len(under_way) < 20 or chance.random() < 0.3:
            request = numbers.begin_change() if chance.random() < 0.5 else numbers.try_begin_write(lambda: None)
            under_way += [request] if request is not None else []
        if request is None:
            request = chance.choice(under_way[-10:])  # the first of them may wait for very long
        answered = numbers.report_with(request)
        if chance.random() < 0.8:  # the request arrives
            server.hear(answered)
            answer = server.serve(request)
            if chance.random() < 0.7:  # so does the answer
                assert answer == b"answer %d" % request
                under_way.remove(request)
                numbers.end(request)
                num_answered += 1
        if chance.random() < 0.01:
            server.crash()
        if chance.random() < 0.05:  # another session
            server.hear(numbers.report_answered())
        yield num_answered, server, len(under_way)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_retries_when_anything_gets_lost_then_each_change_is_made_once_and_few_answers_are_kept(seed: int) -> None:
    most_kept = most_answered = 0
    for num_answered, server, num_under_way in lives(seed):
        assert max(server.applied.values(), default=1) == 1
        most_kept = max(most_kept, server.log.count_kept(CLIENT) - num_under_way)
        most_answered = num_answered
    assert most_answered > 1_000
    assert 0 < most_kept < 4 * REPORT_EVERY
