"""What coalescers of writes share: one thread at a time sends for all, in order, as the client's window allows."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, TimeoutError as FutureTimeoutError, wait
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, DeadlineExceededError, TDServeError, TransferAbortedError
from tdserve.client.session.calls.cancellation import get_cancellation
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.process_exit import ExitFlush
from tdserve.client.session.requests.pending import MAX_POLL_S
from tdserve.client.session.session_client import SessionClient

SENDING_POLL_S = 0.001
"""Pause while another thread sends parts: longer than sending most of them takes."""


class Part(Protocol):
    """A write that may share a request with others.

    Attributes:
        deadline: Its own.
        what: Names it in the error of a timeout.
        future: Gets its result.
    """

    @property
    def deadline(self) -> Deadline: ...

    @property
    def what(self) -> str: ...

    @property
    def future(self) -> Future[Any]: ...


_Part = TypeVar("_Part", bound=Part)


class Coalescer(ABC, Generic[_Part]):
    """The writes of one handle that wait to be sent. Threads: safe.

    Args:
        client: Whose requests they are.
    """

    def __init__(self, client: SessionClient) -> None:
        self._client = client
        self._lock = Lock()
        self._is_sending = False
        self._is_in_line = False  # waits until the client may begin another write
        self._pid = os.getpid()
        self._given_up: set[Future[Any]] = set()  # what ``finish`` waited for without an answer
        _EXIT_FLUSH.add(self)

    @property
    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether writes wait or are under way that no other may overtake."""

    @abstractmethod
    def _append(self, part: _Part) -> None:
        """Lets a part wait behind all others; called under the lock."""

    @abstractmethod
    def _take_out(self, is_meant: Callable[[_Part], bool]) -> list[_Part]:
        """Removes and returns those waiting parts that are meant; called under the lock."""

    @abstractmethod
    def _take_next(self) -> list[_Part]:
        """Returns the parts of the next request, none if nothing may be sent now; called under the lock."""

    @abstractmethod
    def _put_back(self, parts: list[_Part]) -> None:
        """Lets parts wait again, before all others; called under the lock."""

    @abstractmethod
    def _send(self, parts: list[_Part]) -> None:
        """Sends one request of these parts."""

    @abstractmethod
    def _list_unfinished(self) -> list[Future[Any]]:
        """Lists the futures of the parts that wait and of the requests that are under way; called under the lock."""

    def submit(self, part: _Part) -> None:
        """Sends a part now, or later together with others, when the requests before it leave room. If it still waits
        when its time is over, its future fails, and it is not sent."""
        self._submit(part)
        if not part.future.done():  # it may wait behind writes that have no limit
            watch = self._client.deadline_watch
            watched = watch.add(compute_answer_timeout_s(part.deadline), self._expire)
            part.future.add_done_callback(lambda _: watch.remove(watched))

    def submit_and_wait(self, part: _Part) -> Any:
        """Submits a part, and returns its result. Errors as from the future of ``submit``.

        Raises:
            TransferAbortedError: The call was cancelled while the part still waited, and it is not sent.
        """
        self._submit(part)
        if (cancellation := get_cancellation()) is not None:
            # Instead of the request that this thread may have sent for all: it is not given up for one of them.
            cancellation.follow(lambda: self._withdraw(part))
        try:
            return part.future.result(compute_answer_timeout_s(part.deadline))
        except FutureTimeoutError:
            self._expire()
        return part.future.result()

    def _submit(self, part: _Part) -> None:
        with self._lock:
            self._append(part)
        self._advance()

    def _expire(self) -> None:
        """Ends the futures of the parts that have waited until their time was over."""
        with self._lock:
            late = self._take_out(is_expired)
        for part in late:
            part.future.set_exception(DeadlineExceededError(what=part.what, timeout_s=part.deadline.timeout_s))

    def _withdraw(self, cancelled: _Part) -> None:
        """Ends the future of a part, unless it was sent or is done."""
        with self._lock:
            parts = self._take_out(lambda part: part.future is cancelled.future)
        fail_parts(parts, TransferAbortedError(transfer=0, reason="it was cancelled before it was sent"))

    def finish(self, end_s: float) -> None:
        """Waits until nothing is under way, at most until this monotonic time. What was under way until the time was
        over, perhaps since a table has no room, is not waited for again."""
        if os.getpid() != self._pid:
            return
        while True:
            with self._lock:
                unfinished = {*self._list_unfinished()} - self._given_up
                if not unfinished and not self._is_sending:
                    return
            if time.monotonic() >= end_s:
                self._given_up |= unfinished
                return
            if unfinished:
                wait(unfinished, min(end_s - time.monotonic(), MAX_POLL_S))
            time.sleep(0 if unfinished else SENDING_POLL_S)  # 0: the thread that has ended one of them continues first

    def _advance(self) -> None:
        """Sends the parts that may be sent. One thread at a time does so, which keeps the order, for the others too."""
        while True:
            with self._lock:
                parts = [] if self._is_sending or self._is_in_line else self._take_next()
                if not parts:
                    return
                self._is_sending = True
            try:
                self._send(parts)
            finally:
                with self._lock:
                    self._is_sending = False

    def _begin(self, parts: list[_Part]) -> int | None:
        """Returns a number for a request of these parts.

        Returns None if the client has too many writes under way; then the parts wait again, before all others.
        """
        with self._lock:
            self._is_in_line = True
        request = self._client.requests.try_begin_write(self._on_room)
        if request is not None:
            self._is_in_line = False
        else:
            with self._lock:
                self._put_back(parts)
        return request

    def _on_room(self) -> None:
        with self._lock:
            self._is_in_line = False
        self._go_on()

    def _fail_unsent(self, parts: list[_Part], request: int | None, fault: BaseException) -> None:
        """Ends parts whose request could not be sent: others may wait for them, even if the fault is Ctrl-C."""
        if request is not None:
            self._client.requests.end(request)
        is_own = isinstance(fault, TDServeError)
        fail_parts(parts, fault if is_own else TransferAbortedError(transfer=0, reason=f"interrupted by {fault!r}"))

    def _go_on(self) -> None:
        """Sends what waits, in the thread that receives answers; in another if sending would wait for an answer."""
        if self._client.has_channel:
            self._advance()
        elif self.is_waiting:
            try:
                self._client.run_later(self._advance)
            except ClosedError:
                self._advance()  # each part fails by itself


_EXIT_FLUSH: ExitFlush[Coalescer[Any]] = ExitFlush(Coalescer.finish, is_early=True)
"""Stores what no caller has waited for, as an executor finishes its futures at exit."""


def fail_parts(parts: Iterable[Part], error: BaseException) -> None:
    """Ends the futures of parts with an error."""
    for part in parts:
        part.future.set_exception(error)


def is_expired(part: Part) -> bool:
    """Returns whether the time of a part is over."""
    return part.deadline.expired


def find_first_deadline(parts: Iterable[Part]) -> Deadline:
    """Returns the deadline that comes first."""
    return min((part.deadline for part in parts), key=_get_remaining_s)


def _get_remaining_s(deadline: Deadline) -> float:
    remaining_s = deadline.remaining_s
    return float("inf") if remaining_s is None else remaining_s
