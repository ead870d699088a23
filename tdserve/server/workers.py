"""The data workers as the control process sees them: started, given orders, restarted when they die."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tdserve.control.framing import ControlSocket
from tdserve.control.status import decode_failure
from tdserve.errors import LocalProtocolError, PeerLostError
from tdserve.server.entry import Entry
from tdserve.server.told_specs import ToldSpecs
from tdserve.v1 import worker_pb2

RESTART_BACKOFF_S = 0.1
MAX_RESTART_BACKOFF_S = 5.0
HEALTHY_AFTER_S = 10.0
"""A worker that lived this long starts again without waiting; one that dies at once must not burn a core."""

VALUES_WORKER = 0

DROP_TIMEOUT_S = 2.0
"""A worker reports that it has dropped a store within milliseconds, however many transfers go on."""

_log = logging.getLogger("tdserve.server")


@dataclass
class _Pending:
    future: asyncio.Future[worker_pb2.Worked]
    on_prepared: Callable[[worker_pb2.Prepared], None] | None


class DataWorker:
    """One worker process, through all its restarts.

    Args:
        number: 0 to ``--workers`` - 1.
        arguments: Handed to the process after its socket and number.
        root_fd: The root's lock, which the process holds too: it may still write when this process is gone.
        on_session: Called with reports that concern a session: rendezvous entries and losses.
        on_lost: Called when the process has died, after it was reaped: nothing it did goes on any more.

    Attributes:
        gpu: The uuid of its GPU; "" when it has none, or is not up yet.
        why_no_gpu: Why it cannot use the one that it was given.
    """

    def __init__(
        self,
        number: int,
        *,
        arguments: tuple[str, ...],
        root_fd: int | None = None,
        on_session: Callable[[worker_pb2.Report], None],
        on_lost: Callable[[DataWorker], None],
    ) -> None:
        self.number = number
        self.num_restarts = 0
        self.known_specs = ToldSpecs(self._forget_specs)
        self.ready = asyncio.Event()
        self.gpu = ""
        self.why_no_gpu = ""
        self._arguments = arguments
        self._root_fd = root_fd
        self._on_session = on_session
        self._on_lost = on_lost
        self._pending: dict[int, _Pending] = {}
        self._last_order = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: ControlSocket | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int:
        """Process id; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Starts the process and keeps it alive until ``stop``."""
        self._task = asyncio.create_task(self._supervise(), name=f"tdserve-worker-{self.number}")

    async def stop(self) -> None:
        """Ends the process: it leaves when its socket closes; killed if it does not within 2 s."""
        self._is_stopping = True
        if self._socket is not None:
            self._socket.close()
        if self._task is not None:
            await self._task

    def send(self, order: worker_pb2.Order) -> None:
        """Sends an order that has no answer; does nothing while the worker is down: it has forgotten everything."""
        if self._socket is not None and self.ready.is_set():
            try:
                self._socket.order(order)
            except PeerLostError:
                return

    def order(
        self, order: worker_pb2.Order, *, on_prepared: Callable[[worker_pb2.Prepared], None] | None = None
    ) -> asyncio.Future[worker_pb2.Worked]:
        """Sends an order; the future ends with its report.

        Args:
            on_prepared: Called when the worker is about to send the content of a read, with what it says of its values.

        Raises (from the future):
            PeerLostError: The worker is not there, or died before it reported.
        """
        future: asyncio.Future[worker_pb2.Worked] = asyncio.get_running_loop().create_future()
        if self._socket is None or not self.ready.is_set():
            future.set_exception(self._lost("is being restarted"))
            return future
        self._last_order += 1
        order.order = self._last_order
        try:
            self._socket.order(order)
        except PeerLostError as error:  # it died in this moment
            future.set_exception(error)
            return future
        self._pending[order.order] = _Pending(future, on_prepared)
        return future

    async def insist(self, entry: Entry, order: worker_pb2.Order) -> None:
        """Has an order on a store carried out, again after each death of the worker: for what must happen.

        Raises:
            TDServeError: The worker said so.
        """
        body = getattr(order, order.WhichOneof("body") or "")
        while True:
            await self.ready.wait()
            body.store.CopyFrom(entry.ref(self.known_specs))
            try:
                await self.order(order)
                return
            except PeerLostError:
                await asyncio.sleep(0)

    def _forget_specs(self) -> None:
        order = worker_pb2.Order()
        order.forget_specs.SetInParent()
        self.send(order)

    def _lost(self, reason: str) -> PeerLostError:
        return PeerLostError(peer=f"data worker {self.number}", reason=reason)

    async def _supervise(self) -> None:
        backoff_s = RESTART_BACKOFF_S
        while not self._is_stopping:
            started = time.monotonic()
            await self._run_once()
            if self._is_stopping:
                return
            lived_s = time.monotonic() - started
            backoff_s = RESTART_BACKOFF_S if lived_s > HEALTHY_AFTER_S else min(2 * backoff_s, MAX_RESTART_BACKOFF_S)
            self.num_restarts += 1
            _log.warning("data worker %d died after %.1f s, starting it again", self.number, lived_s)
            await asyncio.sleep(backoff_s)

    async def _run_once(self) -> None:
        ours, theirs = socket.socketpair()
        fds = [fd for fd in (theirs.fileno(), self._root_fd) if fd is not None]
        command = [
            sys.executable,
            "-m",
            "tdserve.worker.main",
            str(theirs.fileno()),
            str(self.number),
            *self._arguments,
        ]
        # Blocks for the milliseconds of a vfork; asyncio's own way needs a child watcher and buys nothing here.
        self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)  # noqa: ASYNC220
        theirs.close()
        gone = asyncio.Event()
        self._socket = await ControlSocket.open(ours, self._on_report, gone.set)
        if self._is_stopping:  # stop() came while there was no socket to close
            self._socket.close()
        await gone.wait()
        self.ready.clear()
        await asyncio.to_thread(_reap, self._process)
        self._socket = None
        self.known_specs.clear()
        pending, self._pending = self._pending, {}
        for entry in pending.values():
            if not entry.future.done():
                entry.future.set_exception(self._lost("it died and is being restarted"))
        self._on_lost(self)

    def _on_report(self, report: worker_pb2.Report) -> None:
        if report.order == 0:
            if report.HasField("done"):
                self.gpu, self.why_no_gpu = report.done.gpu, report.done.why_no_gpu
                if self.why_no_gpu:
                    _log.warning("data worker %d has no GPU: %s", self.number, self.why_no_gpu)
                self.known_specs.clear()  # of orders that were made while there was nobody to send them to
                self.ready.set()
            else:
                self._on_session(report)
            return
        if report.HasField("prepared"):
            prepared = self._pending.get(report.order)
            if prepared is not None and prepared.on_prepared is not None:
                prepared.on_prepared(report.prepared)
            return
        pending = self._pending.pop(report.order, None)
        if pending is None or pending.future.done():
            return
        if report.HasField("failure"):
            pending.future.set_exception(decode_failure(report.failure))
        elif report.HasField("done"):
            pending.future.set_result(report.done)
        else:
            pending.future.set_exception(LocalProtocolError(reason="a report without a body"))


async def drop_store(workers: Iterable[DataWorker], uid: str) -> None:
    """Has workers let go of a store whose files are gone: their space is free when this returns.

    A worker that is silent for ``DROP_TIMEOUT_S`` does so later; readers under way end with what they have mapped.
    """
    orders = [worker.order(worker_pb2.Order(drop_store=worker_pb2.DropStore(uid=uid))) for worker in workers]
    for order in orders:
        order.add_done_callback(_look)
    if orders:
        await asyncio.wait(orders, timeout=DROP_TIMEOUT_S)


def _look(order: asyncio.Future[worker_pb2.Worked]) -> None:
    """Keeps asyncio from complaining of a worker that died: it has let go of everything."""
    if not order.cancelled():
        order.exception()


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Returns when the process is gone for certain; a grace of 2 s, then SIGKILL."""
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
