"""The NCCL channel: content store -> pinned staging -> GPU -> NCCL -> the client's GPU, between two ranks.

Written from torch 2.13's sources, and never run, for lack of two GPUs. Facts that this file relies on:

* A ``ProcessGroupNCCL`` built directly on a ``Store`` is not part of torch.distributed's world, like the gloo one.
* Sends and receives of a pair run in the order in which they were started; tags are ignored. Hence ``OrderedChannel``.
* Calls only enqueue. A waiting thread checks an event and the clock. gloo, not NCCL, notices a peer that is gone, and
  ``abort`` ends the kernels that wait for it.
* torch's watchdog would end the process on a fault; variables that are read when a group is made prevent this.
* Pinning memory, and allocating or freeing it on a GPU, may wait for kernels that wait for a peer: see
  ``staging_pool``.
* ``abort`` returns when the kernels have ended, which may take long: see ``ending_groups``.
* NCCL refuses two ranks on one GPU in the middle of its initialisation: the ends compare their GPUs before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from threading import Event, Lock
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tdserve.base.errors import CapacityError, ConnectError, NotSupportedError, PeerLostError
from tdserve.transport.ending_groups import ENDING_GROUPS
from tdserve.transport.gloo import WORKER_RANK
from tdserve.transport.nccl_groups import abort_group, make_group
from tdserve.transport.ordered import PIECE_BYTES, PIECES_UNDER_WAY
from tdserve.transport.rendezvous import CONNECT_TIMEOUT_S, KVStore
from tdserve.transport.staging_pool import StagingPool, StagingSlot

POLL_S = 0.0001
"""Pause between two checks of a piece under way, which takes some hundred microseconds; no wait of NCCL has a
deadline."""

ABORT_TIMEOUT_S = 1.0
"""Time for the kernels of an aborted group; longer ones end later, unobserved."""

STAGING_TIMEOUT_S = 2.0
"""Time for a session that has ended to return its staging memory: longer than the abort of a group usually takes."""

MAX_WIRES = 16
"""Wires per GPU and process: they take 192 MiB of pinned memory, and as much of the GPU's."""

_pools_lock = Lock()
_pools: dict[torch.device, StagingPool] = {}
"""Staging memory by GPU, for the life of the process."""


class WireGpu(Protocol):
    """The operations of a GPU that a wire needs; see ``CudaGpu``."""

    device: torch.device

    def make_group(self, kv_store: KVStore, rank: int) -> Any:
        """Makes a group of two."""

    def enqueue(self, start: Callable[[], None]) -> Any:
        """Starts calls; returns an event that comes after them."""

    def mark(self) -> Any:
        """Returns an event that comes after all work that the calling thread has given the GPU."""

    def wait_event(self, event: Any) -> None:
        """Orders all later calls after the event."""

    def drain(self) -> None:
        """Waits until all started calls have ended."""


def explain_unavailable(device: str) -> str:
    """Returns why this process cannot use NCCL on a device such as ``"cuda:0"``; "" if it can. Touches no other
    device."""
    wanted = torch.device(device)
    if wanted.type != "cuda":
        return f"{device} is not a CUDA device"
    if not dist.is_nccl_available():
        return "torch has no NCCL here"
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= (wanted.index or 0) < num_devices:  # torch keeps a number in one byte: of 999 it makes -25
        return f"there is no {device}: torch finds {num_devices} CUDA devices"
    return ""


def read_gpu_uuid(device: str) -> str:
    """Returns an id of a GPU that is equal in every process that uses it, whatever number it has there.

    Raises:
        NotSupportedError: It cannot be used for NCCL.
    """
    reason = explain_unavailable(device)
    if reason:
        raise NotSupportedError(feature=f"transport 'nccl' on {device!r}", reason=reason)
    return str(torch.cuda.get_device_properties(torch.device(device)).uuid)


