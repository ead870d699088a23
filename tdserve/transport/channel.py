"""The contract of a channel: two ends that exchange tagged byte buffers whose lengths both know beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class PerMessage(float):
    """A timeout in seconds that starts again with every message: a transfer that moves, however slowly, is not given
    up."""


class Work(Protocol):
    """One send or receive under way."""

    def wait(self, timeout_s: float) -> None:
        """Waits until the buffer was taken, or is filled.

        Raises:
            DeadlineExceededError: Not within ``timeout_s`` seconds. The channel is closed, since a late peer must not
                write into an abandoned buffer.
            PeerLostError: The other end went away. The channel is closed; a buffer that was being filled is undefined.
        """


class Channel(Protocol):
    """One end of a channel. Threads: ``send`` and ``recv`` may be called from any thread.

    Buffers are contiguous one-dimensional uint8 tensors, and the caller leaves them untouched until ``wait`` returns.
    The caller keeps each Work until then: dropping it gives its transfer up, and the other end does not notice.
    Messages of one tag arrive in the order in which they were sent; messages of different tags are independent. Sender
    and receiver agree on every length beforehand: it is not transmitted, and a mismatch may end the receiving process.
    A send may complete before the other end posts its receive, or only after.

    ``tests/conformance/transport_suite.py`` tests this contract; ``loopback`` is its strictest implementation.
    """

    @property
    def transport(self) -> str:
        """The name in statistics: ``"gloo"``, ``"loopback"``."""

    def send(self, buffer: torch.Tensor, tag: int) -> Work:
        """Starts to send; returns at once. Raises PeerLostError if the channel is closed."""

    def recv(self, buffer: torch.Tensor, tag: int) -> Work:
        """Starts to receive exactly ``len(buffer)`` bytes; returns at once."""

    def wait_all(self, works: Sequence[Work], timeout_s: float) -> None:
        """Waits for several works of this channel, in order; errors as in ``Work.wait``."""

    def close(self) -> None:
        """Closes the channel; the other end sees a lost peer. Idempotent."""
