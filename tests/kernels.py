"""NCCL wires without a GPU. Threads replace the streams, and the kernels that wait in them for a peer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

import torch

from tdserve.transport.nccl import NcclWire
from tdserve.transport.ordered import PIECE_BYTES, PIECES_UNDER_WAY
from tdserve.transport.rendezvous import KVStore
from tdserve.transport.staging_pool import StagingPool, StagingSlot

TIMEOUT_S = 20.0


class Kernels:
    """In place of a GPU and of NCCL: a thread is the stream, and queues are the connection. What is received waits, as
    a kernel does, until the other end sends or the group was aborted.

    Args:
        pieces: Pieces of both directions, shared by both ends.
        device: What the GPU is called.
    """

    def __init__(self, pieces: list[SimpleQueue[torch.Tensor]], device: str = "cuda:0") -> None:
        self.device = torch.device(device)
        self._pieces = pieces
        self._stream = ThreadPoolExecutor(1)
        self._rank = 0
        self.is_aborted = Event()
        self.may_abort = Event()
        self.may_abort.set()
        self.is_failing = False

    def make_group(self, kv_store: KVStore, rank: int) -> Any:
        if self.is_failing:
            raise RuntimeError("no group")
        self._rank = rank
        return self

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> Any:
        self._pieces[other].put(tensors[0].clone())
        return self

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> Any:
        while not self.is_aborted.is_set():
            try:
                tensors[0].copy_(self._pieces[self._rank].get(timeout=0.01))
                break
            except Empty:
                continue
        return self

    def wait(self) -> None:
        """Waits for nothing: the stream itself waits for the work."""

    def abort(self) -> None:
        assert self.may_abort.wait(TIMEOUT_S)
        self.is_aborted.set()

    def enqueue(self, start: Callable[[], None]) -> Any:
        return Passed(self._stream.submit(start))

    def mark(self) -> Any:
        return None

    def wait_event(self, event: Any) -> None:
        """Does nothing: there is only one stream."""

    def drain(self) -> None:
        self._stream.shutdown(wait=True)


class Passed:
    """An event of that stream."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def query(self) -> bool:
        return self._future.done()


def make_staging(max_sets: int = 2) -> StagingPool:
    def make_slot() -> StagingSlot:
        return StagingSlot(torch.zeros(PIECE_BYTES, dtype=torch.uint8), torch.zeros(PIECE_BYTES, dtype=torch.uint8))

    return StagingPool(make_slot, what="staging memory", set_size=PIECES_UNDER_WAY, max_sets=max_sets)


def make_wire(kernels: Any, rank: int, staging: StagingPool, timeout_s: float = TIMEOUT_S) -> NcclWire:
    store = KVStore(lambda key, value: None)
    return NcclWire(store, rank, gpu=kernels, staging=staging, peer="it", timeout_s=timeout_s)


def joined_wires(staging: StagingPool, device: str = "cuda:0") -> tuple[list[Kernels], list[NcclWire]]:
    pieces: list[SimpleQueue[torch.Tensor]] = [SimpleQueue(), SimpleQueue()]
    kernels = [Kernels(pieces, device) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        forming = [threads.submit(make_wire, kernels[rank], rank, staging) for rank in range(2)]
        return kernels, [each.result() for each in forming]
