"""The NCCL channel: content store -> pinned staging -> GPU -> NCCL -> the client's GPU, between two ranks.

Written after torch 2.13's sources, and never run by its author, who had no two GPUs. Facts this file rests on:

* A ``ProcessGroupNCCL`` built directly on a ``Store`` is no part of torch.distributed's world, like the gloo one.
* Sends and receives of a pair run in the order in which they were started; tags are ignored. So ``OrderedChannel``.
* They only enqueue. Whoever waits looks at an event and at the clock: a peer that is gone is noticed by gloo, not by
  NCCL, and ``abort`` is what ends the kernels that wait for it.
* torch's watchdog would end the process on a fault; variables that are read when a group is made tell it not to.
* Two ranks on one GPU are refused in the middle of NCCL's initialisation: the ends compare their GPUs before.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any

import torch
import torch.distributed as dist

from tdserve.config import variable_set
from tdserve.errors import ConnectError, NotSupportedError, PeerLostError
from tdserve.transport.channel import Channel
from tdserve.transport.gloo import CONNECT_TIMEOUT_S, WORKER_RANK, GlooChannel, KVStore
from tdserve.transport.ordered import PIECE_BYTES, PIECES_UNDER_WAY, OrderedChannel

NEVER = timedelta(days=365)
"""Of torch's own clock, whose end is the process's."""

POLL_S = 0.0001
"""Between two looks at a piece under way, which takes some hundred microseconds; nothing can wait with a deadline."""

ABORT_TIMEOUT_S = 1.0
"""For the kernels of an aborted group; longer ones end by themselves, unseen."""

_QUIET_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Read by torch when a group is made; else a peer's death would be this process's."""


class Branch(KVStore):
    """A part of another key-value store: several pairs find each other through one rendezvous."""

    def __init__(self, trunk: KVStore, name: str) -> None:
        super().__init__(lambda key, value: None)
        self._trunk = trunk
        self._name = name

    def set(self, key: str, value: bytes | str) -> None:
        """As of KVStore."""
        self._trunk.set(f"{self._name}/{key}", value)

    def get(self, key: str) -> bytes:
        """As of KVStore."""
        return self._trunk.get(f"{self._name}/{key}")


def why_unavailable(device: str) -> str:
    """Why this process cannot use NCCL on a device such as ``"cuda:0"``; "" when it can. Touches no other device."""
    wanted = torch.device(device)
    if wanted.type != "cuda":
        return f"{device} is no CUDA device"
    if not dist.is_nccl_available():
        return "torch has no NCCL here"
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (wanted.index or 0) >= num_devices:
        return f"there is no {device}: torch finds {num_devices} CUDA devices"
    return ""


def gpu_uuid(device: str) -> str:
    """What tells a GPU from all others; equal in every process that uses it, whatever number it has there.

    Raises:
        NotSupportedError: It cannot be used for NCCL.
    """
    reason = why_unavailable(device)
    if reason:
        raise NotSupportedError(feature=f"transport 'nccl' on {device!r}", reason=reason)
    return str(torch.cuda.get_device_properties(torch.device(device)).uuid)


def make_group(kv_store: KVStore, rank: int, device: torch.device, *, world_size: int = 2) -> Any:
    """A ProcessGroupNCCL whose faults are ours to handle. Its connections are formed by the first call."""
    with ExitStack() as settings, torch.cuda.device(device):
        for variable, value in _QUIET_WATCHDOG.items():
            settings.enter_context(variable_set(variable, value))
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = NEVER
        return dist.ProcessGroupNCCL(kv_store, rank, world_size, options)


@dataclass
class _Slot:
    """Staging memory of one piece: pinned, and on the GPU."""

    pinned: torch.Tensor
    gpu: torch.Tensor


