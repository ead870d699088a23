"""Connections among all members of an epoch: one gloo group in no registry of torch.distributed.

Facts that this file relies on beside those in ``gloo``:

* A receive that times out closes *all* pairs of its group at this rank, and every other rank sees that at once. A
  receive from a rank whose pair is already closed fails, and closes no other pair (measured with torch 2.13 on Linux).
* A wait for a message that was half transmitted is not notified when its pair is closed, by either end: it continues
  (measured). Over loopback 100 KB arrive whole or not at all, 500 KB do not; a network splits sooner.
* A collective of gloo itself runs in a thread of the group, and the end of the group waits for it (not measured): one
  that hangs could not be abandoned. So this file uses only sends and receives, which run in no thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from threading import Lock
from typing import Any

import torch

from tdserve.base.errors import DeadlineExceededError, PeerLostError
from tdserve.transport.blocking_threads import BlockingThreads
from tdserve.transport.gloo_reasons import get_reason
from tdserve.transport.proven import close_pairs, form_proven
from tdserve.transport.proving import ChannelCredential
from tdserve.transport.rendezvous import KVStore

LARGE_BYTES = 16 * 1024
"""A message of this size or more may be split in transmission, so the wait for it, in either direction, is made
interruptible: a fresh socket accepts no more at once (seen with 36 KB)."""


class GroupWork:
    """One send or receive under way; dropping it gives it up, and the other end does not notice.

    Attributes:
        peer: Rank of the other end.
        is_large: Whether it may be split in transmission.
    """

    def __init__(self, work: Any, buffer: torch.Tensor, peer: int, num_large: list[int]) -> None:
        self._work = work
        self._buffer = buffer  # gloo keeps a bare pointer
        self._num_large = num_large
        self.peer = peer
        # A message posted behind a large one may be split, since the large one fills the socket.
        self.is_large = buffer.numel() >= LARGE_BYTES or num_large[peer] > 0
        num_large[peer] += self.is_large

    def block(self, end_s: float) -> None:
        """Waits, uninterrupted, until a moment of the monotonic clock. Raises RuntimeError, as gloo does."""
        timeout_ms = max(math.ceil((end_s - time.monotonic()) * 1000), 1)
        self._work.wait(timedelta(milliseconds=timeout_ms))

    def settle(self) -> None:
        """Counts the message as done: it has arrived, or left, as a whole."""
        self._num_large[self.peer] -= self.is_large


class GroupChannel:
    """The connections of this rank to all others.

    Threads: ``send``, ``recv`` and ``close`` are safe in any.

    Args:
        kv_store: Rendezvous of all ranks; kept alive by the channel.
        rank: Rank of this member.
        world_size: Number of members.
        host: Address of the interface to listen on and connect from.
        credential: Secret and purpose that all ranks prove.
        name: Name of the group, for errors.
        timeout_s: Seconds for all pairs to form.
        peers: Names of the ranks in errors; empty: their numbers.

    Raises:
        ConnectError: They did not form, or a rank gave no proof. Nothing but proofs was sent.
    """

    def __init__(
        self,
        kv_store: KVStore,
        rank: int,
        world_size: int,
        *,
        host: str,
        credential: ChannelCredential,
        name: str,
        timeout_s: float,
        peers: Sequence[str] = (),
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._name = name
        self._peers = peers or [f"rank {number} of group {name!r}" for number in range(world_size)]
        self._kv_store = kv_store
        self._lock = Lock()
        self._threads = BlockingThreads(f"tdserve-group-{name}")
        self._num_large = ([0] * world_size, [0] * world_size)  # under way to each rank, and from it
        self._group, self._rendezvous = form_proven(
            kv_store, rank, world_size, host=host, credential=credential, timeout_s=timeout_s
        )

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> GroupWork:
        """Starts to send one-dimensional contiguous bytes to a rank; they stay untouched until the wait is over.

        Raises:
            PeerLostError: The channel is closed.
        """
        group = self._require_group()
        try:
            work = group.send([buffer], peer, tag)
        except RuntimeError as error:
            raise self._close_as_lost(peer, error) from error
        return GroupWork(work, buffer, peer, self._num_large[0])

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> GroupWork:
        """Starts to receive exactly ``len(buffer)`` bytes from a rank.

        Raises:
            PeerLostError: The channel is closed.
        """
        group = self._require_group()
        try:
            work = group.recv([buffer], peer, tag)
        except RuntimeError as error:
            raise self._close_as_lost(peer, error) from error
        return GroupWork(work, buffer, peer, self._num_large[1])

    def wait_all(self, works: Sequence[GroupWork], timeout_s: float) -> None:
        """Waits for several works.

        Raises:
            DeadlineExceededError: Not within ``timeout_s`` seconds. The channel is closed.
            PeerLostError: A member went away or closed its channel. The channel is closed; a buffer that was being
                filled is undefined.
        """
        end_s = time.monotonic() + timeout_s
        waited_for = works[0].peer if works else self.rank

        def block() -> None:
            nonlocal waited_for
            for work in works:
                waited_for = work.peer
                work.block(end_s)

        try:
            # A wait for a half transmitted message is not notified of a dead peer, so it is made interruptible.
            if not any(work.is_large for work in works):
                block()
            elif not self._threads.wait(block):
                raise PeerLostError(peer=self._peers[waited_for], reason="the channel was closed during a transfer")
        except RuntimeError as error:
            self.close()
            if time.monotonic() >= end_s:
                what = f"a transfer with {self._peers[waited_for]}"
                raise DeadlineExceededError(what=what, timeout_s=round(timeout_s, 2)) from error
            raise self._close_as_lost(waited_for, error) from error
        for work in works:
            work.settle()

    def close(self) -> None:
        """Ends everything under way at once; afterwards no buffer is read or written. Idempotent."""
        with self._lock:
            group, self._group = self._group, None
        self._kv_store.close()
        if group is not None:
            close_pairs(group, self.rank, self.world_size)
        self._threads.close()

    def _require_group(self) -> Any:
        group = self._group
        if group is None:
            raise PeerLostError(peer=f"group {self._name!r}", reason="this epoch's channel is closed")
        return group

    def _close_as_lost(self, peer: int, error: BaseException) -> PeerLostError:
        """Closes the channel, and returns the error that names the lost member."""
        self.close()
        return PeerLostError(peer=self._peers[peer], reason=get_reason(error))
