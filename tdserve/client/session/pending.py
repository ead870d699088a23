"""A request of a client that was sent: where its answers arrive, and its content until it is written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, current_thread, main_thread
from typing import NamedTuple

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, TDServeError, TransferAbortedError
from tdserve.client.session.content_channel import ContentChannel
from tdserve.client.session.request_numbers import SIGNAL_POLL_S
from tdserve.control.status import decode_failure
from tdserve.v1 import control_pb2

SLOW_S = 1.0
"""An answer that has not come by then waits for something."""

MAX_POLL_S = 3600.0
"""Longer than this no lock of Python can wait everywhere."""

Answer = control_pb2.ServerMessage | TDServeError
OnAnswer = Callable[[Answer], None]
OnGranted = Callable[[control_pb2.Accepted], control_pb2.Written]
"""Writes content in place; raises a TDServeError when it has written nothing."""


def accepted_in(answer: control_pb2.ServerMessage) -> control_pb2.Accepted:
    """What the server says of a request that it lets happen: by itself, or with the end of what is over already."""
    return answer.accepted if answer.HasField("accepted") else answer.done.accepted


class Reply(NamedTuple):
    """The answer to a request, of which the content is still to be taken.

    Attributes:
        request: Its number.
        pending: Where what follows arrives.
        answer: What the server says.
        deadline: Of the call.
    """

    request: int
    pending: Pending
    answer: control_pb2.ServerMessage
    deadline: Deadline

    @property
    def accepted(self) -> control_pb2.Accepted:
        """What the server lets happen."""
        return accepted_in(self.answer)


class Pending:
    """A request that was sent; its answers arrive here, in order.

    Args:
        on_answer: Called instead of keeping the answer for ``wait``, in the thread that brings it; must not block. It
            is called once: the answer and the loss of the session may come at the same time, by two threads.
        on_silence: Called when ``wait`` has waited in vain: what may still come, nobody would take.
        place: Of a write of a local session: called in the stream's thread when the server lets it write.

    Attributes:
        has_failed: Whether ``wait`` has raised what the server answered, or how the session ended.
        has_ended: Whether the server is through with the request, or the session has ended.
        is_given_up: Whether ``wait`` has waited in vain, and nobody will take what comes.
        is_mailed: Whether the request went as mail.
        content: The channel of its data messages, once it is known.
    """

    def __init__(
        self, on_answer: OnAnswer | None = None, *, on_silence: Callable[[], None], place: OnGranted | None = None
    ) -> None:
        self.is_write = place is not None
        self._place = place
        self._placing = Lock()
        self._answering = Lock()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._on_silence = on_silence
        self._on_answer = on_answer
        self.has_failed = False
        self.has_ended = False
        self.is_given_up = False
        self.is_mailed = False
        self.content: ContentChannel | None = None

    def put(self, answer: Answer) -> None:
        """Takes an answer, or how the session ended."""
        self.has_ended = isinstance(answer, TDServeError) or not answer.HasField("accepted")
        (self._take_callback() or self._answers.put)(answer)

    def disown(self) -> None:
        """Nobody waits for an answer any more, and the content may change from now on: what comes is for nobody."""
        self._take_callback()
        self.withdraw()

    def _take_callback(self) -> OnAnswer | None:
        if self._on_answer is None:
            return None
        with self._answering:
            on_answer, self._on_answer = self._on_answer, None
        return on_answer

    def take_late(self) -> Answer | None:
        """What came when ``wait`` had given up already."""
        try:
            return self._answers.get_nowait()
        except Empty:
            return None

    def grant(self, accepted: control_pb2.Accepted) -> control_pb2.Written:
        """Writes the content where the server lets it. Raises what ``place`` raises."""
        with self._placing:
            if self._place is None:
                raise TransferAbortedError(transfer=0, reason="nobody waits for this write any more")
            return self._place(accepted)

    def withdraw(self) -> None:
        """The content may change from now on: it is not written any more, or was written whole."""
        with self._placing:
            self._place = None

    def wait(
        self,
        timeout_s: float | None,
        what: str,
        *,
        on_slow: Callable[[float], None] | None = None,
        is_owed: bool = True,
    ) -> control_pb2.ServerMessage:
        """Returns the next answer.

        Args:
            is_owed: Whether there must be one: silence is told then.
            on_slow: Called once, in this thread, when there is none after ``SLOW_S``, with the seconds that are left.

        Raises:
            DeadlineExceededError: There was none in time.
            TDServeError: What the server answered, or how the session ended.
        """
        now_s = time.monotonic()
        end_s = math.inf if timeout_s is None else now_s + timeout_s
        slow_s = math.inf if on_slow is None else now_s + SLOW_S
        poll_s = SIGNAL_POLL_S if current_thread() is main_thread() else MAX_POLL_S  # no other thread gets signals
        while True:
            now_s = time.monotonic()
            remaining_s, until_slow_s = max(end_s - now_s, 0.0), max(slow_s - now_s, 0.0)
            try:
                answer = self._answers.get(timeout=min(remaining_s, poll_s, until_slow_s))
                break
            except Empty:
                if on_slow is not None and until_slow_s <= min(remaining_s, poll_s):
                    slow_s = math.inf
                    on_slow(end_s - time.monotonic())
                elif remaining_s <= poll_s:
                    if is_owed:
                        self.is_given_up = True
                        self._on_silence()
                    raise DeadlineExceededError(what=f"an answer to {what}", timeout_s=timeout_s) from None
        self.has_failed = isinstance(answer, TDServeError) or answer.HasField("failure")
        return check_answer(answer)


def check_answer(answer: Answer) -> control_pb2.ServerMessage:
    """The server's message, unless it or the session's end is an error, which is raised."""
    if isinstance(answer, TDServeError):
        raise answer
    if answer.HasField("failure"):
        raise decode_failure(answer.failure)
    return answer