class CudaGpu:
    """A GPU with a stream for one wire. Threads: one at a time.

    Args:
        device: The device, with its number.

    Raises:
        RuntimeError: It cannot be used.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def make_group(self, kv_store: KVStore, rank: int) -> Any:
        """Makes a group of two; see ``nccl_groups.make_group``."""
        return make_group(kv_store, rank, self.device)

    def enqueue(self, start: Callable[[], None]) -> Any:
        """Starts calls on the stream; returns an event that comes after them."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            start()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def mark(self) -> Any:
        """Returns an event that comes after all work that the calling thread has given the GPU."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_event(self, event: Any) -> None:
        """Makes the stream wait for it; no thread waits."""
        self._stream.wait_event(event)

    def drain(self) -> None:
        """Waits until the stream has nothing left to do."""
        self._stream.synchronize()


class _Piece:
    """A piece under way on the wire's stream."""

    def __init__(self, wire: NcclWire, event: Any, memory: torch.Tensor, *, source: torch.Tensor | None = None) -> None:
        self.memory = memory  # written or read until the event
        self._wire = wire
        self.source = source  # staging memory from which it is copied to ``memory``
        self._event = event

    def finish(self, timeout_s: float = math.inf) -> None:
        """See ``ordered.Moving``.

        Raises:
            PeerLostError: The wire is lost, or it takes longer than ``timeout_s``.
        """
        end_s = time.monotonic() + timeout_s
        while not self._event.query():
            self._wire.check()
            if time.monotonic() >= end_s:
                raise PeerLostError(peer=self._wire.peer, reason=f"no data arrived within {timeout_s:g} s")
            time.sleep(POLL_S)
        self._wire.finish(self)


