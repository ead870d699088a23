"""Content among the GPUs of a group: an NCCL group in no registry of torch.distributed.

Facts from torch's sources and NCCL's documentation; none of them was measured, for lack of two GPUs:

* Calls only enqueue. Only torch's watchdog thread notices a peer that is gone or hangs, and it ends the process.
  So variables that are read when a group is made disable this, and a waiting thread checks the clock and ends the group
  by ``abort``, which wakes the kernels.
* NCCL refuses two ranks on one GPU in the middle of its initialisation: the control process compares GPUs before.
* Sends and receives between a pair are matched by order alone; tags are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock, Thread, Timer
from typing import Any

import torch
import torch.distributed as dist

from tdserve.base.errors import ConnectError, DeadlineExceededError, NotSupportedError, PeerLostError
from tdserve.transport.blocking_threads import BlockingThreads
from tdserve.transport.ending_groups import ENDING_GROUPS
from tdserve.transport.nccl_groups import abort_group, make_group
from tdserve.transport.rendezvous import KVStore

POLL_S = 0.0002
"""Pause between two checks of a call under way: no wait of NCCL has a deadline."""

_Start = Callable[[Any, torch.Tensor], Any]
"""Enqueues one call of a group."""

_OPERATIONS = {"sum": "SUM", "product": "PRODUCT", "max": "MAX", "min": "MIN"}


def check_available() -> None:
    """Raises NotSupportedError if torch was built without NCCL, or finds no CUDA device."""
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        raise NotSupportedError(feature="backend 'nccl'", reason="torch has no NCCL here, or finds no CUDA device")


class NcclGroupChannel:
    """This rank's part of an NCCL group. Threads: one at a time; ``close`` in any.

    Args:
        kv_store: Rendezvous of all ranks, for this group alone; kept alive by the channel.
        rank: Rank of this member.
        world_size: Number of members.
        device: CUDA device, with its number.
        name: Name of the group, for errors.

    Raises:
        ConnectError: The group could not be made. Connections are formed by the first call.
    """

    def __init__(self, kv_store: KVStore, rank: int, world_size: int, *, device: torch.device, name: str) -> None:
        self.device = device
        self._name = name
        self._kv_store = kv_store
        self._lock = Lock()
        self._threads = BlockingThreads(f"tdserve-group-{name}-nccl")
        self._ending: Thread | None = None
        self._under_way: Sequence[torch.Tensor] = ()
        try:
            self._group: Any = make_group(kv_store, rank, device, world_size=world_size)
        except (RuntimeError, ConnectError) as error:
            raise ConnectError(address=str(device), reason=f"nccl: {str(error)[:300]}") from error

    def broadcast(self, flats: Sequence[torch.Tensor], src: int, timeout_s: float) -> None:
        """Fills one-dimensional tensors on the device with those of rank ``src``.

        Raises:
            DeadlineExceededError, PeerLostError: The channel is closed; the tensors are undefined.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._run(lambda group, flat: group.broadcast([flat], options), flats, timeout_s)

    def send(self, flats: Sequence[torch.Tensor], dst: int, timeout_s: float) -> None:
        """Sends to a rank; errors as in ``broadcast``."""
        self._run(lambda group, flat: group.send([flat], dst, 0), flats, timeout_s)

    def recv(self, flats: Sequence[torch.Tensor], src: int, timeout_s: float) -> None:
        """Receives from a rank; errors as in ``broadcast``."""
        self._run(lambda group, flat: group.recv([flat], src, 0), flats, timeout_s)

    def all_reduce(self, flats: Sequence[torch.Tensor], op: str, timeout_s: float) -> None:
        """Reduces over all ranks, in place; errors as in ``broadcast``."""
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, _OPERATIONS[op])
        self._run(lambda group, flat: group.allreduce([flat], options), flats, timeout_s)

    def close(self) -> None:
        """Ends everything under way, in a thread, since a kernel that hangs takes time. Idempotent.

        Tensors that a kernel may still write are kept until then.
        """
        self._kv_store.close()
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            self._ending = ENDING_GROUPS.end_in_thread(
                lambda: abort_group(group), keeps=self._under_way, name=f"tdserve-group-{self._name}-abort"
            )
        self._threads.close()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of ``close``."""
        if self._ending is not None:
            self._ending.join(timeout_s)

    def _run(self, start: _Start, flats: Sequence[torch.Tensor], timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        self._kv_store.timeout_s = timeout_s
        self._under_way = flats
        try:
            with torch.cuda.device(self.device):
                for work in self._begin(start, flats, timeout_s):
                    self._wait(work, end_s)
        except (RuntimeError, ConnectError, PeerLostError, DeadlineExceededError) as error:
            self.close()
            if time.monotonic() >= end_s:
                raise DeadlineExceededError(what="a transfer by NCCL", timeout_s=round(timeout_s, 2)) from error
            raise PeerLostError(peer=f"group {self._name!r}", reason=f"nccl: {str(error)[:300]}") from error
        self._under_way = ()

    def _begin(self, start: _Start, flats: Sequence[torch.Tensor], timeout_s: float) -> list[Any]:
        """Enqueues calls. The first calls of a channel form its connections, and block until all ranks have come, so
        they are made in a thread from which the caller can be released."""
        stream = torch.cuda.current_stream(self.device)
        works: list[Any] = []

        def begin() -> None:
            with torch.cuda.stream(stream):
                works.extend(start(self._require_group(), flat) for flat in flats)

        timer = Timer(timeout_s, self.close)
        timer.daemon = True
        timer.start()
        try:
            if not self._threads.wait(begin):
                raise PeerLostError(peer=f"group {self._name!r}", reason="the channel was closed")
        finally:
            timer.cancel()
        return works

    def _wait(self, work: Any, end_s: float) -> None:
        while not work.is_completed():
            self._require_group()
            if time.monotonic() >= end_s:
                raise DeadlineExceededError(what="a transfer by NCCL")
            time.sleep(POLL_S)
        work.wait()  # raises the failure; the current stream continues after it

    def _require_group(self) -> Any:
        group = self._group
        if group is None:
            raise PeerLostError(peer=f"group {self._name!r}", reason="this epoch's channel is closed")
        return group
