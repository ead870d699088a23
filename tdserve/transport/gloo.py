"""The gloo channel: a two-rank process group that no registry of torch.distributed knows.

Facts this file rests on, measured with torch 2.13 on Linux:

* ``ProcessGroupGloo`` built directly on a ``Store`` leaves the user's default group, ``MASTER_ADDR`` and so on alone.
* A Python subclass of ``Store`` serves as rendezvous, if a reference to it is kept.
* A receive that times out closes the pair on both sides, for good. So that is how a pair is closed on purpose.
* A dead peer is noticed at once, but a wait for a message that was half on its way is not told: it lasts its timeout.
* A message longer than the posted receive ends the receiving process (SIGABRT): lengths are agreed beforehand.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Condition, Event, Lock
from typing import Any, cast

import torch
import torch.distributed as dist

from tdserve.errors import ConnectError, DeadlineExceededError, PeerLostError, TDServeError
from tdserve.transport.channel import PerMessage, Work
from tdserve.transport.waiters import Waiters

WORKER_RANK = 0
CLIENT_RANK = 1

LARGE_MESSAGE_BYTES = 1 << 20
"""From this size on a message is seldom on its way in one piece, and the wait for it is made one that can be ended."""

LARGE_SEND_BYTES = 16 * 1024
"""The same of what a client sends: a fresh socket takes no more at once, and gloo waits without end for a message that
was half sent when the worker died (seen with 36 KB)."""

CLOSING_TAG = 0
"""No request has this number: a receive under it never ends."""

CONNECT_TIMEOUT_S = 20.0
"""Both ends are alive when they start to connect: this only bounds a network that swallows packets."""

_OTHER_WAIT = "Application timeout"
"""In what gloo says to all other waits of this end when one has lasted too long; only that one knows how long."""

_TOLD_WITHIN_S = 1.0
"""For that one to say so; it takes microseconds."""


class KVStore(dist.Store):  # type: ignore[name-defined,misc]
    """The rendezvous of one pair of ranks: what one end sets is handed to ``publish``, and the other end ``feed``s it.

    It replaces ``TCPStore``, which listens on all interfaces whatever it is told: the addresses travel over the
    authenticated session instead. Threads: ``feed`` may be called from any thread.
    """

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._publish = publish
        self._entries: dict[str, bytes] = {}
        self._changed = Condition()
        self._is_closed = False
        self.timeout_s = CONNECT_TIMEOUT_S

    def feed(self, key: str, value: bytes) -> None:
        """Takes an entry that the other end has set."""
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Wakes whoever waits for an entry; it gets a ConnectError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        """Called by gloo with this rank's address."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.feed(key, content)
        self._publish(key, content)

    def get(self, key: str) -> bytes:
        """Called by gloo for the other rank's address; waits for it."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._entries or self._is_closed, self.timeout_s):
                reason = f"the peer's gloo address did not come within {self.timeout_s} s"
                raise ConnectError(address=key, reason=reason)
            if key not in self._entries:
                raise ConnectError(address=key, reason="the session was closed during the rendezvous")
            if not self._entries[key]:  # gloo would read on behind it, and crash the process
                raise ConnectError(address=key, reason="the peer's gloo address is empty")
            return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Called by gloo before ``get``."""
        for key in keys:
            self.get(key)


_FORMING_FAULTS = (RuntimeError, ValueError, IndexError, OverflowError, MemoryError)
"""What gloo's own exceptions become in Python: it takes the peer's address apart without looking at it first."""


MAX_UNFORMED = 16
"""Groups that do not form on a device, before others get a new one. gloo keeps a connection that comes for a pair which
was given up meanwhile, and its descriptor, as long as the device that it came to (measured)."""

_MAX_DEVICES = 16


class _Device:
    def __init__(self, host: str) -> None:
        self.device = dist.ProcessGroupGloo.create_device(hostname=host)
        self.num_unformed = 0


_devices: dict[tuple[str, int], _Device] = {}  # no lock, which a fork could find taken: one operation at a time will do


def gloo_device(host: str, pid: int) -> Any:
    """One gloo device (one thread, one event loop) per address and process: a hundred groups share it."""
    found = _devices.get((host, pid))
    if found is None:
        if len(_devices) >= _MAX_DEVICES:
            _devices.pop(next(iter(_devices)), None)
        found = _devices.setdefault((host, pid), _Device(host))
    return found.device


def note_unformed(host: str, pid: int) -> None:
    """A group did not form on the device of this address; after some of them the device goes with its last group."""
    found = _devices.get((host, pid))
    if found is not None:
        found.num_unformed += 1
        if found.num_unformed >= MAX_UNFORMED:
            _devices.pop((host, pid), None)