class NcclWire:
    """Implements ``ordered.Wire``. Everything runs on a stream of its own.

    Args:
        kv_store: Rendezvous of this wire alone.
        rank: ``WORKER_RANK`` or ``CLIENT_RANK``.
        gpu: GPU of this end.
        staging: Memory for this end's pieces.
        peer: Name of the other end, for errors.
        timeout_s: Seconds until staging memory is free, and then again until the first byte has arrived.

    Raises:
        ConnectError: The wire did not form, or there is no staging memory for it. This may take ``FORM_TIMEOUT_S``
            longer than ``timeout_s``. Memory that it has taken is returned when NCCL has released it.
    """

    def __init__(
        self,
        kv_store: KVStore,
        rank: int,
        *,
        gpu: WireGpu,
        staging: StagingPool,
        peer: str,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.peer = peer
        self._gpu = gpu
        self._other = 1 - rank
        self._lock = Lock()
        self._using = Lock()  # guards staging memory and stream; unused once the wire is closed
        self._closed = Event()
        self._num_begun = 0
        self._staging = staging
        self._under_way: set[_Piece] = set()
        self._starting: torch.Tensor | None = None
        self._group: Any = None
        try:
            self._slots = staging.take(min(timeout_s, STAGING_TIMEOUT_S))
        except (RuntimeError, CapacityError) as error:
            raise _make_unformed_error(gpu.device, error) from error
        try:
            self._group = gpu.make_group(kv_store, rank)
            self._greet(rank, timeout_s)
        except (RuntimeError, ConnectError, PeerLostError) as error:
            self.close()
            raise _make_unformed_error(gpu.device, error) from error
        except BaseException:
            self.close()
            raise

    def send(self, piece: torch.Tensor) -> _Piece:
        """See ``ordered.Wire``."""
        slot, nbytes = self._take_next_slot(), len(piece)
        staged, pinned = slot.gpu[:nbytes], slot.pinned[:nbytes]

        def start(group: Any) -> None:
            pinned.copy_(piece)
            staged.copy_(pinned, non_blocking=True)
            group.send([staged], self._other, 0).wait()  # the stream waits, no thread does

        return self._begin(start, staged)

    def recv(self, piece: torch.Tensor, after: Any) -> _Piece:
        """See ``ordered.Wire``. Receives straight into memory of this GPU, otherwise through staging memory."""
        if piece.device == self._gpu.device:

            def start_here(group: Any) -> None:
                self._gpu.wait_event(after)
                group.recv([piece], self._other, 0).wait()

            return self._begin(start_here, piece)
        slot, nbytes = self._take_next_slot(), len(piece)
        staged, pinned = slot.gpu[:nbytes], slot.pinned[:nbytes]

        def start(group: Any) -> None:
            group.recv([staged], self._other, 0).wait()
            pinned.copy_(staged, non_blocking=True)

        return self._begin(start, piece, source=pinned)

    def mark_post(self, buffer: torch.Tensor) -> Any:
        """Returns a mark behind the work that this thread has already queued for memory on this GPU; a receive comes
        after it."""
        return self._gpu.mark() if buffer.device == self._gpu.device else None

    def check(self) -> None:
        """Raises PeerLostError if the wire is closed."""
        if self._closed.is_set():
            raise PeerLostError(peer=self.peer, reason="the NCCL wire was closed")

    def finish(self, piece: _Piece) -> None:
        """Finishes a piece: copies what was received through staging memory to its place.

        Raises:
            PeerLostError: The wire is closed; the staging memory may belong to another wire now.
        """
        with self._using:
            self.check()
            if piece.source is not None:
                piece.memory.copy_(piece.source)
        self._under_way.discard(piece)

    def close(self) -> None:
        """Aborts the group and waits briefly. Idempotent.

        Staging memory, and the destinations of pieces under way, are kept until the abort has returned and the stream
        has nothing left to do.
        """
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            group = self._group

        def end() -> None:
            if group is not None:
                abort_group(group)
            with self._using:  # used by a thread that began before
                self._gpu.drain()

        ending = ENDING_GROUPS.end_in_thread(
            end,
            keeps=self,
            name=f"tdserve-nccl-abort-{self.peer}",
            on_ended=self._let_go,
        )
        ending.join(ABORT_TIMEOUT_S)

    def _let_go(self) -> None:
        """Releases memory; called when nothing of the wire runs any more."""
        self._under_way.clear()
        self._starting = None
        self._staging.give_back(self._slots)

    def _take_next_slot(self) -> StagingSlot:
        """Returns the slot whose piece was finished first: there are at least as many slots as pieces under way."""
        self._num_begun += 1
        return self._slots[self._num_begun % len(self._slots)]

    def _begin(self, start: Callable[[Any], None], memory: torch.Tensor, source: torch.Tensor | None = None) -> _Piece:
        self._starting = memory  # kept by this wire if it is closed before there is a piece
        with self._using:
            self.check()
            try:
                event = self._gpu.enqueue(lambda: start(self._group))
            except RuntimeError as error:
                raise PeerLostError(peer=self.peer, reason=f"nccl: {str(error)[:300]}") from error
        piece = _Piece(self, event, memory, source=source)
        self._under_way.add(piece)
        self._starting = None
        return piece

    def _greet(self, rank: int, timeout_s: float) -> None:
        """Forms the connection by exchanging a first byte."""
        piece = torch.zeros(1, dtype=torch.uint8)
        (self.send(piece) if rank == WORKER_RANK else self.recv(piece, None)).finish(timeout_s)


def open_wire(kv_store: KVStore, rank: int, *, device: str, peer: str, timeout_s: float) -> NcclWire:
    """Opens one end of a wire between two GPUs. Arguments are those of :class:`NcclWire`, with the GPU's name.

    Raises:
        ConnectError: It did not form, or the GPU cannot be used. Nothing was sent.
    """
    there = torch.device(device)
    try:
        gpu, staging = CudaGpu(there), prepare_staging(device, num_ready=1)
    except RuntimeError as error:
        raise _make_unformed_error(there, error) from error
    return NcclWire(kv_store, rank, gpu=gpu, staging=staging, peer=peer, timeout_s=timeout_s)


def _make_unformed_error(device: torch.device, error: Exception) -> ConnectError:
    return ConnectError(address=str(device), reason=f"nccl: {str(error)[:300]}")


def prepare_staging(device: str, *, num_ready: int) -> StagingPool:
    """Returns the staging memory of this process for a GPU; makes it if there is none, with ``num_ready`` sets ready.

    Raises:
        RuntimeError: There is not enough memory, or the GPU cannot be used.
    """
    there = torch.device(device)
    with _pools_lock:
        pool = _pools.get(there)
        if pool is None:
            pool = _pools[there] = StagingPool(
                lambda: _make_slot(there),
                what=f"staging memory of {device}",
                set_size=PIECES_UNDER_WAY,
                num_ready=0,
                max_sets=MAX_WIRES,
            )
    pool.prepare(num_ready)
    return pool


def _make_slot(device: torch.device) -> StagingSlot:
    with torch.inference_mode(False):  # they are used again, in any mode
        return StagingSlot(
            torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True),
            torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device),
        )