class _Piece:
    """A piece under way on the wire's stream."""

    def __init__(self, wire: NcclWire, event: Any, *, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        self._wire = wire
        self._event = event
        self._source = source
        self._target = target

    def finish(self) -> None:
        """See ``ordered.Moving``."""
        while not self._event.query():
            self._wire.check()
            time.sleep(POLL_S)
        self._wire.check()
        if self._source is not None and self._target is not None:
            self._target.copy_(self._source)


class NcclWire:
    """See ``ordered.Wire``. Everything runs on a stream of its own.

    Args:
        kv_store: Rendezvous of this wire alone.
        rank: ``WORKER_RANK`` or ``CLIENT_RANK``.
        device: With its number.
        peer: Name of the other end, for errors.

    Raises:
        ConnectError: The wire did not form. May last as long as NCCL's own initialisation when the peer dies in it.
    """

    def __init__(self, kv_store: KVStore, rank: int, *, device: torch.device, peer: str) -> None:
        self._device = device
        self._peer = peer
        self._other = 1 - rank
        self._lock = Lock()
        self._closed = Event()
        self._num_begun = 0
        try:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                self._slots = [
                    _Slot(
                        torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True),
                        torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device),
                    )
                    for _ in range(PIECES_UNDER_WAY)
                ]
            self._group: Any = make_group(kv_store, rank, device)
            self._greet(rank)
        except (RuntimeError, PeerLostError) as error:
            self.close()
            raise ConnectError(address=str(device), reason=f"nccl: {str(error)[:300]}") from error

    def send(self, piece: torch.Tensor) -> _Piece:
        """See ``ordered.Wire``."""
        slot, nbytes = self._next_slot(), len(piece)
        slot.pinned[:nbytes].copy_(piece)
        staged = slot.gpu[:nbytes]

        def start(group: Any) -> None:
            staged.copy_(slot.pinned[:nbytes], non_blocking=True)
            group.send([staged], self._other, 0).wait()  # the stream waits, no thread does

        return _Piece(self, self._enqueue(start), source=None, target=None)

    def recv(self, piece: torch.Tensor, after: Any) -> _Piece:
        """See ``ordered.Wire``; straight into memory of this GPU, else through staging."""
        if piece.device == self._device:

            def start_here(group: Any) -> None:
                self._stream.wait_event(after)
                group.recv([piece], self._other, 0).wait()

            return _Piece(self, self._enqueue(start_here), source=None, target=None)
        slot, nbytes = self._next_slot(), len(piece)
        staged, pinned = slot.gpu[:nbytes], slot.pinned[:nbytes]

        def start(group: Any) -> None:
            group.recv([staged], self._other, 0).wait()
            pinned.copy_(staged, non_blocking=True)

        return _Piece(self, self._enqueue(start), source=pinned, target=piece)

    def posted(self, buffer: torch.Tensor) -> Any:
        """What the thread has already asked of memory on this GPU comes before what is received into it."""
        if buffer.device != self._device:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def check(self) -> None:
        """Raises PeerLostError when the wire is closed."""
        if self._closed.is_set():
            raise PeerLostError(peer=self._peer, reason="the NCCL wire was closed")

    def close(self) -> None:
        """Aborts the group. Idempotent."""
        self._closed.set()
        with self._lock:
            group, self._group = getattr(self, "_group", None), None
        if group is not None:
            ending = Thread(target=abort_group, args=(group,), name=f"tdserve-nccl-abort-{self._peer}", daemon=True)
            ending.start()
            ending.join(ABORT_TIMEOUT_S)

    def _next_slot(self) -> _Slot:
        """The slot whose piece was finished longest ago: there are as many as pieces under way at most."""
        self._num_begun += 1
        return self._slots[self._num_begun % len(self._slots)]

    def _enqueue(self, start: Any) -> Any:
        self.check()
        group = self._group
        if group is None:
            raise PeerLostError(peer=self._peer, reason="the NCCL wire was closed")
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                start(group)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
        except RuntimeError as error:
            raise PeerLostError(peer=self._peer, reason=f"nccl: {str(error)[:300]}") from error
        return event

    def _greet(self, rank: int) -> None:
        """Forms the connection, by a first byte."""
        piece = torch.zeros(1, dtype=torch.uint8)
        (self.send(piece) if rank == WORKER_RANK else self.recv(piece, None)).finish()


def open_channel(
    kv_store: KVStore, rank: int, *, host: str, device: str, peer: str, timeout_s: float = CONNECT_TIMEOUT_S
) -> Channel:
    """One end of a session's channel for content: between two GPUs, or by gloo alone.

    Args:
        kv_store: Rendezvous; kept alive by the channel.
        rank: ``WORKER_RANK`` (which decides the order of messages) or ``CLIENT_RANK``.
        host: Address of the interface for small messages.
        device: This end's GPU, another than the other end's; "" for gloo.
        peer: Name of the other end, for errors.
        timeout_s: Seconds for each of its pairs to form.

    Raises:
        ConnectError: It did not form. Nothing was sent.
    """
    small = GlooChannel(kv_store, rank, host=host, peer=peer, timeout_s=timeout_s)
    if not device:
        return small
    try:
        mail = GlooChannel(Branch(kv_store, "order"), rank, host=host, peer=peer, timeout_s=timeout_s)
    except ConnectError:
        small.close()
        raise
    try:
        wire = NcclWire(Branch(kv_store, "nccl"), rank, device=torch.device(device), peer=peer)
    except ConnectError:
        mail.close()
        small.close()
        raise
    return OrderedChannel(small, mail, wire, is_leader=rank == WORKER_RANK, transport="nccl", peer=peer)


def abort_group(group: Any) -> None:
    """Ends whatever hangs in it; may last as long as its kernels do."""
    with suppress(RuntimeError):
        group.abort()
