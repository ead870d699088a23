"""Forms a channel in a thread of its own, so that callers that wait for it can be released.

gloo's constructor is not notified if the other end dies in the middle of its handshake, and then outlasts even its own
timeout (measured). If it gives up while the interpreter ends, the process crashes (seen: SIGABRT instead of its exit
code), so the end of the interpreter ends its waits (``forming_groups``), and waits for it for a while.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from threading import Condition, Thread, current_thread

from tdserve.base.errors import ConnectError, TDServeError
from tdserve.transport.channel import Channel
from tdserve.transport.forming_groups import end_forming

JOIN_TIMEOUT_S = 1.0
"""Time for a thread whose handshake continues; one that hangs is left alone."""

EXIT_TIMEOUT_S = 3.0
"""Time for all of them at the end of the interpreter, after their waits for connections were ended."""

EXIT_PAUSE_S = 0.05
"""Time between two such attempts."""

_threads: set[Thread] = set()


class Forming:
    """Forms one channel. Threads: safe; any number of them may wait.

    Args:
        make: Makes the channel; blocks.
        peer: Name of the other end, for errors.
        on_formed: Called with the channel in the thread that made it, unless ``cancel`` was called before.
        name: Name of the thread.
    """

    def __init__(
        self, make: Callable[[], Channel], *, peer: str, name: str, on_formed: Callable[[Channel], None] | None = None
    ) -> None:
        self._make = make
        self._peer = peer
        self._on_formed = on_formed
        self._changed = Condition()
        self._channel: Channel | None = None
        self._error: TDServeError | None = None
        self._thread = Thread(target=self._run, name=name, daemon=True)
        atexit.unregister(_join_all)
        atexit.register(_join_all)
        _threads.add(self._thread)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the channel is formed, or has failed."""
        return self._channel is not None or self._error is not None

    @property
    def has_failed(self) -> bool:
        """Whether the channel has failed."""
        return self._error is not None

    def wait(self, timeout_s: float) -> Channel:
        """Waits for the channel and returns it.

        Raises:
            ConnectError: It could not be formed, or not in time.
            TDServeError: The error that was passed to ``cancel``.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._channel or self._error, max(end - time.monotonic(), 0.0))
            if self._channel is not None:
                return self._channel
            reason = f"no channel within {round(timeout_s, 2):g} s"
            raise self._error or ConnectError(address=self._peer, reason=reason)

    def cancel(self, error: TDServeError) -> None:
        """Raises this error in all waiting calls; closes the channel if it is formed, now or later. Idempotent."""
        with self._changed:
            channel, self._channel = self._channel, None
            self._error = self._error or error
            self._changed.notify_all()
        if channel is not None:
            channel.close()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._form()
        finally:
            _threads.discard(current_thread())

    def _form(self) -> None:
        try:
            channel = self._make()
        except TDServeError as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            return
        with self._changed:
            is_wanted = self._error is None
            if is_wanted:
                self._channel = channel
                self._changed.notify_all()
        if not is_wanted:
            channel.close()
        elif self._on_formed is not None:
            self._on_formed(channel)


def _join_all() -> None:
    end_s = time.monotonic() + EXIT_TIMEOUT_S
    while (living := [thread for thread in _threads if thread.is_alive()]) and time.monotonic() < end_s:
        end_forming()  # again and again: gloo tries a connection that fails four times
        living[0].join(min(EXIT_PAUSE_S, max(end_s - time.monotonic(), 0.0)))
