"""A request that a client has sent: receives its answers, and keeps its content until it is written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from enum import Enum, auto
from threading import Lock, current_thread, main_thread
from typing import NamedTuple

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, RemoteProtocolError, TDServeError, TransferAbortedError
from tdserve.base.timed_queue import TimedQueue
from tdserve.client.session.calls.call_traces import TracedCall
from tdserve.client.session.channels.content_channel import ContentChannel
from tdserve.client.session.requests.request_numbers import SIGNAL_POLL_S
from tdserve.control.status import decode_failure, get_code
from tdserve.transport.channel import Channel, Work
from tdserve.v1 import control_pb2

SLOW_S = 1.0
"""Time after which an answer that has not come is taken to be waiting for something."""

MAX_POLL_S = 3600.0
"""The longest wait that every Python lock supports."""

Answer = control_pb2.ServerMessage | TDServeError
OnAnswer = Callable[[Answer], None]
OnPermit = Callable[[control_pb2.Accepted], control_pb2.Written]
"""Writes content in place as the server permits it; raises a TDServeError if nothing was written."""


class RequestStage(Enum):
    """How far the server has come with a request, as its answers say; a request only goes forward."""

    SENT = auto()
    """Nothing has come yet."""
    ACCEPTED = auto()
    """The server has announced, or permitted, the content; another answer follows."""
    ENDED = auto()
    """The server has finished it, or the session has ended."""


class WaitOutcome(Enum):
    """How the last wait for an answer has ended."""

    NONE = auto()
    """No wait has ended yet, or the answer need not have come."""
    ANSWERED = auto()
    FAILED = auto()
    """The wait has raised the server's error, or that of a lost session."""
    GIVEN_UP = auto()
    """Its time was up: the server is told, and what comes later is not received."""


class Announced(NamedTuple):
    """Receives that began when an answer announced their content.

    Attributes:
        columns: Views of the layout's flat buffer.
        values: Receives the block of values that follows the leaves; None if there is none.
        works: One per message.
        channel: The channel that they use.
    """

    columns: list[torch.Tensor]
    values: torch.Tensor | None
    works: list[Work]
    channel: Channel


OnAnnounced = Callable[["Pending", control_pb2.Accepted], Announced | None]
"""Starts to receive the content that an answer announces, without waiting; None if only its caller can do so."""


def find_accepted(answer: control_pb2.ServerMessage) -> control_pb2.Accepted:
    """Returns the permit in an answer: a message of its own, or part of the answer to a finished request."""
    return answer.accepted if answer.HasField("accepted") else answer.done.accepted


class Reply(NamedTuple):
    """The answer to a request whose content is still to be received.

    Attributes:
        request: Its number.
        pending: Receives what follows.
        answer: The server's message.
        deadline: Deadline of the call.
    """

    request: int
    pending: Pending
    answer: control_pb2.ServerMessage
    deadline: Deadline

    @property
    def accepted(self) -> control_pb2.Accepted:
        """The permit in it."""
        return find_accepted(self.answer)


