"""Small messages over a channel of their own, in order: messages about content that moves over another channel.

A message on a gRPC stream costs some three thread switches at either end, a message over this channel costs one
(measured: 300 against 120 microseconds for a round trip). Every message fills a whole slot, because the two ends of a
channel must agree on every length, and because slots are posted on the receiving side before a message is sent.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from struct import Struct
from threading import Thread, current_thread

import torch

from tdserve.base.config import MAIL_BYTES
from tdserve.base.errors import LocalProtocolError, TDServeError, TooLargeError
from tdserve.transport.channel import Channel, Work

MAIL_TAG = 1

SLOTS = 8
"""Receives that are posted at once: that many messages can be sent before the receiver has to wake up."""

MAX_SENT = 64
"""Sends that are kept after their end: to learn whether one has ended, a thread has to wait for it."""

REAP_TIMEOUT_S = 30.0
"""Time for the other end to receive messages that were sent long ago; a thread of it does nothing else."""

ENDLESS_S = 30.0 * 24 * 3600
"""Timeout of a wait that only the close of the channel ends. gloo counts in nanoseconds from now, which must not
overflow."""

JOIN_TIMEOUT_S = 5.0
"""Time for the thread of a closed channel to end; it takes milliseconds."""

_HEADER = Struct("<HH")
"""Length and label of a message."""

_SLOT_BYTES = _HEADER.size + MAIL_BYTES


class MessageChannel:
    """One end. Threads: ``send`` is safe in any; after ``begin`` messages arrive in a thread of this object.

    Args:
        channel: Carries the messages; closing it ends the mail.
        on_message: Called with every message of the other end and its label, in order; must not block.
        on_lost: Called once, in that thread, with the reason, when the channel is lost.
        name: Name of the thread.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        on_message: Callable[[bytes, int], None],
        on_lost: Callable[[TDServeError], None],
        name: str,
    ) -> None:
        self._channel = channel
        self._on_message = on_message
        self._on_lost = on_lost
        self._sent: deque[Work] = deque()
        self._numbers = itertools.count(1)
        self._slots: deque[tuple[torch.Tensor, Work]] = deque()
        self._thread = Thread(target=self._read, name=name, daemon=True)

    def begin(self) -> None:
        """Begins to read. This is separate from the constructor, since the first message may be answered through this
        object, which its owner must know by then (otherwise an answer was lost, and its client waited until the
        deadline)."""
        self._thread.start()

    @property
    def num_sent(self) -> int:
        """Number of messages sent whose end ``reap`` has not seen yet."""
        return len(self._sent)

    def send(self, content: bytes, label: int = 0) -> int:
        """Sends a message without waiting for the other end; returns its number, from 1. ``reap`` must follow at times.

        Messages that two threads send at the same time may be numbered in either order.

        Args:
            content: The message.
            label: Tells the receiver what to do with it, before it is parsed.

        Raises:
            TooLargeError: It is longer than ``MAIL_BYTES``. Nothing was sent.
            PeerLostError: The channel is closed.
        """
        if len(content) > MAIL_BYTES:
            raise TooLargeError(what="bytes of one mail", asked=len(content), free=MAIL_BYTES)
        slot = bytearray(_SLOT_BYTES)
        _HEADER.pack_into(slot, 0, len(content), label)
        slot[_HEADER.size : _HEADER.size + len(content)] = content
        self._sent.append(self._channel.send(torch.frombuffer(slot, dtype=torch.uint8), MAIL_TAG))
        return next(self._numbers)

    def reap(self, timeout_s: float, *, keep: int = MAX_SENT) -> None:
        """Waits for the end of all sends but the last ``keep``.

        Raises:
            DeadlineExceededError, PeerLostError: The other end receives nothing. The channel is closed.
        """
        while len(self._sent) > keep:
            try:
                work = self._sent.popleft()
            except IndexError:  # another thread took it
                return
            work.wait(timeout_s)

    def join(self) -> None:
        """Waits for the thread to end, after the channel was closed; does nothing if called from that thread."""
        if self._thread.ident is not None and self._thread is not current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _read(self) -> None:
        try:
            for _ in range(SLOTS):
                self._post(torch.empty(_SLOT_BYTES, dtype=torch.uint8))
            while True:
                slot, work = self._slots[0]
                work.wait(ENDLESS_S)
                self._slots.popleft()
                content = slot.numpy().tobytes()
                length, label = _HEADER.unpack_from(content)
                self._on_message(content[_HEADER.size : _HEADER.size + length], label)
                self._post(slot)
        except TDServeError as error:
            self._on_lost(error)
        except Exception as fault:  # noqa: BLE001 (outermost frame of the thread: no reader is left)
            self._channel.close()
            self._on_lost(LocalProtocolError(reason=f"{type(fault).__name__}: {fault}"[:500]))
        finally:
            self._slots.clear()
            self._sent.clear()

    def _post(self, slot: torch.Tensor) -> None:
        self._slots.append((slot, self._channel.recv(slot, MAIL_TAG)))
