"""A channel over a byte stream: tagged messages whose receives the other end has announced.

Each end announces every receive that it posts, and sends a message longer than ``EAGER_BYTES`` only when its receive is
announced. So neither end holds content for which there is no place: shorter messages may come before their receives, up
to ``MAX_EAGER_BYTES`` in all, which an announcement gives back. Whatever carries the stream holds a bounded number of
bytes, and an end that receives nothing stops its sender.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from struct import Struct
from threading import Condition, Lock, Thread, current_thread
from typing import Any, cast

import torch

from tdserve.base.errors import (
    ConnectError,
    DeadlineExceededError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
    TDServeError,
)
from tdserve.transport.byte_streams import ByteStream
from tdserve.transport.channel import PerMessage, Work
from tdserve.transport.tag_queues import TagQueues

EAGER_BYTES = 256 * 1024
"""Longest message that is sent before its receive is announced: an announcement takes as long as that many bytes."""

MAX_EAGER_BYTES = 1024 * 1024
"""Most bytes of such messages in one direction; an end that gets more closes the channel."""

MAX_AHEAD = 65_536
"""Most announcements without a send, and most messages without a receive; an end that gets more closes the channel."""

BATCH_BYTES = 1024 * 1024
"""Frames that wait to be sent are written together up to this size."""

BATCH_PIECES = 256
"""And up to this number of pieces: the kernel takes at most 1,024 at once."""

JOIN_TIMEOUT_S = 5.0
"""Time for a thread of a closed channel to end; it takes milliseconds."""

_HEADER = Struct("<BIQ")
"""Kind of the frame, tag, length of the message."""

_HELLO, _RECEIVE, _MESSAGE = 0, 1, 2
"""Kinds of frames: the first of each end; a receive that was posted; a message, whose bytes follow."""

_MAGIC = 0x7464_7365
"""Tag of the first frame."""


class _StreamWork:
    """A send or a receive under way.

    Attributes:
        place: Its buffer.
        is_done: Whether the buffer was taken, or is filled.
        is_early: For a send: whether it went ahead of its announcement.
    """

    def __init__(self, channel: StreamChannel, buffer: torch.Tensor) -> None:
        self._channel = channel
        self._buffer = buffer  # keeps the memory alive
        self.place = memoryview(cast(Any, buffer.numpy())) if buffer.numel() else memoryview(b"")
        self.is_done = self.is_early = False

    def wait(self, timeout_s: float) -> None:
        self._channel.wait_all([self], timeout_s)


class StreamChannel:
    """One end of a channel over a byte stream. See ``tdserve.transport.channel.Channel``.

    Args:
        stream: The stream, which the channel closes.
        transport: The name in statistics.
        peer: Name of the other end, for errors.
        timeout_s: Seconds for the other end to open its own.

    Raises:
        ConnectError: The other end did not open in time, or the stream has ended.
    """

    def __init__(self, stream: ByteStream, *, transport: str, peer: str, timeout_s: float) -> None:
        self.transport = transport
        self.peer = peer
        self._stream = stream
        lock = Lock()
        self._changed = Condition(lock)
        self._has_outgoing = Condition(lock)
        self._lost: str | None = None
        self._is_greeted = False
        self._unsent: TagQueues[_StreamWork] = TagQueues()  # sends without an announcement
        self._announced: TagQueues[int] = TagQueues()  # lengths of receives without a send
        self._unmet: TagQueues[_StreamWork] = TagQueues()  # receives without a message
        self._early: TagQueues[bytearray] = TagQueues()  # messages without a receive
        self._num_announced = self._num_early = self._nbytes_early = self._num_sent_early = self._nbytes_sent_early = 0
        # What is to be written; a send ends with its last piece.
        self._outgoing: deque[tuple[memoryview, _StreamWork | None]] = deque()
        self._outgoing.append((memoryview(_HEADER.pack(_HELLO, _MAGIC, 0)), None))
        self._threads = [
            Thread(target=run, name=f"tdserve-{transport}-{name}", daemon=True)
            for run, name in ((self._read, "reader"), (self._write, "writer"))
        ]
        for thread in self._threads:
            thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_greeted or self._lost is not None, timeout_s)
            reason = self._lost or f"the other end did not open within {timeout_s:g} s"
        if not self._is_greeted:
            self.close()
            raise ConnectError(address=peer, reason=reason)

    def send(self, buffer: torch.Tensor, tag: int) -> _StreamWork:
        work = _StreamWork(self, buffer)
        nbytes = len(work.place)
        with self._changed:
            self._check_open()
            if (announced := self._announced.take(tag)) is not None:
                self._num_announced -= 1
                self._check_length(tag, nbytes, announced)
                self._queue_message(tag, work)
                return work
            before = self._unsent.find_last(tag)
            is_small = nbytes <= EAGER_BYTES and self._nbytes_sent_early + nbytes <= MAX_EAGER_BYTES
            if is_small and self._num_sent_early < MAX_AHEAD and (before is None or before.is_early):
                work.is_early = True
                self._num_sent_early += 1
                self._nbytes_sent_early += nbytes
                self._queue_message(tag, work)
            self._unsent.put(tag, work)
        return work

    def recv(self, buffer: torch.Tensor, tag: int) -> _StreamWork:
        work = _StreamWork(self, buffer)
        with self._changed:
            self._check_open()
            self._outgoing.append((memoryview(_HEADER.pack(_RECEIVE, tag, len(work.place))), None))
            self._has_outgoing.notify()
            content = self._early.take(tag)
            if content is not None:
                self._num_early -= 1
                self._nbytes_early -= len(content)
                self._check_length(tag, len(content), len(work.place))
                work.place[:] = content
                work.is_done = True
            else:
                self._unmet.put(tag, work)
        return work

    def wait_all(self, works: Sequence[Work], timeout_s: float) -> None:
        """Waits for one after the other."""
        end_s = time.monotonic() + timeout_s
        for work in cast(Sequence[_StreamWork], works):
            if isinstance(timeout_s, PerMessage):
                end_s = time.monotonic() + timeout_s
            with self._changed:
                while not work.is_done and self._lost is None:
                    remaining_s = end_s - time.monotonic()
                    if remaining_s <= 0 or not self._changed.wait(remaining_s):
                        break
                is_done, lost = work.is_done, self._lost
            if is_done:
                continue
            if lost is not None:
                self.close()  # when this returns no buffer is written any more
                raise PeerLostError(peer=self.peer, reason=lost)
            error = DeadlineExceededError(what=f"a {self.transport} transfer", timeout_s=timeout_s)
            self._lose(str(error))
            self.close()
            raise error

    def close(self) -> None:
        """Ends everything under way at once; afterwards no buffer is read or written."""
        self._lose("the channel was closed")
        for thread in self._threads:
            if thread is not current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def _check_open(self) -> None:
        if self._lost is not None:
            raise PeerLostError(peer=self.peer, reason=self._lost)

    def _check_length(self, tag: int, sent: int, received: int) -> None:
        """Raises LocalProtocolError if the two ends disagree on a length; then the channel is closed. Called with the
        lock held."""
        if sent != received:
            reason = f"tag {tag}: {sent} bytes are sent, {received} are to be received"
            self._end(reason)
            raise LocalProtocolError(reason=reason)

    def _queue_message(self, tag: int, work: _StreamWork) -> None:
        """Queues a message for the writer. Called with the lock held."""
        header = memoryview(_HEADER.pack(_MESSAGE, tag, len(work.place)))
        if len(work.place):
            self._outgoing.append((header, None))
            self._outgoing.append((work.place, work))
        else:
            self._outgoing.append((header, work))
        self._has_outgoing.notify()

    def _lose(self, reason: str) -> None:
        """Closes the stream; the first reason counts."""
        with self._changed:
            self._end(reason)

    def _end(self, reason: str) -> None:
        """Like ``_lose``, with the lock held."""
        if self._lost is None:
            self._lost = reason
            for queues in (self._unsent, self._announced, self._unmet, self._early):
                queues.clear()
            self._outgoing.clear()
            self._changed.notify_all()
            self._has_outgoing.notify_all()
            self._stream.close()

    def _write(self) -> None:
        """Writes what is queued, in a thread of its own."""
        try:
            while (batch := self._take_batch()) is not None:
                pieces, works = batch
                self._stream.write(pieces)
                self._finish(works)
        except TDServeError as error:
            self._lose(str(error))

    def _take_batch(self) -> tuple[list[memoryview], list[_StreamWork]] | None:
        """Returns the next pieces to write, and the sends that end with them; None when the channel is closed."""
        pieces: list[memoryview] = []
        works: list[_StreamWork] = []
        room = BATCH_BYTES
        with self._has_outgoing:
            while not self._outgoing and self._lost is None:
                self._has_outgoing.wait()
            while self._outgoing and room and len(pieces) < BATCH_PIECES:
                piece, work = self._outgoing.popleft()
                if len(piece) > room:
                    self._outgoing.appendleft((piece[room:], work))
                    piece, work = piece[:room], None
                pieces.append(piece)
                room -= len(piece)
                if work is not None:
                    works.append(work)
            return None if self._lost is not None else (pieces, works)

    def _finish(self, works: Sequence[_StreamWork]) -> None:
        if works:
            with self._changed:
                for work in works:
                    work.is_done = True
                self._changed.notify_all()

    def _read(self) -> None:
        """Reads what the other end sends, in a thread of its own."""
        header = bytearray(_HEADER.size)
        try:
            while True:
                self._stream.read_into(memoryview(header))
                kind, tag, nbytes = _HEADER.unpack(header)
                if kind == _MESSAGE and self._is_greeted:
                    self._read_message(tag, nbytes)
                elif kind == _RECEIVE and self._is_greeted:
                    self._on_announced(tag, nbytes)
                elif kind == _HELLO and tag == _MAGIC:
                    with self._changed:
                        self._is_greeted = True
                        self._changed.notify_all()
                else:
                    raise RemoteProtocolError(expected="a frame of a channel", received=f"kind {kind}, tag {tag}")
        except TDServeError as error:
            self._lose(str(error))

    def _on_announced(self, tag: int, nbytes: int) -> None:
        """Sends what the other end is ready to receive now, or notes that it is."""
        with self._changed:
            work = self._unsent.take(tag)
            if work is None:
                if self._num_announced >= MAX_AHEAD:
                    raise RemoteProtocolError(expected=f"{MAX_AHEAD} announcements at most", received="more")
                self._num_announced += 1
                self._announced.put(tag, nbytes)
                return
            self._check_length(tag, len(work.place), nbytes)
            if work.is_early:
                self._num_sent_early -= 1
                self._nbytes_sent_early -= nbytes
            else:
                self._queue_message(tag, work)

    def _read_message(self, tag: int, nbytes: int) -> None:
        """Reads a message into the buffer of its receive, or, if it is short, ahead of that."""
        with self._changed:
            work = self._unmet.take(tag)
            if work is not None:
                self._check_length(tag, nbytes, len(work.place))
            elif nbytes > EAGER_BYTES or self._nbytes_early + nbytes > MAX_EAGER_BYTES or self._num_early >= MAX_AHEAD:
                raise RemoteProtocolError(
                    expected=f"{MAX_EAGER_BYTES} bytes at most without a receive", received=f"{nbytes} more bytes"
                )
        if work is not None:
            self._stream.read_into(work.place)
            self._finish([work])
            return
        content = bytearray(nbytes)
        self._stream.read_into(memoryview(content))
        with self._changed:
            work = self._unmet.take(tag)  # posted meanwhile
            if work is None:
                self._early.put(tag, content)
                self._num_early += 1
                self._nbytes_early += nbytes
                return
            self._check_length(tag, nbytes, len(work.place))
            work.place[:] = content
        self._finish([work])