class Pending:
    """A request that was sent. Receives its answers in order.

    Args:
        on_answer: Called in the receiving thread instead of keeping the answer for ``wait``; must not block. It is
            called once, although the answer and the loss of the session may arrive at the same time in two threads.
        on_silence: Called when ``wait`` has timed out: what comes later is not received.
        on_permit: For a write of a local session: called in the stream's thread when the permit arrives.
        on_announced: Called in the receiving thread before ``wait`` returns the answer that announces content.

    Attributes:
        stage: How far the server has come; changed by the thread that receives.
        outcome: How the last wait has ended; changed by the thread that waits.
        mail_number: Number of its message on the control channel; 0 if it was sent over gRPC.
        content_channel: The channel of its data messages, once it is known.
        announced: The receives that ``on_announced`` has started.
        call: Kind of the request; "" if it is not counted.
        begun_s: When it was sent, by ``time.perf_counter``.
        code: Code of the error that was its answer, "" if none was.
        traced_call: The call that ends with it, if that is traced.
    """

    def __init__(
        self,
        on_answer: OnAnswer | None = None,
        *,
        on_silence: Callable[[], None],
        on_permit: OnPermit | None = None,
        on_announced: OnAnnounced | None = None,
    ) -> None:
        self._on_permit = on_permit
        self._writing = Lock()
        self._answering = Lock()
        self._answers: TimedQueue[Answer] = TimedQueue()
        self._on_silence = on_silence
        self._on_answer = on_answer
        self.stage = RequestStage.SENT
        self.outcome = WaitOutcome.NONE
        self.mail_number = 0
        self.content_channel: ContentChannel | None = None
        self.announced: Announced | None = None
        self.call = self.code = ""
        self.begun_s = 0.0
        self.traced_call: TracedCall | None = None
        self._on_announced = on_announced

    @property
    def has_failed(self) -> bool:
        """Whether a wait has raised the server's error, or that of a lost session."""
        return self.outcome is WaitOutcome.FAILED

    @property
    def is_mailed(self) -> bool:
        """Whether the request was sent over the control channel."""
        return self.mail_number > 0

    def put(self, answer: Answer) -> None:
        """Receives an answer, or the error that ended the session."""
        is_accepted = not isinstance(answer, TDServeError) and answer.HasField("accepted")
        self.stage = RequestStage.ACCEPTED if is_accepted else RequestStage.ENDED
        if isinstance(answer, TDServeError):
            self.code = answer.code
        elif answer.HasField("failure"):
            self.code = get_code(answer.failure)
        if self._on_announced is not None and isinstance(answer, control_pb2.ServerMessage) and is_accepted:
            self.announced = self._on_announced(self, answer.accepted)
        (self._take_callback() or self._answers.put)(answer)

    def end_trace(self) -> None:
        """Ends the traced call that consists of this request, if there is one."""
        if self.traced_call is not None:
            self.traced_call.end(self.code)

    def disown(self) -> bool:
        """Abandons the request: no caller waits for an answer, and the content may change from now on.

        Returns whether the answer had not come.
        """
        is_unanswered = self._take_callback() is not None
        self.withdraw()
        return is_unanswered

    def give_up(self) -> bool:
        """Does what ``disown`` does, and tells the server: the time for the answer is up."""
        is_unanswered = self.disown()
        if is_unanswered:
            self._fall_silent()
        return is_unanswered

    def _fall_silent(self) -> None:
        self.outcome, self.code = WaitOutcome.GIVEN_UP, DeadlineExceededError.code
        self._on_silence()

    def _take_callback(self) -> OnAnswer | None:
        if self._on_answer is None:
            return None
        with self._answering:
            on_answer, self._on_answer = self._on_answer, None
        return on_answer

    def take_late(self) -> Answer | None:
        """Returns what arrived after ``wait`` had given up."""
        return self._answers.get_now()

    @property
    def takes_permit(self) -> bool:
        """Whether it is a write of a local session, to whose permit :meth:`write_in_place` is the answer."""
        return self._on_permit is not None

    def write_in_place(self, accepted: control_pb2.Accepted) -> control_pb2.Written:
        """Writes the content where the server permits it. Raises what ``on_permit`` raises."""
        with self._writing:
            if self._on_permit is None:
                raise RemoteProtocolError(expected="an answer", received="a permit to write")
            return self._on_permit(accepted)

    def withdraw(self) -> None:
        """Lets the content change from now on.

        A write that has not begun never will; one under way is finished first.
        """
        with self._writing:
            if self._on_permit is not None:
                self._on_permit = _refuse

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
            is_owed: Whether an answer must come: if so, silence is reported.
            on_slow: Called once, in this thread, if no answer has come after ``SLOW_S``, with the seconds that are
                left.

        Raises:
            DeadlineExceededError: No answer came in time.
            TDServeError: The server's error, or that of a lost session.
        """
        now_s = time.monotonic()
        end_s = math.inf if timeout_s is None else now_s + timeout_s
        slow_s = math.inf if on_slow is None else now_s + SLOW_S
        poll_s = SIGNAL_POLL_S if current_thread() is main_thread() else MAX_POLL_S  # no other thread gets signals
        while True:
            now_s = time.monotonic()
            remaining_s, until_slow_s = max(end_s - now_s, 0.0), max(slow_s - now_s, 0.0)
            answer = self._answers.get(min(remaining_s, poll_s, until_slow_s))
            if answer is not None:
                break
            if on_slow is not None and until_slow_s <= min(remaining_s, poll_s):
                slow_s = math.inf
                on_slow(end_s - time.monotonic())
            elif remaining_s <= poll_s:
                if is_owed:
                    self._fall_silent()
                raise DeadlineExceededError(what=f"an answer to {what}", timeout_s=timeout_s)
        is_failure = isinstance(answer, TDServeError) or answer.HasField("failure")
        self.outcome = WaitOutcome.FAILED if is_failure else WaitOutcome.ANSWERED
        return check_answer(answer)


def check_answer(answer: Answer) -> control_pb2.ServerMessage:
    """Returns the server's message; raises the error that it, or the end of the session, is."""
    if isinstance(answer, TDServeError):
        raise answer
    if answer.HasField("failure"):
        raise decode_failure(answer.failure)
    return answer


def _refuse(accepted: control_pb2.Accepted) -> control_pb2.Written:
    """Answers a permit for content that may have changed."""
    raise TransferAbortedError(transfer=0, reason="the caller has stopped waiting for this write")
