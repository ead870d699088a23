"""Fills messages in a separate thread while earlier ones are sent.

Sending a long message occupies the sending thread, since gloo writes it at once if the peer waits for it. If the same
thread also filled the next message, nothing would be written meanwhile (a third of the time of 64 MiB in 2,000 leaves,
measured).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from queue import SimpleQueue
from threading import Semaphore, Thread

import torch

from tdserve.messages.layout import Message
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import Source

MESSAGES_AHEAD = 2
"""Messages that are filled ahead: one would suffice if a core were always free at the right moment."""

MIN_APART_BYTES = 16 * 1024 * 1024
"""Smallest content that is filled in a separate thread: starting one takes a tenth of a millisecond, little beside this
copy."""

_Filled = tuple[torch.Tensor, bool]


def fill(source: Source, message: Message, pool: BufferPool) -> _Filled:
    """Returns a message's bytes, and whether they were copied for it; otherwise they lie in their place."""
    buffer = source.find_memory(message)
    if buffer is not None:
        return buffer, False
    buffer = pool.take(message.nbytes)
    source.fill(message, buffer)
    return buffer, True


def fill_each(messages: Sequence[Message], source: Source, pool: BufferPool) -> Generator[_Filled, None, None]:
    """Yields every message as ``fill`` returns it, when the caller asks for it."""
    return (fill(source, message, pool) for message in messages)


def fill_ahead(messages: Sequence[Message], source: Source, pool: BufferPool) -> Generator[_Filled, None, None]:
    """Like ``fill_each``, but fills the others in a separate thread if the first of many has to be copied. The caller
    closes the generator, which then no longer uses the source."""
    rest = iter(messages)
    for message in rest:
        buffer, is_copied = fill(source, message, pool)
        yield buffer, is_copied
        if is_copied and sum(each.nbytes for each in messages) >= MIN_APART_BYTES:
            break
    behind = list(rest)
    if behind:
        yield from _Filler(behind, source, pool).iter_results()


class _Filler(Thread):
    def __init__(self, messages: Sequence[Message], source: Source, pool: BufferPool) -> None:
        super().__init__(name="tdserve-filler", daemon=True)
        self._messages = messages
        self._source = source
        self._pool = pool
        self._room = Semaphore(MESSAGES_AHEAD)
        self._results: SimpleQueue[_Filled | BaseException] = SimpleQueue()
        self._is_over = False

    def run(self) -> None:
        try:
            for message in self._messages:
                self._room.acquire()
                if self._is_over:
                    return
                self._results.put(fill(self._source, message, self._pool))
        except BaseException as error:  # noqa: BLE001 (outermost frame of the thread: the next caller gets it)
            self._results.put(error)

    def iter_results(self) -> Generator[_Filled, None, None]:
        """Yields one result per message, and raises the error of a message that failed. Closing the generator ends the
        thread."""
        self.start()
        try:
            for _ in self._messages:
                found = self._results.get()
                if isinstance(found, BaseException):
                    raise found
                yield found
                self._room.release()
        finally:
            self._is_over = True
            self._room.release()
            self.join()
