"""A data worker of a simulation: it carries out the orders of control by the functions of the real one, in this
process, each at a moment of its own. It dies when the simulation decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from tdserve.base.config import MAIL_INLINE_BYTES, VALUES_WORKER
from tdserve.base.errors import LocalProtocolError, PeerLostError, TDServeError
from tdserve.base.worker_arguments import WorkerArguments
from tdserve.control.status import decode_failure, encode_failure
from tdserve.data.mapped_stores import OpenStores
from tdserve.messages.row_numbers import decode_rows
from tdserve.rules.replay.allocation.shared_numbers import get_worker_place
from tdserve.server.processes.claim_holder import ClaimHolder
from tdserve.server.processes.claim_writers import WorkerWriter
from tdserve.server.processes.worker_processes import WorkerProcesses
from tdserve.server.processes.workers import DataWorker
from tdserve.transport.pool import BufferPool
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.worker.lane import WorkerContext
from tdserve.worker.operations import perform
from tdserve.worker.session_writes import SessionWrites
from tdserve.worker.small_reads import SmallReads
from tdserve.worker.worker_claims import WorkerClaims
from tests.simulation.virtual_time import WouldWaitError

RESTART_S = 0.2
"""Time from the death of a process to the next one."""


class NoProcesses(WorkerProcesses):
    """Starts nothing: the workers are in this process."""

    def start(self) -> None:
        """Does nothing."""

    async def stop(self) -> None:
        """Does nothing."""


class _InlineLane:
    """Stands for a lane whose content is part of the messages."""

    channel_number = 0
    may_send_at_once = False

    def __init__(self, session: int, context: WorkerContext) -> None:
        self.session = session
        self.context = context

    def report_prepared(self, order: worker_pb2.Order, values: bytes, *, values_nbytes: int = 0) -> None:
        raise LocalProtocolError(reason="content of a simulation is inline")


class _Process:
    """What one process of a worker knows."""

    def __init__(self, number: int, report: Callable[[worker_pb2.Report], None]) -> None:
        stores = OpenStores(writes_values=number == VALUES_WORKER)
        self.context = WorkerContext(
            stores=stores,
            worker_claims=WorkerClaims(stores, report),
            small_reads=SmallReads(stores, inline_bytes=MAIL_INLINE_BYTES, place=get_worker_place(number)),
            pool=BufferPool(),
            report=report,
            transfer_timeout_s=5.0,
        )
        self.writes: dict[int, SessionWrites] = {}
        self.pending: dict[int, asyncio.Future[worker_pb2.Worked]] = {}
        self.filling: dict[int, tuple[str, frozenset[int]]] = {}
        self.next_s: dict[int, float] = {}


class SimulatedWorker(DataWorker):
    """A data worker without a process.

    Attributes:
        choose_delay_s: Returns the time that a step takes.
        send_to_client: Sends a message of a session to its client by mail.
    """

    choose_delay_s: Callable[[], float]
    send_to_client: Callable[[int, bytes], None]

    def __init__(
        self,
        arguments: WorkerArguments,
        processes: WorkerProcesses,
        *,
        on_session: Callable[[worker_pb2.Report], None],
        on_lost: Callable[[DataWorker], None],
        **others: Any,
    ) -> None:
        super().__init__(arguments, processes, on_session=on_session, on_lost=on_lost, **others)
        self._to_control, self._on_death = on_session, on_lost
        self._process_now: _Process | None = None
        self._num_processes = 0
        self._last_number = 0
        self._next_report_s = 0.0

    def start(self) -> None:
        """Starts the process."""
        self._num_processes += 1
        process = _Process(self.number, lambda report: self._report(process, report))
        self._process_now = process
        writer = WorkerWriter(f"worker-{self.number}-{self._num_processes}")
        self.claim_holder = ClaimHolder(writer, on_broken=self.die)
        self.known_specs.clear()
        self.ready.set()

    async def stop(self) -> None:
        """Ends it."""
        self._process_now = None
        self.ready.clear()

    def die(self) -> None:
        """Ends the process in the midst of everything; another one starts a little later."""
        process, self._process_now = self._process_now, None
        if process is None:
            return
        self.ready.clear()
        self.num_restarts += 1
        for future in process.pending.values():
            if not future.done():
                future.set_exception(PeerLostError(peer="data worker", reason="it died"))
        self._on_death(self)
        self.claim_holder = None
        asyncio.get_running_loop().call_later(RESTART_S, self.start)

    def send(self, order: worker_pb2.Order) -> None:
        """Sends an order that has no answer."""
        if self._process_now is not None:
            self._queue(self._process_now, worker_pb2.Order.FromString(order.SerializeToString()), None)

    def submit(
        self,
        order: worker_pb2.Order,
        *,
        rest: bytes = b"",
        on_prepared: Callable[[worker_pb2.Prepared], None] | None = None,
    ) -> asyncio.Future[worker_pb2.Worked]:
        """Sends an order; its report becomes the result of the future."""
        future: asyncio.Future[worker_pb2.Worked] = asyncio.get_running_loop().create_future()
        process = self._process_now
        if process is None:
            future.set_exception(PeerLostError(peer="data worker", reason="it is being restarted"))
            return future
        self._last_number += 1
        order.order = self._last_number
        sent = worker_pb2.Order.FromString(order.SerializeToString() + rest)
        process.pending[sent.order] = future
        self._check_alone(process, sent)
        self._queue(process, sent, future)
        return future

    # ------------------------------------------------------------ orders

    def _check_alone(self, process: _Process, order: worker_pb2.Order) -> None:
        """Raises AssertionError if rows are to be filled that another order is filling."""
        if not order.HasField("receive_rows"):
            return
        uid, rows = order.receive_rows.store.uid, frozenset(decode_rows(order.receive_rows.rows).tolist())
        for others in process.filling.values():
            assert others[0] != uid or not others[1] & rows, f"two writers fill rows {sorted(others[1] & rows)}"
        process.filling[order.order] = uid, rows

    def _queue(
        self, process: _Process, order: worker_pb2.Order, future: asyncio.Future[worker_pb2.Worked] | None
    ) -> None:
        """Has an order carried out later: those of a session in their order."""
        self._learn_spec(process, order)
        loop, session = asyncio.get_running_loop(), order.session
        at_s = max(loop.time(), process.next_s.get(session, 0.0)) + self.choose_delay_s()
        process.next_s[session] = at_s
        loop.call_at(at_s, self._carry_out, process, order, future)

    def _learn_spec(self, process: _Process, order: worker_pb2.Order) -> None:
        body = getattr(order, order.WhichOneof("body") or "", None)
        ref = getattr(body, "store", None) or getattr(body, "version", None)
        if ref is not None and hasattr(ref, "HasField") and ref.HasField("spec"):
            process.context.stores.learn(ref.fingerprint, ref.spec)

    def _carry_out(
        self, process: _Process, order: worker_pb2.Order, future: asyncio.Future[worker_pb2.Worked] | None
    ) -> None:
        if process is not self._process_now:
            return
        report = worker_pb2.Report(order=order.order, session=order.session)
        try:
            report.done.CopyFrom(self._perform(process, order))
        except WouldWaitError:
            self._queue(process, order, future)
            return
        except TDServeError as error:
            report.failure.CopyFrom(encode_failure(error))
        if future is not None:
            self._later(process, lambda: self._settle(process, report, future))

    def _perform(self, process: _Process, order: worker_pb2.Order) -> worker_pb2.Worked:
        context, kind = process.context, order.WhichOneof("body")
        if kind == "drop_store":
            context.worker_claims.drop(order.drop_store.uid)
            context.stores.drop(order.drop_store.uid)
        elif kind == "forget_specs":
            context.stores.forget_specs()
        elif kind == "open_claim":
            context.worker_claims.open(order.open_claim)
        elif kind == "mail":
            self.send_to_client(order.session, order.mail)
        elif kind == "open_session":
            process.writes[order.session] = SessionWrites(
                order.open_session.client_id, context.worker_claims, context.observed
            )
        elif kind == "close_session":
            process.writes.pop(order.session, None)
        elif kind not in ("rendezvous", "close_channel", "checksum_version"):
            lane: Any = _InlineLane(order.session, context)
            return perform(lane, order)
        return worker_pb2.Worked()

    def _settle(self, process: _Process, report: worker_pb2.Report, future: asyncio.Future[worker_pb2.Worked]) -> None:
        process.pending.pop(report.order, None)
        process.filling.pop(report.order, None)
        if future.done():
            return
        if report.HasField("failure"):
            future.set_exception(decode_failure(report.failure))
        else:
            future.set_result(report.done)

    # ------------------------------------------------------------ mail and reports

    def take_mail(self, session: int, content: bytes) -> None:
        """Takes a message that a client has mailed."""
        process = self._process_now
        writes = None if process is None else process.writes.get(session)
        if process is None or writes is None:
            return
        lane: Any = _InlineLane(session, process.context)
        message = control_pb2.ClientMessage.FromString(content)
        is_for_worker = message.HasField("write") or message.extend.wished_claim > 0  # clients label these so
        to_client, to_control = writes.handle(content, lane) if is_for_worker else (b"", content)
        if to_control:
            self._report(process, worker_pb2.Report(session=session, mail=to_control))
        if to_client:
            self.send_to_client(session, to_client)

    def _report(self, process: _Process, report: worker_pb2.Report) -> None:
        self._later(process, lambda: self._to_control(report))

    def _later(self, process: _Process, deliver: Callable[[], None]) -> None:
        """Has control see something later; all reports in their order. What a dead process has not sent is lost."""
        loop = asyncio.get_running_loop()
        self._next_report_s = max(loop.time(), self._next_report_s) + self.choose_delay_s()

        def arrive() -> None:
            if process is self._process_now:
                deliver()

        loop.call_at(self._next_report_s, arrive, context=copy_context())
