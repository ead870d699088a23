"""The contract of a channel: two ends that exchange tagged byte buffers whose lengths both know beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class PerMessage(float):
    """A timeout in seconds that every message has for itself: what moves, however slowly, is not given up."""


class Work(Protocol):
    """One send or receive under way."""

    def wait(self, timeout_s: float) -> None:
        """Returns when the buffer was taken, or is filled.

        Raises:
            DeadlineExceededError: Not within ``timeout_s`` seconds. The channel is closed: a late peer must not write
                into a buffer that was given up.
            PeerLostError: The other end went away. The channel is closed; a buffer that was being filled is undefined.
        """


class Channel(Protocol):
    """One end of a channel. Threads: ``send`` and ``recv`` may be called from any thread.

    Buffers are contiguous one-dimensional uint8 tensors and stay untouched by the caller until ``wait`` returns. A Work
    is kept until then: dropping it gives its transfer up, unseen by the other end. Messages of one tag arrive in the
    order they were sent; messages of different tags are independent. Sender and receiver agree on every length
    beforehand: nothing on the wire tells it, and a mismatch may end the receiving process. A send may be taken before
    the other end posts its receive, or only then.

    ``tests/conformance/transport_suite.py`` is the exam of this contract; ``loopback`` is its strictest implementation.
    """

    @property
    def transport(self) -> str:
        """The name that statistics show: ``"gloo"``, ``"loopback"``."""

    def send(self, buffer: torch.Tensor, tag: int) -> Work:
        """Starts to send; returns at once. Raises PeerLostError when the channel is closed."""

    def recv(self, buffer: torch.Tensor, tag: int) -> Work:
        """Starts to receive exactly ``len(buffer)`` bytes; returns at once."""

    def wait_all(self, works: Sequence[Work], timeout_s: float) -> None:
        """Waits for several works of this channel at once, in order; errors as of ``Work.wait``."""

    def close(self) -> None:
        """Ends the channel; the other end sees a lost peer. Idempotent."""
