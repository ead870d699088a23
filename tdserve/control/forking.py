"""Keeps our threads out of gRPC while this process forks.

Before a fork gRPC stops its threads, and waits five seconds for that. Three situations defeat it (measured with 1.85).
A thread blocked in send holds a lock that gRPC's completion thread needs, so the wait never ends, and in the child
every stream hangs for ever. A thread of ours that waits in gRPC for the answer to a unary call is not stopped at
all: gRPC prepares nothing then, and the child aborts, or hangs at once in gRPC's own handler (half of the forks while a
server does not answer). A thread of ours that requests the next message of a stream holds the channel's lock for some
microseconds, and gRPC's handler in the child needs that lock.

So we wait for answers outside gRPC, a fork waits until started sends and requests are done, and new ones wait for the
fork. All of this has to happen before gRPC's own handler: the handler that is registered last runs first, and gRPC
registers its own with the first channel of the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from queue import SimpleQueue
from threading import Condition, get_ident
from typing import Any, TypeVar

import grpc

from tdserve.base.errors import DeadlineExceededError
from tdserve.base.timed_queue import TimedQueue

SENT_TIMEOUT_S = 1.0
"""Time for messages to leave; they take microseconds unless the other end stalls."""

LATE_S = 5.0
"""Extra time after which a call counts as stuck: gRPC ends calls by itself, except in a child that was forked while
gRPC could not stop its threads."""

_Message = TypeVar("_Message")


class ForkGate:
    """Counts the messages being sent and the streams being read, and returns whether more may follow."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._num_sending = 0
        self._num_waiting = 0
        self._read: set[grpc.Call] = set()
        self._held_by: int | None = None  # the thread that forks

    def __repr__(self) -> str:
        state = "held" if self.is_held else "open"
        return f"<ForkGate {state}: {self._num_sending} under way, {self._num_waiting} waits>"

    @property
    def is_held(self) -> bool:
        """Whether a fork is under way or waits for what is."""
        return self._held_by is not None

    def begin(self) -> None:
        """Counts a message that is about to be handed over; waits while a fork is under way. The forking thread does
        not wait, since the garbage collector may make it end a call."""
        with self._changed:
            self._wait()
            self._num_sending += 1

    def ask(self, call: grpc.Call) -> None:
        """Counts a stream that is about to be asked for its next message, and waits while a fork is under way."""
        with self._changed:
            self._wait()
            self._read.add(call)

    def forget(self, call: grpc.Call) -> None:
        """Called when a stream is over."""
        with self._changed:
            self._read.discard(call)

    def _wait(self) -> None:
        while self.is_held and self._held_by != get_ident():
            self._num_waiting += 1
            self._changed.wait()
            self._num_waiting -= 1

    def end(self) -> None:
        """Ends the count of a message that has left, or whose stream is over."""
        with self._changed:
            self._num_sending -= 1
            self._changed.notify_all()

    def hold(self) -> None:
        """Waits for started sends and requests, and blocks new ones."""
        with self._changed:
            self._held_by = get_ident()
            self._changed.wait_for(lambda: self._num_sending == 0, SENT_TIMEOUT_S)
            read = list(self._read)
        for call in read:
            call.is_active()  # takes the lock that is held while a message is requested

    def go_on(self) -> None:
        """Lets sends and requests continue."""
        with self._changed:
            self._held_by = None
            self._changed.notify_all()


_current = [ForkGate()]
"""The one of this process, in a list so that a child can replace it."""


def get_fork_gate() -> ForkGate:
    """Returns the gate of this process."""
    return _current[-1]


def send_beside_forks(
    outgoing: SimpleQueue[_Message | None], on_left: Callable[[], object] = lambda: None
) -> Iterator[_Message]:
    """Yields the messages of a queue up to a None, for gRPC to send: it takes the next one when the last has left.

    Args:
        on_left: Called when a message has left.
    """
    while True:
        message = outgoing.get()
        if message is None:
            return
        gate = get_fork_gate()
        gate.begin()
        try:
            yield message
        finally:
            gate.end()
            on_left()


def receive_beside_forks(call: Any) -> Generator[Any, None, None]:
    """Yields the messages of a stream.

    Raises:
        grpc.RpcError: As from the stream.
    """
    gate = get_fork_gate()
    try:
        while True:
            gate.ask(call)
            try:
                message = next(call)
            except StopIteration:
                return
            yield message
    finally:
        gate.forget(call)


@contextmanager
def exclude_forks() -> Iterator[None]:
    """A block that calls into gRPC without waiting there: a fork waits for its end, and it waits for a fork."""
    gate = get_fork_gate()
    gate.begin()
    try:
        yield
    finally:
        gate.end()


def wait_for_answer(method: Any, request: Any, *, timeout: float, **options: Any) -> Any:
    """Returns the answer to a unary call, and waits for it outside gRPC.

    Args:
        method: A method of a stub.
        timeout: In seconds.
        options: Options of the method.

    Raises:
        grpc.RpcError, ValueError: As in the method.
        DeadlineExceededError: gRPC did not report the end of the time either.
    """
    # Not an Event: gRPC ends the call in a forked child too, where no thread releases the lock that the waiter held.
    answered: TimedQueue[Any] = TimedQueue()
    with exclude_forks():
        call = method.future(request, timeout=timeout, **options)
        call.add_done_callback(answered.put)
    try:
        has_ended = answered.get(timeout + LATE_S) is not None
    except BaseException:
        with exclude_forks():  # after Ctrl-C it is still under way
            call.cancel()
        raise
    if not has_ended:
        raise DeadlineExceededError(what="an answer from gRPC, which hangs in this process,", timeout_s=timeout)
    with exclude_forks():
        return call.result()


@lru_cache(maxsize=1)
def watch_forks() -> None:
    """Registers our handlers; called after the first channel was made, so that ours run before gRPC's."""
    os.register_at_fork(before=_hold, after_in_parent=_go_on, after_in_child=_begin_anew)


def _hold() -> None:
    get_fork_gate().hold()


def _go_on() -> None:
    get_fork_gate().go_on()


def _begin_anew() -> None:
    _current.append(ForkGate())  # threads that do not exist here count in the old one
    del _current[:-1]
