"""The gloo channel: a two-rank process group in no registry of torch.distributed.

Facts that this file relies on beside those in ``proven``, measured with torch 2.13 on Linux:

* A receive that times out closes the pair on both sides, for good. This is how a pair is closed on purpose.
* A dead peer is noticed at once, but two kinds of waits are not notified and last until their timeout. One is the wait
  for a message that was half transmitted. The other is the wait for a send that met the closed connection before gloo's
  own thread had seen it: gloo queues such a message and does not report its queue (``Pair::signalException``). A
  receive that was posted is always notified.
* A message longer than the posted receive ends the receiving process (SIGABRT): lengths are agreed beforehand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event, Lock, RLock
from typing import Any, cast

import torch

from tdserve.base.errors import DeadlineExceededError, PeerLostError, TDServeError
from tdserve.transport.blocking_threads import BlockingThreads
from tdserve.transport.channel import PerMessage, Work
from tdserve.transport.gloo_reasons import get_reason
from tdserve.transport.proven import close_pairs, form_proven
from tdserve.transport.proving import ChannelCredential
from tdserve.transport.rendezvous import CONNECT_TIMEOUT_S, KVStore

WORKER_RANK = 0
CLIENT_RANK = 1

WHOLE_MESSAGE_BYTES = 4096
"""Mail is not longer, and has a connection of its own: a message up to this size arrives whole or not at all. Longer
ones share their connection with messages of megabytes, behind which a few kilobytes are transmitted in parts."""

LARGE_MESSAGE_BYTES = 1 << 20
"""A message of this size or more is waited for in another thread, from which the caller can be released. A shorter one
of more than ``WHOLE_MESSAGE_BYTES`` has an empty message behind it, for which its receiver waits instead: an empty one
cannot be half transmitted, so gloo notifies that wait. A thread switch would take longer (a twelfth of a sample of 256
rows instead of a twentieth, measured)."""

_END = torch.empty(0, dtype=torch.uint8)

_OTHER_WAIT = "Application timeout"
"""Text in gloo's error of all other waits of this end after one has timed out; only that one has its length."""

_TOLD_WITHIN_S = 1.0
"""Time for that wait to report; it takes microseconds."""


class _GlooWork:
    def __init__(self, channel: GlooChannel, works: Sequence[Any], buffer: torch.Tensor, *, may_be_cut: bool) -> None:
        self._channel = channel
        self._works = works
        self._buffer = buffer  # gloo keeps a bare pointer
        self.may_be_cut = may_be_cut

    def wait(self, timeout_s: float) -> None:
        self._channel.wait_all([self], timeout_s)

    def block(self, end_s: float) -> None:
        """Waits, uninterrupted, until a moment of the monotonic clock. Raises RuntimeError, as gloo does."""
        for work in self._works:
            # gloo counts whole milliseconds: rounded down, it would end before the time is up.
            timeout_ms = max(math.ceil((end_s - time.monotonic()) * 1000), 1)
            work.wait(timedelta(milliseconds=timeout_ms))


class GlooChannel:
    """One end of a two-rank gloo group.

    Args:
        kv_store: Rendezvous; kept alive by the channel.
        rank: ``WORKER_RANK`` or ``CLIENT_RANK``.
        host: Address of the interface to listen on and connect from.
        credential: Secret and purpose that both ends prove.
        peer: Name of the other end, for errors.
        timeout_s: Seconds for the pair to form.

    Raises:
        ConnectError: The pair did not form, or the other end gave no proof. Nothing but proofs was sent.
    """

    transport = "gloo"

    def __init__(
        self,
        kv_store: KVStore,
        rank: int,
        *,
        host: str,
        credential: ChannelCredential,
        peer: str,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.peer = peer
        self._kv_store = kv_store
        self._other = 1 - rank
        self._lock = Lock()
        self._posting = Lock()
        self._closing = RLock()
        self._ended_by = ""
        self._is_ended = Event()
        self.waiters = BlockingThreads(f"tdserve-gloo-{peer}")
        self._group, self._rendezvous = form_proven(
            kv_store, rank, 2, host=host, credential=credential, timeout_s=timeout_s
        )

    def send(self, buffer: torch.Tensor, tag: int) -> _GlooWork:
        group = self._require_group()
        try:
            works = self._post(group.send, buffer, tag)
            return _GlooWork(self, works, buffer, may_be_cut=buffer.numel() > WHOLE_MESSAGE_BYTES)
        except RuntimeError as error:
            self.close()
            raise PeerLostError(peer=self.peer, reason=get_reason(error)) from error

    def recv(self, buffer: torch.Tensor, tag: int) -> _GlooWork:
        group = self._require_group()
        try:
            works = self._post(group.recv, buffer, tag)
            return _GlooWork(self, works[::-1], buffer, may_be_cut=buffer.numel() >= LARGE_MESSAGE_BYTES)
        except RuntimeError as error:
            self.close()
            raise PeerLostError(peer=self.peer, reason=get_reason(error)) from error

    def wait_all(self, works: Sequence[Work], timeout_s: float) -> None:
        """Waits for several works with at most one thread switch for all of them."""
        end_s = time.monotonic() + timeout_s
        mine = cast(Sequence[_GlooWork], works)

        def block() -> None:
            nonlocal end_s
            for work in mine:
                if isinstance(timeout_s, PerMessage):
                    end_s = time.monotonic() + timeout_s
                work.block(end_s)

        try:
            if not any(work.may_be_cut for work in mine):
                block()
            elif not self.waiters.wait(block):
                raise PeerLostError(peer=self.peer, reason="the channel was closed during a transfer")
        except RuntimeError as error:
            raise self._make_failure(error, timeout_s if time.monotonic() >= end_s else None) from error

    def close(self) -> None:
        """Ends everything under way at once; afterwards no buffer is read or written, even if another thread is closing
        the channel too."""
        self._end("the channel was closed")
        self._kv_store.close()
        with self._closing:
            group, self._group = self._group, None
            if group is not None:
                close_pairs(group, 1 - self._other, 2)
        self.waiters.close()

    def _post(self, post: Callable[[list[torch.Tensor], int, int], Any], buffer: torch.Tensor, tag: int) -> list[Any]:
        """Posts a message and the empty one behind it, if there is one: none of another thread comes between."""
        if not WHOLE_MESSAGE_BYTES < buffer.numel() < LARGE_MESSAGE_BYTES:
            return [post([buffer], self._other, tag)]
        with self._posting:
            return [post([each], self._other, tag) for each in (buffer, _END)]

    def _make_failure(self, error: RuntimeError, timeout_s: float | None) -> TDServeError:
        """Returns the error that a wait raises after the channel was closed: all waits of one channel name the same
        cause.

        Args:
            error: gloo's error.
            timeout_s: Timeout of the wait, if it is over.
        """
        found: TDServeError
        if timeout_s is not None:
            found = DeadlineExceededError(what="a gloo transfer", timeout_s=timeout_s)
            self._end(str(found))
        else:
            reason = get_reason(error)
            if _OTHER_WAIT in reason and self._is_ended.wait(_TOLD_WITHIN_S):
                reason = self._ended_by
            else:
                self._end(reason)
            found = PeerLostError(peer=self.peer, reason=reason)
        self.close()
        return found

    def _end(self, reason: str) -> None:
        """Records why the channel ended; only the first reason counts."""
        with self._lock:
            if not self._is_ended.is_set():
                self._ended_by = reason
                self._is_ended.set()

    def _require_group(self) -> Any:
        group = self._group
        if group is None:
            raise PeerLostError(peer=self.peer, reason="the channel is closed")
        return group
