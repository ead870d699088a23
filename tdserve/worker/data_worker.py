"""The data worker's process; ``tdserve.worker.fork_server`` forks it."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from threading import Event, Thread, current_thread, main_thread

import torch

from tdserve.base.config import HEARTBEAT_S, MAIL_INLINE_BYTES, VALUES_WORKER
from tdserve.base.errors import NotSupportedError, PeerLostError
from tdserve.base.logs import read_log_format, start_logging
from tdserve.base.machine import keep_freed_memory, raise_descriptor_limit, share_arenas
from tdserve.base.worker_arguments import WorkerArguments
from tdserve.control.framing import WorkerSocket
from tdserve.control.status import encode_failure
from tdserve.data.mapped_stores import OpenStores
from tdserve.data.values_budget import READ_SHARE, ValuesBudget
from tdserve.rules.replay.allocation.shared_numbers import get_worker_place
from tdserve.store.database.environments import check_pages_when_opened
from tdserve.store.weights.version_mappings import drop_unlinked
from tdserve.transport.nccl import MAX_WIRES, prepare_staging, read_gpu_uuid
from tdserve.transport.nccl_groups import prepare_process
from tdserve.transport.pool import BufferPool
from tdserve.v1 import worker_pb2
from tdserve.worker.checksumming import Checksumming
from tdserve.worker.descriptors import DescriptorWatch
from tdserve.worker.handed_sockets import HandedSockets
from tdserve.worker.lane import WorkerContext
from tdserve.worker.observed_work import ObservedWork
from tdserve.worker.operations import is_quick, perform
from tdserve.worker.small_reads import SmallReads
from tdserve.worker.worker_claims import WorkerClaims
from tdserve.worker.worker_session import WorkerSession

SWITCH_INTERVAL_S = 0.0005
"""Seconds after which a thread that waits for the interpreter's lock asks for it. A thread that copies or sums small
leaves releases the lock for microseconds at a time, too short for another thread to wake up: a request then waited for
Python's default of 5 ms, as long as a megabyte takes from its writer to its reader."""


_log = logging.getLogger("tdserve.worker")


