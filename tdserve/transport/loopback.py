"""The loopback channel: both ends in one process. It reads the channel contract in the strictest way.

Where real transports differ, this one behaves in the way that finds more mistakes. A send completes only when it meets
its receive (gloo lets small ones go ahead). If two ends disagree on a length, both get an error (gloo ends the process,
or leaves the tail of the longer buffer unchanged).
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from threading import Condition

import torch

from tdserve.base.errors import DeadlineExceededError, LocalProtocolError, PeerLostError
from tdserve.transport.channel import PerMessage, Work

_Queue = deque["_LoopbackWork"]


class _LoopbackState:
    """The state that two ends share: sends and receives that have not met yet, by direction and tag."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.sends: dict[tuple[int, int], _Queue] = defaultdict(deque)
        self.recvs: dict[tuple[int, int], _Queue] = defaultdict(deque)
        self.lost: str | None = None

    def meet(self, direction: int, tag: int) -> None:
        """Copies the oldest send of a tag into the oldest receive, as long as there are both. Called with the lock
        held."""
        sends, recvs = self.sends[direction, tag], self.recvs[direction, tag]
        while sends and recvs:
            sent, received = sends.popleft(), recvs.popleft()
            if len(sent.buffer) != len(received.buffer):
                self.close("its end and ours disagree on a length")
                reason = f"tag {tag}: {len(sent.buffer)} bytes were sent, {len(received.buffer)} are to be received"
                raise LocalProtocolError(reason=reason)
            received.buffer.copy_(sent.buffer)
            sent.is_done = received.is_done = True
        self.changed.notify_all()

    def close(self, reason: str) -> None:
        """Closes both ends; the first reason counts. Called with the lock held."""
        self.lost = self.lost or reason
        self.sends.clear()
        self.recvs.clear()
        self.changed.notify_all()


class _LoopbackWork:
    def __init__(self, channel: LoopbackChannel, buffer: torch.Tensor) -> None:
        self._channel = channel
        self.buffer = buffer
        self.is_done = False

    def wait(self, timeout_s: float) -> None:
        state = self._channel.state
        end = time.monotonic() + timeout_s
        with state.changed:
            while not self.is_done:
                if state.lost is not None:
                    raise PeerLostError(peer=self._channel.peer, reason=state.lost)
                remaining_s = end - time.monotonic()
                if remaining_s <= 0:
                    state.close("a transfer took too long")
                    raise DeadlineExceededError(what="a loopback transfer", timeout_s=timeout_s)
                state.changed.wait(remaining_s)


class LoopbackChannel:
    """One end of a channel within a process; ``make_pair`` makes both. See ``tdserve.transport.channel.Channel``.

    Args:
        state: The state that it shares with the other end.
        rank: 0 or 1.
        peer: Name of the other end, for errors.
    """

    transport = "loopback"

    def __init__(self, state: _LoopbackState, rank: int, *, peer: str) -> None:
        self.state = state
        self.peer = peer
        self._rank = rank

    @classmethod
    def make_pair(cls) -> tuple[LoopbackChannel, LoopbackChannel]:
        """Returns two connected ends."""
        state = _LoopbackState()
        return cls(state, 0, peer="end 1 of the loopback"), cls(state, 1, peer="end 0 of the loopback")

    def send(self, buffer: torch.Tensor, tag: int) -> _LoopbackWork:
        return self._post(self.state.sends, self._rank, tag, buffer)

    def recv(self, buffer: torch.Tensor, tag: int) -> _LoopbackWork:
        return self._post(self.state.recvs, 1 - self._rank, tag, buffer)

    def wait_all(self, works: Sequence[Work], timeout_s: float) -> None:
        """Waits for one after the other."""
        end = time.monotonic() + timeout_s
        for work in works:
            try:
                work.wait(timeout_s if isinstance(timeout_s, PerMessage) else max(end - time.monotonic(), 0.0))
            except DeadlineExceededError as error:
                raise DeadlineExceededError(what="a loopback transfer", timeout_s=timeout_s) from error

    def close(self) -> None:
        """Closes both ends; what was sent and not received is lost."""
        with self.state.changed:
            self.state.close("the channel was closed")

    def _post(
        self, queues: dict[tuple[int, int], _Queue], direction: int, tag: int, buffer: torch.Tensor
    ) -> _LoopbackWork:
        """Queues a buffer. Raises LocalProtocolError if the two ends disagree on a length; then the channel is
        closed."""
        if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            kind = f"{buffer.dtype}{list(buffer.shape)}"
            raise LocalProtocolError(reason=f"a channel moves contiguous uint8 tensors of one dimension, not {kind}")
        work = _LoopbackWork(self, buffer)
        with self.state.changed:
            if self.state.lost is not None:
                raise PeerLostError(peer=self.peer, reason=self.state.lost)
            queues[direction, tag].append(work)
            self.state.meet(direction, tag)
        return work
