from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, cast

import pytest

from tdserve.base.deadline import GRACE_S, Deadline
from tdserve.base.errors import ClosedError, ConnectError, DeadlineExceededError
from tdserve.client.session.session import Session
from tdserve.client.session.session_opener import LATE_LOOK_S, MIN_OPENING_S, Opening

TIMEOUT_S = 20.0
ADDRESS = "127.0.0.1:1"


def explain(waited_s: float, look_s: float) -> str:
    """Returns why there is no answer."""
    return f"silent for {waited_s:.2f} s"


class Slow:
    """Opens a session when the test lets it."""

    def __init__(self) -> None:
        self.may_open = Event()
        self.made: Any = object()
        self.error: BaseException | None = None
        self.deadline = Deadline.never

    def __call__(self, deadline: Deadline) -> Session:
        self.deadline = deadline
        assert self.may_open.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        return cast(Session, self.made)


def test_wait_when_time_is_up_then_error_and_the_next_finds_what_was_opened_meanwhile() -> None:
    slow = Slow()
    opening = Opening(slow, address=ADDRESS, timeout_s=0.0, explain_silence=explain)
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:1: silent for \d+\.\d\d s"):
        opening.wait(0.01)
    assert not opening.is_over
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(opening.wait, TIMEOUT_S) for _ in range(2)]
        slow.may_open.set()
        assert [each.result(TIMEOUT_S) for each in waiting] == [slow.made] * 2
    assert opening.is_over
    assert slow.deadline.timeout_s == MIN_OPENING_S
    opening.join()


def test_wait_when_the_reason_of_the_silence_is_known_then_the_error_has_it() -> None:
    slow = Slow()
    opening = Opening(slow, address=ADDRESS, timeout_s=0.0, explain_silence=lambda *_: "its name does not resolve")
    with pytest.raises(ConnectError, match="its name does not resolve"):
        opening.wait(0.01)
    slow.may_open.set()
    opening.join()


def test_wait_when_it_cannot_be_opened_then_all_get_the_error() -> None:
    slow = Slow()
    slow.error = ClosedError(what="the client")
    opening = Opening(slow, address=ADDRESS, timeout_s=2 * MIN_OPENING_S, explain_silence=explain)
    slow.may_open.set()
    for _ in range(2):
        with pytest.raises(ClosedError):
            opening.wait(TIMEOUT_S)
    assert opening.is_over
    assert slow.deadline.timeout_s == 2 * MIN_OPENING_S


def test_wait_when_what_had_less_time_was_not_opened_in_it_then_an_error_that_a_retry_helps() -> None:
    slow = Slow()
    slow.error = DeadlineExceededError(what="an answer to Hello", timeout_s=0.4)
    opening = Opening(slow, address=ADDRESS, timeout_s=0.0, explain_silence=explain)
    slow.may_open.set()
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:1: silent for [1-9]\d?\.\d\d s") as caught:  # not 0.4, nor 20
        opening.wait(TIMEOUT_S, begun_s=time.monotonic() - 1.0)
    assert caught.value.retryable
    assert isinstance(caught.value.__cause__, DeadlineExceededError)


@pytest.mark.parametrize(
    ("timeout_s", "late_s", "expected_s"),
    [(1.0, -0.5, GRACE_S), (1.0, 0.0, GRACE_S), (1.0, 0.3, 0.1), (1.0, 0.5, LATE_LOOK_S), (0.0, 2.0, GRACE_S)],
)
def test_wait_when_the_call_is_late_then_the_reason_is_looked_for_in_the_rest_of_its_grace(
    timeout_s: float, late_s: float, expected_s: float
) -> None:
    looks: list[float] = []

    def note_look(waited_s: float, look_s: float) -> str:
        looks.append(look_s)
        return "silent"

    slow, now_s = Slow(), [0.0]
    opening = Opening(slow, address=ADDRESS, timeout_s=0.0, explain_silence=note_look)
    deadline = Deadline.after(timeout_s, clock=lambda: now_s[0])
    now_s[0] = timeout_s + late_s
    with pytest.raises(ConnectError):
        opening.wait(0.0, deadline=deadline)
    assert looks == [pytest.approx(expected_s)]
    slow.may_open.set()
    opening.join()