class Worker:
    """Reads orders and passes them to the threads of their sessions."""

    def __init__(self, connection: WorkerSocket, handed_sockets: HandedSockets, arguments: WorkerArguments) -> None:
        self._connection = connection
        self._handed_sockets = handed_sockets
        stores, observed = OpenStores(writes_values=arguments.number == VALUES_WORKER), ObservedWork()
        self._context = WorkerContext(
            stores=stores,
            worker_claims=WorkerClaims(stores, connection.report),
            small_reads=SmallReads(
                stores, inline_bytes=MAIL_INLINE_BYTES, place=get_worker_place(arguments.number), observed=observed
            ),
            pool=BufferPool(),
            report=connection.report,
            transfer_timeout_s=arguments.transfer_timeout_s,
            device=arguments.device,
            take_stream=handed_sockets.take_stream,
            has_clients=self._has_clients,
            send_mail=self._send_mail,
            values_budget=ValuesBudget(arguments.memory_limit_bytes // READ_SHARE),
            observed=observed,
        )
        self._sessions: dict[int, WorkerSession] = {}
        self._is_over = Event()
        self._checksumming = Checksumming(stores, connection.report, self._is_busy)

    def run(self) -> None:
        """Works until the control process is gone."""
        ready = worker_pb2.Report(done=_prepare_gpu(self._context.device))
        self._connection.report(ready)
        Thread(target=self._beat, name="tdserve-heartbeat", daemon=True).start()
        while orders := self._connection.receive_orders():
            for order in orders:
                self._dispatch_guarded(order)
        self._is_over.set()
        for session in self._sessions.values():
            session.close()
        self._handed_sockets.close()

    def _beat(self) -> None:
        """Sends heartbeats to control, in a thread of its own: others may be in a long copy."""
        while not self._is_over.wait(HEARTBEAT_S):
            self._connection.report(worker_pb2.Report(heartbeat=True))

    def _has_clients(self) -> bool:
        return any(self._sessions)  # session 0 has none

    def _send_mail(self, session: int, content: bytes) -> bool:
        found = self._sessions.get(session)
        if found is None or current_thread() is not main_thread():
            return False
        found.send_mail(content)
        return True

    def _is_busy(self) -> bool:
        return any(session.is_busy for session in list(self._sessions.values()))

    def _dispatch_guarded(self, order: worker_pb2.Order) -> None:
        """Dispatches an order. A lack of descriptors, threads or memory costs one session, not all."""
        try:
            self._dispatch(order)
        except (OSError, RuntimeError, MemoryError) as fault:
            _log.exception("an order could not be dispatched")
            reason = f"the data worker cannot take it: {type(fault).__name__}: {fault}"[:500]
            if order.order:
                failure = encode_failure(PeerLostError(peer="the data worker", reason=reason))
                self._connection.report(worker_pb2.Report(order=order.order, session=order.session, failure=failure))
            if order.session:
                lost = worker_pb2.SessionLost(reason=reason)
                self._connection.report(worker_pb2.Report(session=order.session, session_lost=lost))

    def _dispatch(self, order: worker_pb2.Order) -> None:
        if order.HasField("close_session"):
            session = self._sessions.pop(order.session, None)
            if session is not None:
                session.close()
            return
        if order.HasField("drop_store"):
            self._context.worker_claims.drop(order.drop_store.uid)
            self._context.stores.drop(order.drop_store.uid)
            drop_unlinked()  # if it held weights, their space is free now
            self._connection.report(worker_pb2.Report(order=order.order, done=worker_pb2.Worked()))
            return
        if order.HasField("forget_specs"):
            self._context.stores.forget_specs()
            return
        if order.HasField("checksum_version"):
            self._learn_spec(order)
            self._checksumming.put(order)
            return
        if order.HasField("take_counts"):
            counts = self._context.small_reads.take_counts()
            report = worker_pb2.Report(order=order.order)
            report.done.num_reads, report.done.nbytes_moved = counts.num_inline, counts.nbytes_inline
            report.done.num_sent, report.done.nbytes_sent = counts.num_sent, counts.nbytes_sent
            report.done.calls.extend(self._context.observed.take_figures())
            self._connection.report(report)
            return
        self._learn_spec(order)
        if order.HasField("prepare_claim"):
            self._context.worker_claims.prepare(order.prepare_claim)
            self._connection.report(worker_pb2.Report(order=order.order, done=worker_pb2.Worked()))
            return
        if order.HasField("open_claim"):
            self._context.worker_claims.open(order.open_claim)
            return
        session = self._sessions.get(order.session)
        if session is None:
            session = self._sessions[order.session] = WorkerSession(order.session, self._context, perform, is_quick)
        session.put(order)

    def _learn_spec(self, order: worker_pb2.Order) -> None:
        """Learns the order's spec before the order is queued: another session may name the same spec and be faster."""
        body = getattr(order, order.WhichOneof("body"))
        ref = getattr(body, "store", None) or getattr(body, "version", None)
        if ref is not None and ref.HasField("spec"):
            self._context.stores.learn(ref.fingerprint, ref.spec)


def _prepare_gpu(device: str) -> worker_pb2.Worked:
    """Returns what the first report has on this worker's GPU; allocates its staging memory first."""
    if not device:
        return worker_pb2.Worked()
    try:
        uuid = read_gpu_uuid(device)
        prepare_staging(device, num_ready=MAX_WIRES)  # so no session waits for another's kernels to get some
        return worker_pb2.Worked(gpu=uuid)
    except NotSupportedError as error:
        return worker_pb2.Worked(why_no_gpu=str(error.fields["reason"]))
    except RuntimeError as fault:  # from the driver
        return worker_pb2.Worked(why_no_gpu=f"{device}: {str(fault)[:300]}")


def main(fd: int, sockets_fd: int, arguments: WorkerArguments) -> None:
    """Runs a worker; the process ends with it.

    Args:
        fd: One end of a UNIX socket; the process ends when the other end closes.
        sockets_fd: One end of another, by which sockets come.
        arguments: As control has chosen them.
    """
    # Ctrl-C reaches the whole foreground group; this process ends when control closes the socket, after draining.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_logging("warning", process=f"tdserve worker {arguments.number}", form=read_log_format())
    raise_descriptor_limit()
    keep_freed_memory()
    share_arenas()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)  # sessions are the parallelism here; one thread each saturates the memory
    gc.freeze()  # imported objects stay: a collection need not visit them every time
    if arguments.checks_pages:
        check_pages_when_opened()
    connection = WorkerSocket(socket.socket(fileno=fd))
    if arguments.device:
        prepare_process(arguments.interface)
    DescriptorWatch().start()
    handed_sockets = HandedSockets(socket.socket(fileno=sockets_fd))
    Worker(connection, handed_sockets, arguments).run()
    # Threads may wait in gloo for peers that are gone; nothing here needs an orderly end.
    os._exit(0)
