"""A channel whose large messages use a backend without message tags, which needs the same order at both ends.

NCCL is such a backend: if one end starts a transfer, the other must start the same one next. So one end, the leader,
decides the order, for both directions, and announces it over its own control channel; the other end announces what it
has posted. A message moves only when both ends have posted it, so none ever blocks the backend for a call that never
comes. Small messages use a channel with tags. Both ends agree on every length, and so on the way that a message takes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from struct import Struct
from threading import Condition, Thread, current_thread
from typing import Protocol

import torch

from tdserve.base.errors import DeadlineExceededError, LocalProtocolError, PeerLostError, TDServeError
from tdserve.transport.channel import Channel, PerMessage, Work
from tdserve.transport.message_channel import REAP_TIMEOUT_S, MessageChannel
from tdserve.transport.tag_queues import TagQueues

LARGE_BYTES = 256 * 1024
"""Smallest message for the wire: from here on it gains more than the leader's note costs, some 50 microseconds."""

PIECE_BYTES = 4 * 1024 * 1024
"""Longest piece on the wire: staging memory has this size."""

PIECES_UNDER_WAY = 3
"""Pieces under way: while one is on the wire, the next is copied to staging memory, and the previous one from it."""

JOIN_TIMEOUT_S = 2.0
"""Time for the mover, which sees a closed wire at once unless it hangs in the driver."""

_NOTE = Struct("<BIQ")
"""Direction (0: from the leader), tag, length in bytes."""

_Key = tuple[int, int]


class Moving(Protocol):
    """A piece on the wire."""

    def finish(self) -> None:
        """Waits until it is over: a sent piece may be changed, a received one has arrived.

        Raises:
            PeerLostError: The wire is closed, or has failed.
        """


class Wire(Protocol):
    """Moves pieces in order. Threads: one at a time; ``close`` in any."""

    def send(self, piece: torch.Tensor) -> Moving:
        """Starts to send a uint8 tensor. Raises PeerLostError."""

    def recv(self, piece: torch.Tensor, after: object) -> Moving:
        """Starts to receive into a uint8 tensor; ``after`` is the mark that ``mark_post`` returned for it."""

    def mark_post(self, buffer: torch.Tensor) -> object:
        """Returns a mark in the order of the calling thread's work; called in the thread that posts a receive."""

    def close(self) -> None:
        """Ends what is under way. Idempotent."""


class _Large:
    """A large message that was posted."""

    def __init__(
        self, channel: OrderedChannel, key: _Key, buffer: torch.Tensor, *, is_send: bool, after: object
    ) -> None:
        self.key = key
        self.buffer = buffer
        self.is_send = is_send
        self.after = after
        self.is_done = False
        self._channel = channel

    def wait(self, timeout_s: float) -> None:
        self._channel.wait_all([self], timeout_s)


class _Small:
    """A small message into memory that the channel for small ones cannot write to."""

    def __init__(self, channel: OrderedChannel, work: Work, staging: torch.Tensor, target: torch.Tensor) -> None:
        self._channel = channel
        self.work = work
        self._staging = staging
        self._target = target

    def wait(self, timeout_s: float) -> None:
        self._channel.wait_all([self], timeout_s)

    def drain(self) -> None:
        self._target.copy_(self._staging)


