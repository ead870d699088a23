"""Numbers of a client's requests: which of them may still be sent again, and how many writes are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition, Lock

from tdserve.base.deadline import Deadline, compute_grace_s
from tdserve.base.errors import DeadlineExceededError
from tdserve.v1 import control_pb2

MAX_WRITES_UNDER_WAY = 64
"""Most writes of one client, over all handles and threads: the server keeps each answer until the client has got it."""

REPORT_EVERY = 64
"""Requests between two messages that tell the server which answers have arrived."""

SIGNAL_POLL_S = 0.5
"""Python handles a signal that arrives just before a wait only after the wait (seen once in sixty times)."""

OnRoom = Callable[[], None]


class RequestNumbers:
    """Source of numbers, which keeps those of requests that change something until they will not be sent again.

    Writes share a window, since the server or the channel must hold their content. Other changes do not wait for it: a
    call that takes rows out of a full queue must get through while all writes wait for that. Threads: safe.

    Args:
        window: Writes under way at most.
    """

    def __init__(self, window: int = MAX_WRITES_UNDER_WAY) -> None:
        self._window = window
        self._lock = Lock()
        self._room = Condition(self._lock)
        self._next = 1
        self._reported = 0  # all below were reported to the server
        self._changes: set[int] = set()
        self._writes: set[int] = set()
        self._sent: set[int] = set()
        self._num_waiting = 0
        self._line: deque[OnRoom] = deque()

    @property
    def num_writes(self) -> int:
        """Writes under way."""
        return len(self._writes)

    @property
    def newest(self) -> int:
        """The number that was given last."""
        return self._next - 1

    def is_write(self, request: int | None) -> bool:
        """Returns whether a number is that of a write under way."""
        return request in self._writes

    def is_under_way(self, request: int) -> bool:
        """Returns whether a number is that of a request that changes something and has not ended."""
        return request in self._changes or request in self._writes

    def note_sent(self, request: int) -> None:
        """Notes that a server may carry out a request that changes something, from now on and whether or not it
        answers."""
        if request in self._changes:
            self._sent.add(request)

    def note_unsent(self, request: int) -> None:
        """Notes that no server can carry out a request, although it was sent: what belongs to it was not."""
        self._sent.discard(request)

    def may_be_carried_out(self, request: int | None) -> bool:
        """Returns whether an attempt of a request was sent that changes something and has not ended."""
        return request in self._sent

    def take_number(self) -> int:
        """Returns a number for a request that changes nothing."""
        with self._lock:
            return self._take()

    def begin_change(self) -> int:
        """Returns a number for a request that changes something; ``end`` must follow."""
        with self._lock:
            request = self._take()
            self._changes.add(request)
            return request

    def begin(self, deadline: Deadline, *, is_write: bool) -> int:
        """Returns a number as ``begin_write`` does, or ``begin_change``."""
        return self.begin_write(deadline) if is_write else self.begin_change()

    def begin_write(self, deadline: Deadline) -> int:
        """Returns a number for a write; ``end`` must follow. Waits while too many writes are under way.

        Raises:
            DeadlineExceededError: Too many were under way all the time. No number was taken.
        """
        with self._lock:
            while len(self._writes) >= self._window:
                remaining_s = deadline.remaining_s
                wait_s = SIGNAL_POLL_S if remaining_s is None else remaining_s + compute_grace_s(deadline.timeout_s)
                self._num_waiting += 1
                try:
                    has_ended = self._room.wait(min(wait_s, SIGNAL_POLL_S))
                finally:
                    self._num_waiting -= 1
                if not has_ended and remaining_s == 0.0:
                    what = f"the end of one of the {self._window} writes that this client has under way"
                    raise DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)
            return self._begin_write()

    def try_begin_write(self, on_room: OnRoom) -> int | None:
        """Begins a write as ``begin_write`` does, without waiting.

        Args:
            on_room: Called once when there is room, if None is returned; in the thread that ends another write.
        """
        with self._lock:
            if len(self._writes) < self._window:
                return self._begin_write()
            self._line.append(on_room)
            return None

    def end(self, request: int) -> None:
        """Notes that a request will not be sent again."""
        with self._lock:
            self._changes.discard(request)
            self._sent.discard(request)
            if request not in self._writes:
                return
            self._writes.discard(request)
            if self._num_waiting:
                self._room.notify()
            if not self._line:
                return
        while True:  # the one that is called may have nothing left to send
            with self._lock:
                if not self._line or len(self._writes) >= self._window:
                    return
                on_room = self._line.popleft()
            on_room()

    def report_with(self, request: int) -> control_pb2.Answered | None:
        """Returns the report on answers that a changing request carries; mostly None."""
        if self._next - self._reported < REPORT_EVERY or request not in self._changes:
            return None
        return self.report_answered()

    def report_answered(self) -> control_pb2.Answered:
        """Returns which requests will not be sent again. Each report is complete, so that one may get lost."""
        with self._lock:
            self._reported = self._next
            return control_pb2.Answered(below=self._next, but_for=sorted(self._changes))

    def report_again(self) -> None:
        """Repeats the report with the next request, since the server did not receive the last one."""
        self._reported = 0

    def _take(self) -> int:
        request = self._next
        self._next = request + 1
        return request

    def _begin_write(self) -> int:
        request = self._take()
        self._changes.add(request)
        self._writes.add(request)
        return request
