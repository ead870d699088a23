"""Messages that a thread apart copies together while those before them are on their way.

To send a long message keeps the thread that sends it busy: gloo writes it at once where the peer waits for it. If the
same thread had copied the next one together first, nobody would have written meanwhile (a third of the time of 64 MiB
in 2,000 leaves, measured).
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
"""That are filled and not yet asked for: one would do, if a core were always free just when one is."""

MIN_APART_BYTES = 16 * 1024 * 1024
"""A thread takes a tenth of a millisecond to start, which is little beside the copying of so much."""

_Filled = tuple[torch.Tensor, bool]


def fill(source: Source, message: Message, pool: BufferPool) -> _Filled:
    """A message's bytes, and whether they were copied for it; else they lie in their place."""
    buffer = source.direct(message)
    if buffer is not None:
        return buffer, False
    buffer = pool.take(message.nbytes)
    source.fill(message, buffer)
    return buffer, True


def filled(messages: Sequence[Message], source: Source, pool: BufferPool) -> Generator[_Filled, None, None]:
    """Every message as ``fill`` gives it, when it is asked for."""
    return (fill(source, message, pool) for message in messages)


def filled_ahead(messages: Sequence[Message], source: Source, pool: BufferPool) -> Generator[_Filled, None, None]:
    """As ``filled``; where the first of many must be copied, the others are in a thread apart. To be closed: the source
    is left alone from then on."""
    rest = iter(messages)
    for message in rest:
        buffer, is_copied = fill(source, message, pool)
        yield buffer, is_copied
        if is_copied and sum(each.nbytes for each in messages) >= MIN_APART_BYTES:
            break
    behind = list(rest)
    if behind:
        yield from _Filler(behind, source, pool).results()


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
        except BaseException as error:  # noqa: BLE001 (outermost frame of the thread: whoever asks next gets it)
            self._results.put(error)

    def results(self) -> Generator[_Filled, None, None]:
        """One for each message; raises what went wrong with it. Ends the thread when it is closed."""
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