class OrderedChannel:
    """One end; see ``tdserve.transport.channel.Channel``. Closing it closes everything that it consists of.

    Args:
        small: Carries messages below ``LARGE_BYTES``.
        mail: A channel for the leader's notes alone.
        wire: Carries the others.
        is_leader: True at exactly one end.
        transport: Name for statistics.
        peer: Name of the other end, for errors.
    """

    def __init__(
        self, small: Channel, mail: Channel, wire: Wire, *, is_leader: bool, transport: str, peer: str
    ) -> None:
        self.transport = transport
        self.peer = peer
        self._small = small
        self._mail_channel = mail
        self._wire = wire
        self._is_leader = is_leader
        self._changed = Condition()
        self._lost: PeerLostError | None = None
        self._mine: TagQueues[_Large] = TagQueues()  # posted here, not at the other end; by direction and tag
        self._theirs: TagQueues[int] = TagQueues()  # the reverse, at the leader: lengths
        self._next: SimpleQueue[_Large | None] = SimpleQueue()
        self._mover = Thread(target=self._move_all, name=f"tdserve-{transport}-{peer}", daemon=True)
        self._mail = MessageChannel(
            mail, on_message=self._on_note, on_lost=self._on_mail_lost, name=f"tdserve-{transport}-notes-{peer}"
        )
        self._mail.begin()
        self._mover.start()

    def send(self, buffer: torch.Tensor, tag: int) -> Work:
        """See Channel. Content on a GPU is first copied from it."""
        content = buffer if buffer.device.type == "cpu" else buffer.cpu()
        if len(content) < LARGE_BYTES:
            return self._make_small_work(self._small.send, content, tag)
        return self._post(_Large(self, (self._get_direction(True), tag), content, is_send=True, after=None))

    def recv(self, buffer: torch.Tensor, tag: int) -> Work:
        """See Channel. The buffer may lie on the wire's own GPU."""
        if len(buffer) >= LARGE_BYTES:
            after = self._wire.mark_post(buffer)
            return self._post(_Large(self, (self._get_direction(False), tag), buffer, is_send=False, after=after))
        if buffer.device.type == "cpu":
            return self._make_small_work(self._small.recv, buffer, tag)
        staging = torch.empty(len(buffer), dtype=torch.uint8)
        return _Small(self, self._make_small_work(self._small.recv, staging, tag), staging, buffer)

    def wait_all(self, works: Sequence[Work], timeout_s: float) -> None:
        """See Channel."""
        if isinstance(timeout_s, PerMessage):
            timeout_s = timeout_s * max(len(works), 1)
        end_s = time.monotonic() + timeout_s
        large = [work for work in works if isinstance(work, _Large)]
        try:
            self._small.wait_all(
                [work.work if isinstance(work, _Small) else work for work in works if not isinstance(work, _Large)],
                timeout_s,
            )
        except TDServeError as error:
            self._lose(str(error))
            raise
        for work in works:
            if isinstance(work, _Small):
                work.drain()
        with self._changed:
            self._changed.wait_for(
                lambda: self._lost is not None or all(work.is_done for work in large), max(end_s - time.monotonic(), 0)
            )
            if all(work.is_done for work in large):
                return
            lost = self._lost
        if lost is None:
            self._lose("a transfer took too long")
        self.close()  # no buffer is written any more
        if lost is not None:
            raise lost
        raise DeadlineExceededError(what=f"a transfer by {self.transport}", timeout_s=timeout_s)

    def close(self) -> None:
        """See Channel. Afterwards no thread of this channel touches a buffer."""
        self._lose("the channel was closed")
        if self._mover.is_alive() and self._mover is not current_thread():
            self._mover.join(JOIN_TIMEOUT_S)
        self._mail.join()

    def _get_direction(self, is_send: bool) -> int:
        return 0 if is_send == self._is_leader else 1

    def _make_small_work(self, post: Callable[[torch.Tensor, int], Work], buffer: torch.Tensor, tag: int) -> Work:
        try:
            return post(buffer, tag)
        except TDServeError as error:
            self._lose(str(error))
            raise

    def _post(self, op: _Large) -> Work:
        """Queues a large message once both ends have posted it; announces it if the other end decides."""
        try:
            with self._changed:
                if self._lost is not None:
                    raise self._lost
                nbytes = self._theirs.take(op.key) if self._is_leader else None
                if nbytes is not None:
                    self._meet(op, nbytes)
                else:
                    self._mine.put(op.key, op)
        except LocalProtocolError as error:
            self._lose(str(error.fields["reason"]))
            raise
        if not self._is_leader:
            self._note(op)
        return op

    def _note(self, op: _Large) -> None:
        try:
            self._mail.send(_NOTE.pack(*op.key, len(op.buffer)))
        except TDServeError as error:
            self._lose(str(error))
            raise

    def _on_note(self, note: bytes, _: int) -> None:
        """Handles a note: at the leader, what the other end has posted; at the other end, what moves next."""
        direction, tag, nbytes = _NOTE.unpack(note)
        with self._changed:
            posted = self._mine.take((direction, tag))
            if posted is not None:
                self._meet(posted, nbytes)
            elif self._is_leader:
                self._theirs.put((direction, tag), nbytes)
            else:
                raise LocalProtocolError(reason=f"the other end moves {nbytes} bytes that were not posted")

    def _meet(self, op: _Large, nbytes: int) -> None:
        """Queues a message that both ends have posted. Called with the lock held."""
        if len(op.buffer) != nbytes:
            raise LocalProtocolError(reason=f"tag {op.key[1]}: {len(op.buffer)} bytes here, {nbytes} at the other end")
        self._next.put(op)

    def _on_mail_lost(self, error: TDServeError) -> None:
        self._lose(str(error.fields.get("reason", error)))

    def _move_all(self) -> None:
        """Runs the mover's thread."""
        under_way: deque[tuple[_Large, Moving, bool]] = deque()
        try:
            while True:
                try:
                    op = self._next.get(block=not under_way)
                except Empty:
                    self._finish(under_way)
                    continue
                if op is None:
                    return
                if self._is_leader:
                    self._note(op)
                self._begin(op, under_way)
                self._mail.reap(REAP_TIMEOUT_S)
        except TDServeError as error:
            self._lose(str(error.fields.get("reason", error)))
        except Exception as fault:  # noqa: BLE001 (outermost frame of the thread: nothing moves any more)
            self._lose(f"{type(fault).__name__}: {fault}"[:500])

    def _begin(self, op: _Large, under_way: deque[tuple[_Large, Moving, bool]]) -> None:
        num_bytes = len(op.buffer)
        for start in range(0, num_bytes, PIECE_BYTES):
            if len(under_way) == PIECES_UNDER_WAY:
                self._finish(under_way)
            piece = op.buffer[start : start + PIECE_BYTES]
            moving = self._wire.send(piece) if op.is_send else self._wire.recv(piece, op.after)
            under_way.append((op, moving, start + PIECE_BYTES >= num_bytes))

    def _finish(self, under_way: deque[tuple[_Large, Moving, bool]]) -> None:
        op, moving, is_last = under_way.popleft()
        moving.finish()
        if is_last:
            with self._changed:
                op.is_done = True
                self._changed.notify_all()

    def _lose(self, reason: str) -> None:
        """Closes this end; the first reason counts."""
        with self._changed:
            if self._lost is not None:
                return
            self._lost = PeerLostError(peer=self.peer, reason=reason[:300])
            self._mine.clear()
            self._changed.notify_all()
        self._next.put(None)
        self._wire.close()
        for channel in (self._mail_channel, self._small):
            with suppress(TDServeError):
                channel.close()
