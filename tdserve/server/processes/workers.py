"""The data workers as the control process sees them: started, given orders, restarted when they die."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tdserve.base.config import ServerConfig
from tdserve.base.errors import CapacityError, ClosedError, LocalProtocolError, PeerLostError, TooLargeError
from tdserve.base.machine import count_oom_kills
from tdserve.base.worker_arguments import WorkerArguments
from tdserve.control.framing import ControlSocket
from tdserve.control.status import decode_failure
from tdserve.server.execution.waiting import retrieve_exception, wait_any
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.worker_spec_cache import WorkerSpecCache
from tdserve.server.processes.claim_holder import ClaimHolder
from tdserve.server.processes.claim_writers import WorkerWriter
from tdserve.server.processes.exit_reasons import explain_exit, is_from_outside, may_be_damage
from tdserve.server.processes.fork_server_process import NUM_LOOKS, START_TIMEOUT_S
from tdserve.server.processes.worker_processes import WorkerProcess, WorkerProcesses
from tdserve.v1 import worker_pb2

RESTART_BACKOFF_S = 0.1
"""Shortest restart delay, which each early death doubles; after the first it is already twice as long."""
MAX_RESTART_BACKOFF_S = 2.0
"""Longest restart delay."""
HEALTHY_AFTER_S = 10.0
"""Lifetime after which a worker is restarted with the shortest delay; one that dies at once must not burn a core."""

EXIT_GRACE_S = 2.0
"""Time in which a process of the server can exit by itself once its socket or its input is closed."""

DROP_TIMEOUT_S = 2.0
"""Limit for workers' reports that they have dropped a store; they take milliseconds, however many transfers are under
way."""

MAX_DEATHS = 4
"""Deaths of a worker in the middle of an order that must be done, after which it counts as the fault of the order: for
example of a page that its disk has no room for. All but the first come while it has no other such order, and no other
process has killed the worker."""
MAX_KILLS = 60
"""Deaths of any kind after which such an order is given up too, some minutes later: what kills the worker each time may
be a limit of memory that this process does not see."""

_NOT_STARTED = (OSError, CapacityError, PeerLostError, ClosedError)
"""Errors of a start for lack of descriptors, processes or memory, which may pass soon; or because the server ends."""

_log = logging.getLogger("tdserve.server")


@dataclass
class _Pending:
    future: asyncio.Future[worker_pb2.Worked]
    on_prepared: Callable[[worker_pb2.Prepared], None] | None


def compute_backoff_s(backoff_s: float, lived_s: float) -> float:
    """Returns the seconds until a worker that has died is started again: deaths in quick succession are slowed down.

    Args:
        backoff_s: Delay before the last start.
        lived_s: Lifetime of the worker.
    """
    return RESTART_BACKOFF_S if lived_s > HEALTHY_AFTER_S else min(2 * backoff_s, MAX_RESTART_BACKOFF_S)


class DataWorker:
    """One data worker, through all its restarts.

    Args:
        arguments: Arguments of its first process; of a later one they may differ in ``checks_pages``.
        processes: Starts its processes.
        timeout_s: Time without a sign of life after which the process counts as hung, and is killed.
        on_session: Called with reports that concern a session: rendezvous entries, losses, and messages of its client.
        on_lost: Called when the process has died and is proved gone: nothing it did continues any more.
        on_span: Called with reports that have a span; None ignores these.

    Attributes:
        number: Its number, from 0 to ``--workers`` - 1.
        gpu: The uuid of its GPU; "" if it has none, or is not up yet.
        why_no_gpu: The reason why it cannot use the GPU that it was given.
        claim_holder: Claims of the process; None while there is none.
    """

    def __init__(
        self,
        arguments: WorkerArguments,
        processes: WorkerProcesses,
        *,
        timeout_s: float = ServerConfig.worker_timeout_s,
        on_session: Callable[[worker_pb2.Report], None],
        on_lost: Callable[[DataWorker], None],
        on_span: Callable[[DataWorker, worker_pb2.Report], None] | None = None,
    ) -> None:
        self.number = arguments.number
        self.num_restarts = 0
        self.known_specs = WorkerSpecCache(self._forget_specs)
        self.ready = asyncio.Event()
        self.gpu = ""
        self.why_no_gpu = ""
        self.claim_holder: ClaimHolder | None = None
        self._processes = processes
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._num_silent = self._num_kills = 0
        self._on_session = on_session
        self._on_lost = on_lost
        self._on_span = on_span
        self._pending: dict[int, _Pending] = {}
        self._last_order = 0
        self._process: WorkerProcess | None = None
        self._socket: ControlSocket | None = None
        self._task: asyncio.Task[None] | None = None
        self._killing: asyncio.Future[None] | None = None
        self._repeating = asyncio.Lock()
        self._is_stopping = self._has_started = False

    @property
    def pid(self) -> int:
        """Process id; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Starts the process and keeps it alive until ``stop``."""
        self._task = asyncio.create_task(self._supervise(), name=f"tdserve-worker-{self.number}")

    async def stop(self) -> None:
        """Ends the process: it exits when its socket closes; after ``EXIT_GRACE_S`` it is killed."""
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

    async def wait_ready(self, ended: asyncio.Event) -> None:
        """Waits until the process has started, or the session for which it shall work has ended."""
        if not self.ready.is_set():
            await wait_any((self.ready, ended))

    def hand_over(self, session: int, channel_number: int, connection: socket.socket) -> None:
        """See :meth:`WorkerProcess.hand_over`."""
        if self._process is None or not self.ready.is_set():
            raise self._make_down_error()
        self._process.hand_over(session, channel_number, connection)

    def submit(
        self,
        order: worker_pb2.Order,
        *,
        rest: bytes = b"",
        on_prepared: Callable[[worker_pb2.Prepared], None] | None = None,
    ) -> asyncio.Future[worker_pb2.Worked]:
        """Sends an order; its report becomes the result of the future.

        Args:
            rest: As for ``ControlSocket.order``.
            on_prepared: Called when the worker is about to send the content of a read, with its description of the
                values.

        Raises (from the future):
            PeerLostError: The worker is down, or died before it reported.
            TooLargeError: The order is longer than any frame.
            TDServeError: The worker reported a failure.
        """
        future: asyncio.Future[worker_pb2.Worked] = asyncio.get_running_loop().create_future()
        if self._socket is None or not self.ready.is_set():
            future.set_exception(self._make_down_error())
            return future
        self._last_order += 1
        order.order = self._last_order
        try:
            self._socket.order(order, rest)
        except (PeerLostError, TooLargeError) as error:  # the first: it has just died
            future.set_exception(error)
            return future
        self._pending[order.order] = _Pending(future, on_prepared)
        return future

    async def order_until_done(self, store: OpenedStore, order: worker_pb2.Order) -> None:
        """Has an order on a store carried out, again after a death of the worker: for what must be done. Orders that
        are repeated come one at a time, so that none is blamed for what another one does.

        Raises:
            PeerLostError: The worker has died of it ``MAX_DEATHS`` times, or at it ``MAX_KILLS`` times. Any part of it
                may be done.
            TDServeError: The worker reported a failure.
        """
        if await self._try_order(store, order):
            return
        num_deaths = num_blamed = 1
        async with self._repeating:
            while num_blamed < MAX_DEATHS and num_deaths < MAX_KILLS:
                num_kills = self._num_kills
                if await self._try_order(store, order):
                    return
                await self.ready.wait()  # by then it is known how it has died
                num_deaths += 1
                num_blamed += self._num_kills == num_kills
        raise self._make_lost_error(f"it died {num_deaths} times while it was to do the same for store {store.name!r}")

    async def _try_order(self, store: OpenedStore, order: worker_pb2.Order) -> bool:
        """Sends an order on a store as soon as the worker is up; returns False if it dies before it has reported."""
        body = getattr(order, order.WhichOneof("body") or "")
        while True:
            await self.ready.wait()
            body.store.CopyFrom(store.make_ref(self.known_specs))
            reported = self.submit(order)
            was_sent = not reported.done()
            try:
                await reported
            except PeerLostError:
                if was_sent:
                    return False
                await asyncio.sleep(0)
            else:
                return True

    def _forget_specs(self) -> None:
        order = worker_pb2.Order()
        order.forget_specs.SetInParent()
        self.send(order)

    def _make_lost_error(self, reason: str) -> PeerLostError:
        return PeerLostError(peer=f"data worker {self.number}", reason=reason)

    def _make_down_error(self) -> PeerLostError:
        return self._make_lost_error("it is being restarted" if self._has_started else "it is starting")

    async def _supervise(self) -> None:
        backoff_s = RESTART_BACKOFF_S
        while not self._is_stopping:
            started = time.monotonic()
            try:
                exit_code, why = await self._run_once()
            except _NOT_STARTED as fault:
                if self._is_stopping:
                    return
                _log.error("data worker %d cannot be started: %s", self.number, fault)
                await asyncio.sleep(MAX_RESTART_BACKOFF_S)
                continue
            if self._is_stopping:
                return
            lived_s = time.monotonic() - started
            backoff_s = compute_backoff_s(backoff_s, lived_s)
            self.num_restarts += 1
            if may_be_damage(exit_code):
                self._arguments = replace(self._arguments, checks_pages=True)
            _log.warning("data worker %d died after %.1f s (%s), starting it again", self.number, lived_s, why)
            await asyncio.sleep(backoff_s)

    async def _run_once(self) -> tuple[int | None, str]:
        """Starts the process and waits for its end; returns its exit code, and why it has ended."""
        num_oom_kills = count_oom_kills()
        process = self._process = await self._processes.fork(self._arguments)
        self.claim_holder = self._make_claim_holder(process)
        lost = asyncio.Event()
        self._socket = await ControlSocket.open(process.connection, self._on_report, lost.set)
        if self._is_stopping:  # stop() came while there was no socket to close
            self._socket.close()
        watching = asyncio.create_task(self._watch(process), name=f"tdserve-worker-{self.number}-watch")
        await lost.wait()
        watching.cancel()
        self.ready.clear()
        await process.end(EXIT_GRACE_S)
        self._socket = None
        self.known_specs.clear()
        pending, self._pending = self._pending, {}
        for order in pending.values():
            if not order.future.done():
                order.future.set_exception(self._make_lost_error("it died and is being restarted"))
        self._on_lost(self)
        self.claim_holder = None
        exit_code, num_oom_kills = await process.reap(), count_oom_kills() - num_oom_kills
        cause = (exit_code, num_oom_kills, process.was_killed)
        self._num_kills += is_from_outside(*cause)
        return exit_code, explain_exit(*cause)

    def _make_claim_holder(self, process: WorkerProcess) -> ClaimHolder:
        def kill() -> None:
            self._killing = asyncio.ensure_future(process.kill())

        writer = WorkerWriter(f"worker-{self.number}-{secrets.token_hex(8)}")
        return ClaimHolder(writer, on_broken=kill)

    async def _watch(self, process: WorkerProcess) -> None:
        """Kills a process that gives no sign of life: it may be stopped, or hang, and its clients wait for it."""
        self._num_silent = 0
        pause_s = self._timeout_s / NUM_LOOKS
        while self._num_silent * pause_s < (self._timeout_s if self.ready.is_set() else START_TIMEOUT_S):
            await asyncio.sleep(pause_s)
            self._num_silent += 1
        silent_s = self._num_silent * pause_s
        _log.warning("data worker %d (process %d) was silent for %g s: killing it", self.number, process.pid, silent_s)
        await process.kill()

    def _on_report(self, report: worker_pb2.Report) -> None:
        self._num_silent = 0
        if report.HasField("span") and self._on_span is not None:
            self._on_span(self, report)
        if report.order == 0:
            if report.HasField("heartbeat"):
                return
            if report.HasField("done"):
                self.gpu, self.why_no_gpu = report.done.gpu, report.done.why_no_gpu
                if self.why_no_gpu:
                    _log.warning("data worker %d has no GPU: %s", self.number, self.why_no_gpu)
                self.known_specs.clear()  # of orders that were built before it could get them
                self._has_started = True
                self.ready.set()
            elif report.WhichOneof("body") is not None:
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
    """Has workers release a store whose files are deleted: the space is free when this returns.

    A worker that is silent for ``DROP_TIMEOUT_S`` releases it later; readers under way keep what they have mapped.
    """
    orders = [worker.submit(worker_pb2.Order(drop_store=worker_pb2.DropStore(uid=uid))) for worker in workers]
    for order in orders:
        order.add_done_callback(retrieve_exception)  # a worker that died has released everything
    if orders:
        await asyncio.wait(orders, timeout=DROP_TIMEOUT_S)