class _GlooWork:
    def __init__(self, channel: GlooChannel, work: Any, buffer: torch.Tensor, large_nbytes: int) -> None:
        self._channel = channel
        self._work = work
        self._buffer = buffer  # gloo keeps a bare pointer
        self.is_large = buffer.numel() >= large_nbytes

    def wait(self, timeout_s: float) -> None:
        self._channel.wait_all([self], timeout_s)

    def block(self, end_s: float) -> None:
        """Waits, uninterrupted, until a moment of the monotonic clock. Raises RuntimeError, as gloo does."""
        # gloo counts whole milliseconds: rounded down, it would be over before the time is.
        timeout_ms = max(math.ceil((end_s - time.monotonic()) * 1000), 1)
        self._work.wait(timedelta(milliseconds=timeout_ms))


class GlooChannel:
    """One end of a two-rank gloo group.

    Args:
        kv_store: Rendezvous; kept alive by the channel.
        rank: ``WORKER_RANK`` or ``CLIENT_RANK``.
        host: Address of the interface to listen on and connect from.
        peer: Name of the other end, for errors.
        timeout_s: Seconds for the pair to form.

    Raises:
        ConnectError: The pair did not form. Nothing was sent.
    """

    transport = "gloo"

    def __init__(
        self, kv_store: KVStore, rank: int, *, host: str, peer: str, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        self.peer = peer
        self._kv_store = kv_store
        self._other = 1 - rank
        self._large_send_nbytes = LARGE_SEND_BYTES if rank == CLIENT_RANK else LARGE_MESSAGE_BYTES
        self._lock = Lock()
        self._ended_by = ""
        self._is_ended = Event()
        self.waiters = Waiters(f"tdserve-gloo-{peer}")
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        try:
            options._devices = [gloo_device(host, os.getpid())]
            options._timeout = timedelta(seconds=timeout_s)
            kv_store.timeout_s = timeout_s
            options._threads = 1
            self._group: Any = dist.ProcessGroupGloo(kv_store, rank, 2, options)
        except (*_FORMING_FAULTS, ConnectError) as error:
            note_unformed(host, os.getpid())
            raise ConnectError(address=host, reason=f"gloo: {str(error).partition(chr(10))[0][:300]}") from error

    def send(self, buffer: torch.Tensor, tag: int) -> _GlooWork:
        group = self._open_group()
        try:
            work = group.send([buffer], self._other, tag)
            return _GlooWork(self, work, buffer, self._large_send_nbytes)
        except RuntimeError as error:
            self.close()
            raise PeerLostError(peer=self.peer, reason=str(error).partition("\n")[0][:300]) from error

    def recv(self, buffer: torch.Tensor, tag: int) -> _GlooWork:
        group = self._open_group()
        try:
            work = group.recv([buffer], self._other, tag)
            return _GlooWork(self, work, buffer, LARGE_MESSAGE_BYTES)
        except RuntimeError as error:
            self.close()
            raise PeerLostError(peer=self.peer, reason=str(error).partition("\n")[0][:300]) from error

    def wait_all(self, works: Sequence[Work], timeout_s: float) -> None:
        """Waits for several works: one change of threads for all of them, where they need any."""
        end_s = time.monotonic() + timeout_s
        mine = cast(Sequence[_GlooWork], works)

        def block() -> None:
            nonlocal end_s
            for work in mine:
                if isinstance(timeout_s, PerMessage):
                    end_s = time.monotonic() + timeout_s
                work.block(end_s)

        try:
            if not any(work.is_large for work in mine):
                block()
            elif not self.waiters.wait(block):
                raise PeerLostError(peer=self.peer, reason="the channel was closed during a transfer")
        except RuntimeError as error:
            raise self._failure(error, timeout_s if time.monotonic() >= end_s else None) from error

    def close(self) -> None:
        """Ends everything under way, at once: afterwards no buffer is read or written any more."""
        self._end("the channel was closed")
        with self._lock:
            group, self._group = self._group, None
        self._kv_store.close()
        if group is not None:
            endless = torch.empty(1, dtype=torch.uint8)
            with suppress(RuntimeError):
                group.recv([endless], self._other, CLOSING_TAG).wait(timedelta(milliseconds=1))
        self.waiters.close()

    def _failure(self, error: RuntimeError, timeout_s: float | None) -> TDServeError:
        """What a wait raises, after the channel was closed: all waits of one channel name the same cause.

        Args:
            error: Of gloo.
            timeout_s: Of the wait, if its time is over.
        """
        found: TDServeError
        if timeout_s is not None:
            found = DeadlineExceededError(what="a gloo transfer", timeout_s=timeout_s)
            self._end(str(found))
        else:
            reason = str(error).partition("\n")[0][:300]
            if _OTHER_WAIT in reason and self._is_ended.wait(_TOLD_WITHIN_S):
                reason = self._ended_by
            else:
                self._end(reason)
            found = PeerLostError(peer=self.peer, reason=reason)
        self.close()
        return found

    def _end(self, reason: str) -> None:
        """Notes why the channel ended, which happens once."""
        with self._lock:
            if not self._is_ended.is_set():
                self._ended_by = reason
                self._is_ended.set()

    def _open_group(self) -> Any:
        group = self._group
        if group is None:
            raise PeerLostError(peer=self.peer, reason="the channel is closed")
        return group
