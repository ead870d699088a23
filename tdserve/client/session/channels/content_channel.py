"""A session's channels for content: one at a time, opened by the first call that needs it.

A transfer that is abandoned halfway leaves bytes in the channel that are never received. So the channel is closed and a
new one replaces it. The session and everything that it holds stay.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from threading import Lock, RLock, Thread

from tdserve.base.errors import ConnectError, DeadlineExceededError, TDServeError, TransferAbortedError
from tdserve.transport.channel import Channel, Work
from tdserve.transport.channel_forming import JOIN_TIMEOUT_S, Forming
from tdserve.transport.rendezvous import CONNECT_TIMEOUT_S, KVStore
from tdserve.v1 import control_pb2

LETTING_GO_S = 2 * JOIN_TIMEOUT_S
"""Two channels that do not open delay the end of their session by this much, which is part of the call's time."""

MAX_BROKEN = 8
"""Channels of a session that may break within ``BROKEN_WITHIN_S`` before another session is tried."""

BROKEN_WITHIN_S = 60.0

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Most bytes of content that was posted for refused requests and not received yet."""

KEPT_TIMEOUT_S = 10.0
"""Time for the server to receive some of it."""


class ContentChannel:
    """One channel of a session. Threads: safe.

    Args:
        make: Opens the channel; blocks.
        peer: Name of the other end, for errors.
        on_unformed: Called when it cannot be opened, or not in time. It ends the session and returns the error that
            callers get.
        number: Counts the channels of a session. A call waits for a replacement only as long as its own deadline
            allows; the channel may then be ready for the next call.
        publish: Sends an entry of its rendezvous.

    Attributes:
        kv_store: Its rendezvous.
    """

    def __init__(
        self,
        make: Callable[[KVStore], Channel],
        *,
        peer: str,
        on_unformed: Callable[[ConnectError], TDServeError],
        number: int = 0,
        publish: Callable[[str, bytes], None] = lambda key, value: None,
    ) -> None:
        self.number = number
        self.kv_store = KVStore(publish)
        self._make = make
        self._on_unformed = on_unformed
        self._peer = peer
        self._lock = Lock()
        self._channel: Channel | None = None
        self._forming: Forming | None = None
        self._lost: TDServeError | None = None
        self._lost_at_s = math.inf
        self._closing = RLock()
        self._kept: dict[int, tuple[list[Work], int]] = {}

    @property
    def is_open(self) -> bool:
        """Whether content can be sent; false before the channel is formed and after a loss."""
        return self._channel is not None

    @property
    def is_renewing(self) -> bool:
        """Whether it replaces a lost channel, and is not open yet."""
        return self.number > 0 and self._channel is None

    @property
    def lost_for_s(self) -> float:
        """Seconds since it was lost; 0 if it is not lost."""
        return max(time.monotonic() - self._lost_at_s, 0.0)

    def get(self, timeout_s: float) -> Channel:
        """Returns the channel. If a session's first one does not open within ``timeout_s``, the session is closed.

        Raises:
            DeadlineExceededError: As raised by ``expect``, for a replacement.
            TDServeError: The error of ``on_unformed``, or the reason why it was lost.
        """
        if self.number:
            return self.expect(timeout_s)
        channel = self._channel
        if channel is None:
            limit_s = max(timeout_s - LETTING_GO_S, timeout_s / 2)
            try:
                channel = self._channel = self._begin().wait(limit_s)
            except ConnectError as error:
                raise self._on_unformed(error) from error
        return channel

    def expect(self, timeout_s: float) -> Channel:
        """Waits until it is open. After ``timeout_s`` it continues opening, for the next call.

        Raises:
            DeadlineExceededError: It was not open in time.
            TDServeError: It cannot be opened: the error of ``on_unformed``. Or it was lost: the reason.
        """
        if self._channel is not None:
            return self._channel
        forming = self._begin()
        try:
            channel = self._channel = forming.wait(timeout_s)
        except ConnectError as error:
            if forming.has_failed:
                raise self._on_unformed(error) from error
            raise DeadlineExceededError(what=f"a channel to {self._peer}", timeout_s=timeout_s) from error
        return channel

    def keep(self, request: int, works: Iterable[Work], nbytes: int) -> None:
        """Keeps the sends of a refused request: a send that is dropped is cancelled, and the peer would wait for it.

        Args:
            request: The client's newest request.
        """
        with self._lock:
            kept, kept_nbytes = self._kept.get(request, ([], 0))
            if self._lost is None:
                self._kept[request] = [*kept, *works], kept_nbytes + nbytes

    def let_go_before(self, request: int) -> None:
        """Releases the kept sends of all requests up to this one, whose content was received."""
        if self._kept:
            with self._lock:
                self._kept = {kept: works for kept, works in self._kept.items() if kept >= request}

    def reap(self) -> None:
        """Waits until few kept sends are left.

        Raises:
            PeerLostError, TransferAbortedError: The server receives nothing. The channel is closed.
        """
        while self._kept:
            with self._lock:
                if sum(nbytes for _, nbytes in self._kept.values()) <= MAX_KEPT_BYTES:
                    return
                works, _ = self._kept.pop(min(self._kept))
            if self._channel is not None:
                try:
                    self._channel.wait_all(works, KEPT_TIMEOUT_S)
                except DeadlineExceededError as error:
                    raise TransferAbortedError(transfer=0, reason=f"of refused writes: {error}") from error

    def lose(self, error: TDServeError) -> None:
        """Ends the channel.

        Waiting callers get the error; when this returns the channel is closed, whichever thread did it.
        """
        with self._lock:
            if self._lost is None:
                self._lost, self._lost_at_s = error, time.monotonic()
            forming = self._forming
        self.kv_store.close()
        if forming is not None:
            with self._closing:
                forming.cancel(error)
        with self._lock:
            self._kept.clear()

    def _begin(self) -> Forming:
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if self._forming is None:
                self._forming = Forming(lambda: self._make(self.kv_store), peer=self._peer, name="tdserve-open-channel")
            return self._forming


class ContentChannels:
    """The channels of a session, one after the other. Threads: safe.

    Args:
        make: Opens the channel with a number over its rendezvous; blocks.
        publish: Sends an entry of a rendezvous.
        peer, on_unformed: As in ``ContentChannel``.
        make_error: Makes the error of a call for which the first one was not open in time.
        clock: Seconds that never go back.

    Attributes:
        current: The newest, open or not: a request names it, and ``get`` opens it.
        connect_timeout_s: For the first call that uses one: it may take no longer than its own timeout.
        max_connect_s: Most of that.
    """

    def __init__(
        self,
        make: Callable[[int, KVStore], Channel],
        publish: Callable[[control_pb2.Rendezvous], None],
        *,
        peer: str,
        on_unformed: Callable[[ConnectError], TDServeError],
        make_error: Callable[[str], ConnectError],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._publish = publish
        self._peer = peer
        self._on_unformed = on_unformed
        self._make_error = make_error
        self._clock = clock
        self._lock = Lock()
        self._broken: deque[float] = deque(maxlen=MAX_BROKEN)
        self._is_over = False
        self.connect_timeout_s = self.max_connect_s = CONNECT_TIMEOUT_S
        self.current = self._make_next(0)

    @property
    def is_worn_out(self) -> bool:
        """Whether several channels in a row have broken."""
        broken = self._broken
        return len(broken) == MAX_BROKEN and self._clock() - broken[0] < BROKEN_WITHIN_S

    def find(self, number: int) -> ContentChannel:
        """Returns the channel with this number. A number above the current one shows that the current channel was lost.

        Raises:
            TransferAbortedError: Another channel has replaced it.
        """
        if number > self.current.number:
            self.replace(number - 1, "the server has lost it", waits=False)
        current = self.current
        if current.number != number:
            raise _make_replaced_error(number, "it was lost")
        return current

    def get(self, content_channel: ContentChannel, timeout_s: float | None = None) -> Channel:
        """Returns the channel to the data worker; the first call that needs it waits until it is connected.

        Args:
            timeout_s: For a replacement; the first channel may take ``connect_timeout_s``.

        Raises:
            ConnectError: It cannot be connected; the session is closed.
            TransferAbortedError: Another channel has replaced it.
            DeadlineExceededError: It is a replacement, and was not connected in time.
        """
        is_first = not content_channel.number
        return content_channel.get(self.connect_timeout_s if is_first or timeout_s is None else timeout_s)

    def await_current(self, timeout_s: float) -> None:
        """Waits until the current channel is open.

        Raises:
            ConnectError: It was not open in time and may be for the next call, or never will be and the session is
                closed.
            DeadlineExceededError: A replacement was not open in time.
        """
        content_channel = self.current
        try:
            content_channel.expect(timeout_s)
        except DeadlineExceededError as error:
            if content_channel.number:
                raise
            raise self._make_error(str(error)) from error

    def feed(self, entry: control_pb2.Rendezvous) -> None:
        """Receives an entry of the server's rendezvous."""
        current = self.current
        if entry.channel == current.number:
            current.kv_store.feed(entry.key, entry.value)

    def replace(self, number: int, reason: str, *, waits: bool = True) -> bool:
        """Replaces a channel, and all before it, that is lost or has content in it that is never received.

        Args:
            waits: True: no buffer is read or written any more when this returns. False: soon after.

        Returns:
            False if it was replaced before: a fault that is found late does not break its successor.
        """
        with self._lock:
            lost = self.current
            if number < lost.number or self._is_over:
                return False
            if lost.is_open:
                self._broken.append(self._clock())
            self.current = self._make_next(number + 1)
        error = _make_replaced_error(number, reason)
        if waits and lost.is_open:
            lost.lose(error)
        else:
            Thread(target=lost.lose, args=(error,), name="tdserve-close-channel", daemon=True).start()
        return True

    def lose(self, error: TDServeError) -> None:
        """Ends the current channel with its session."""
        with self._lock:
            self._is_over = True
            current = self.current
        current.lose(error)

    def _make_next(self, number: int) -> ContentChannel:
        def publish(key: str, value: bytes) -> None:
            self._publish(control_pb2.Rendezvous(key=key, value=value, channel=number))

        return ContentChannel(
            lambda kv_store: self._make(number, kv_store),
            peer=self._peer,
            on_unformed=self._on_unformed,
            number=number,
            publish=publish,
        )


def _make_replaced_error(number: int, reason: str) -> TransferAbortedError:
    return TransferAbortedError(transfer=0, reason=f"channel {number} was replaced by another: {reason}")
