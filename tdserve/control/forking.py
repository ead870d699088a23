"""Lets no thread of ours be inside of gRPC while this process forks.

Before a fork gRPC has its threads stand still, and waits five seconds for that. A thread that waits for a message to
leave stands still with a lock in its hands that the thread needs which brings word of it (measured, 1.85): then the
wait is in vain, and in the child every stream stands still for ever. A thread of ours that waits in gRPC for the answer
to a unary call is not even asked: gRPC prepares nothing then, and the child aborts, or stands still at once in gRPC's
own handler (half of the forks while a server does not answer, measured). A thread of ours that asks a stream for its
next message holds the channel's lock for some microseconds, and gRPC's handler in the child wants it.

So answers are waited for outside of gRPC, a fork waits for what is being sent or asked for, and what is to be sent or
asked for waits for the fork. All of that before gRPC begins: the last handler that is registered comes first, and gRPC
registers its own with the first channel of the process.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from queue import Empty, SimpleQueue
from threading import Condition, get_ident
from typing import Any, TypeVar

import grpc

from tdserve.base.errors import DeadlineExceededError

SENT_TIMEOUT_S = 1.0
"""For messages to leave; they take microseconds, but where the other end stands still."""

LATE_S = 5.0
"""After its time gRPC ends a call, but in a child that was forked while it could not stop: there it stands still."""

_Message = TypeVar("_Message")


class _Traffic:
    """How many messages are being sent, which streams are read, and whether more may be sent and asked for."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._num_sending = 0
        self._read: set[grpc.Call] = set()
        self._held_by: int | None = None  # the thread that forks

    def begin(self) -> None:
        """Before a message is handed over. The thread that forks may do so: what the garbage collector has it end."""
        with self._changed:
            self._wait()
            self._num_sending += 1

    def ask(self, call: grpc.Call) -> None:
        """Before a stream is asked for its next message."""
        with self._changed:
            self._wait()
            self._read.add(call)

    def forget(self, call: grpc.Call) -> None:
        """The stream is over."""
        with self._changed:
            self._read.discard(call)

    def _wait(self) -> None:
        while self._held_by not in (None, get_ident()):
            self._changed.wait()

    def end(self) -> None:
        """It has left, or its stream is over."""
        with self._changed:
            self._num_sending -= 1
            self._changed.notify_all()

    def hold(self) -> None:
        """Waits for what is being sent and asked for, and lets nothing follow."""
        with self._changed:
            self._held_by = get_ident()
            self._changed.wait_for(lambda: self._num_sending == 0, SENT_TIMEOUT_S)
            read = list(self._read)
        for call in read:
            call.is_active()  # takes the lock under which a message is asked for

    def go_on(self) -> None:
        """Lets messages follow."""
        with self._changed:
            self._held_by = None
            self._changed.notify_all()


_current = [_Traffic()]
"""One: that of this process."""


def sent_beside_forks(outgoing: SimpleQueue[_Message | None]) -> Iterator[_Message]:
    """The messages of a queue up to a None, for gRPC to send: it asks for the next one when the last has left."""
    while True:
        message = outgoing.get()
        if message is None:
            return
        traffic = _current[-1]
        traffic.begin()
        try:
            yield message
        finally:
            traffic.end()


def received_beside_forks(call: Any) -> Generator[Any, None, None]:
    """The messages of a stream.

    Raises:
        grpc.RpcError: As of the stream.
    """
    traffic = _current[-1]
    try:
        while True:
            traffic.ask(call)
            try:
                message = next(call)
            except StopIteration:
                return
            yield message
    finally:
        traffic.forget(call)


@contextmanager
def beside_forks() -> Iterator[None]:
    """A block that calls into gRPC and waits for nothing there: a fork waits for its end, and it for a fork."""
    traffic = _current[-1]
    traffic.begin()
    try:
        yield
    finally:
        traffic.end()


def answer_of(method: Any, request: Any, *, timeout: float, **options: Any) -> Any:
    """The answer to a unary call, waited for outside of gRPC.

    Args:
        method: Of a stub.
        timeout: In seconds.
        options: As of the method.

    Raises:
        grpc.RpcError, ValueError: As of the method.
        DeadlineExceededError: gRPC has not even said that time is over.
    """
    # Not an Event: gRPC ends the call in a forked child too, where nobody gives back the lock that the waiter held.
    answered: SimpleQueue[Any] = SimpleQueue()
    with beside_forks():
        call = method.future(request, timeout=timeout, **options)
        call.add_done_callback(answered.put)
    try:
        answered.get(timeout=timeout + LATE_S)
    except Empty as error:
        raise DeadlineExceededError(what="an answer of gRPC, which stands still here,", timeout_s=timeout) from error
    except BaseException:
        with beside_forks():  # after Ctrl-C it is still under way
            call.cancel()
        raise
    with beside_forks():
        return call.result()


@lru_cache(maxsize=1)
def watch_forks() -> None:
    """To be called when there has been a channel: then gRPC has registered its handlers, and ours come before them."""
    os.register_at_fork(before=_hold, after_in_parent=_go_on, after_in_child=_begin_anew)


def _hold() -> None:
    _current[-1].hold()


def _go_on() -> None:
    _current[-1].go_on()


def _begin_anew() -> None:
    _current.append(_Traffic())  # what ends in the threads that are not here counts in the old one
    del _current[:-1]
