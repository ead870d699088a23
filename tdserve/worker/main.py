"""The data worker's process: ``python -m tdserve.worker.main FD WORKER TRANSFER_TIMEOUT_S [DEVICE]``, started by the
control process.

FD is an inherited UNIX socket. When its other end goes, this process ends: a worker never outlives its control process.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys

import torch

from tdserve.config import MAIL_INLINE_BYTES
from tdserve.control.framing import WorkerSocket
from tdserve.data.opened import OpenStores
from tdserve.errors import NotSupportedError
from tdserve.machine import keep_freed_memory
from tdserve.store.version_mappings import drop_unlinked
from tdserve.transport.nccl import gpu_uuid
from tdserve.transport.pool import BufferPool
from tdserve.v1 import worker_pb2
from tdserve.worker.checksumming import Checksumming
from tdserve.worker.operations import is_quick, perform
from tdserve.worker.session import Surroundings, WorkerSession
from tdserve.worker.small_reads import SmallReads

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that wants the interpreter's lock lets the one that has it go on. One that copies or sums up small
leaves lets go of it for microseconds at a time, in which no other wakes up: a request then waited for Python's default,
5 ms, which is as long as a megabyte takes from its writer to its reader."""

VALUES_WORKER = 0
"""The one worker that control asks to write non-tensor values: an LMDB environment has one writing process."""


_PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that this process gets when the one that started it dies."""


class Worker:
    """Reads orders and hands them to the threads of their sessions."""

    def __init__(self, connection: WorkerSocket, *, number: int, transfer_timeout_s: float, device: str = "") -> None:
        self._connection = connection
        stores = OpenStores(writes_values=number == VALUES_WORKER)
        self._surroundings = Surroundings(
            stores=stores,
            small_reads=SmallReads(stores, inline_bytes=MAIL_INLINE_BYTES),
            pool=BufferPool(),
            report=connection.report,
            transfer_timeout_s=transfer_timeout_s,
            device=device,
            has_clients=self._has_clients,
        )
        self._sessions: dict[int, WorkerSession] = {}
        self._checksumming = Checksumming(stores, connection.report, self._is_busy)

    def run(self) -> None:
        """Works until the control process is gone."""
        ready = worker_pb2.Report(done=_gpu_of(self._surroundings.device))
        self._connection.report(ready)
        while orders := self._connection.orders():
            for order in orders:
                self._dispatch(order)
        for session in self._sessions.values():
            session.close()

    def _has_clients(self) -> bool:
        return any(self._sessions)  # that of number 0 has none

    def _is_busy(self) -> bool:
        return any(session.is_busy for session in list(self._sessions.values()))

    def _dispatch(self, order: worker_pb2.Order) -> None:
        if order.HasField("close_session"):
            session = self._sessions.pop(order.session, None)
            if session is not None:
                session.close()
            return
        if order.HasField("drop_store"):
            self._surroundings.stores.drop(order.drop_store.uid)
            drop_unlinked()  # if it held weights, their space is free now
            self._connection.report(worker_pb2.Report(order=order.order, done=worker_pb2.Worked()))
            return
        if order.HasField("forget_specs"):
            self._surroundings.stores.forget_specs()
            return
        if order.HasField("checksum_version"):
            self._learn_spec(order)
            self._checksumming.put(order)
            return
        if order.HasField("count_reads"):
            counts = self._surroundings.small_reads.take_counts()
            report = worker_pb2.Report(order=order.order)
            report.done.num_reads, report.done.nbytes_moved = counts.num_inline, counts.nbytes_inline
            report.done.num_sent, report.done.nbytes_sent = counts.num_sent, counts.nbytes_sent
            self._connection.report(report)
            return
        self._learn_spec(order)
        session = self._sessions.get(order.session)
        if session is None:
            session = self._sessions[order.session] = WorkerSession(
                order.session, self._surroundings, perform, is_quick
            )
        session.put(order)

    def _learn_spec(self, order: worker_pb2.Order) -> None:
        """Before the order is queued: other sessions may name the same spec and be quicker."""
        body = getattr(order, order.WhichOneof("body"))
        ref = getattr(body, "store", None) or getattr(body, "version", None)
        if ref is not None and ref.HasField("spec"):
            self._surroundings.stores.learn(ref.fingerprint, ref.spec)


def _gpu_of(device: str) -> worker_pb2.Worked:
    """What the first report says of the GPU that this worker was given."""
    if not device:
        return worker_pb2.Worked()
    try:
        return worker_pb2.Worked(gpu=gpu_uuid(device))
    except NotSupportedError as error:
        return worker_pb2.Worked(why_no_gpu=str(error.fields["reason"]))
    except RuntimeError as fault:  # of the driver
        return worker_pb2.Worked(why_no_gpu=f"{device}: {str(fault)[:300]}")


def main(arguments: list[str]) -> None:
    """Entry of the process."""
    fd, number, transfer_timeout_s = int(arguments[0]), int(arguments[1]), float(arguments[2])
    # Ctrl-C reaches the whole foreground group; this process ends when control closes the socket, after draining.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Also when this process is stopped, or hangs where it cannot see the socket: nobody can use the root before it is
    # gone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(level=logging.WARNING, format=f"tdserve worker {number}: %(levelname)s %(message)s")
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)  # sessions are the parallelism here; copies saturate memory with one thread each
    gc.freeze()  # what was imported stays: a collection need not look at it every time
    connection = WorkerSocket(socket.socket(fileno=fd))
    device = arguments[3] if len(arguments) > 3 else ""
    Worker(connection, number=number, transfer_timeout_s=transfer_timeout_s, device=device).run()
    # Threads may wait in gloo for peers that are gone; nothing here needs an orderly end.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
