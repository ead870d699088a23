"""A session's channel for content: formed by the first call that needs it, beside whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from tdserve.errors import ConnectError, DeadlineExceededError, TDServeError
from tdserve.transport.channel import Channel
from tdserve.transport.forming import JOIN_TIMEOUT_S, Forming

LETTING_GO_S = 2 * JOIN_TIMEOUT_S
"""Two channels that do not form hold up the end of their session so long, and that is part of the call's time."""


class ContentChannel:
    """Of one session. Threads: safe.

    Args:
        make: Makes the channel; blocks.
        peer: Name of the other end, for errors.
        on_unformed: Called when it cannot be formed, or not in time; ends the session, and says what callers are told.
    """

    def __init__(
        self, make: Callable[[], Channel], *, peer: str, on_unformed: Callable[[ConnectError], TDServeError]
    ) -> None:
        self._make = make
        self._on_unformed = on_unformed
        self._peer = peer
        self._lock = Lock()
        self._channel: Channel | None = None
        self._forming: Forming | None = None
        self._lost: TDServeError | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is formed."""
        return self._channel is not None

    def get(self, timeout_s: float) -> Channel:
        """The channel; the session is closed in ``timeout_s`` where it cannot be formed.

        Raises:
            TDServeError: What ``on_unformed`` says.
        """
        channel = self._channel
        if channel is None:
            limit_s = max(timeout_s - LETTING_GO_S, timeout_s / 2)
            try:
                channel = self._channel = self._begin().wait(limit_s)
            except ConnectError as error:
                raise self._on_unformed(error) from error
        return channel

    def expect(self, timeout_s: float) -> None:
        """Waits until it is formed, or so long: it is formed all the same, for the next call.

        Raises:
            DeadlineExceededError: It was not there in time.
            TDServeError: It cannot be formed, and what ``on_unformed`` says of that.
        """
        if self._channel is not None:
            return
        forming = self._begin()
        try:
            forming.wait(timeout_s)
        except ConnectError as error:
            if forming.is_over:
                raise self._on_unformed(error) from error
            raise DeadlineExceededError(what=f"a channel to {self._peer}", timeout_s=timeout_s) from error

    def lose(self, error: TDServeError) -> None:
        """The session is over: whoever waits is told why; what is formed is closed."""
        with self._lock:
            self._lost = self._lost or error
            forming = self._forming
        if forming is not None:
            forming.cancel(error)

    def _begin(self) -> Forming:
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if self._forming is None:
                self._forming = Forming(self._make, peer=self._peer, name="tdserve-open-channel")
            return self._forming
