"""One session of a data worker: a thread that performs the session's orders in turn, over the session's own channel."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Lock, Thread

from tdserve.control.status import encode_failure
from tdserve.data.opened import OpenStores
from tdserve.errors import (
    DeadlineExceededError,
    LocalProtocolError,
    PeerLostError,
    TDServeError,
    TransferAbortedError,
    TransportError,
)
from tdserve.layout import Message
from tdserve.transport.channel import Channel, Work
from tdserve.transport.ends import Source
from tdserve.transport.gloo import CONNECT_TIMEOUT_S, WORKER_RANK, KVStore
from tdserve.transport.mail import MAX_SENT
from tdserve.transport.nccl import open_channel
from tdserve.transport.pool import BufferPool
from tdserve.transport.stream import start_send
from tdserve.v1 import worker_pb2
from tdserve.worker.mailbox import Mailbox
from tdserve.worker.small_reads import SmallReads

_log = logging.getLogger("tdserve.worker")


@dataclass(frozen=True)
class Surroundings:
    """What all sessions of a worker share.

    Attributes:
        stores: Mapped stores.
        small_reads: Answers what needs no decision.
        pool: Staging buffers.
        report: Sends a report to control; thread-safe.
        transfer_timeout_s: Seconds without a message after which a transfer is given up, and its channel closed.
        device: The worker's GPU, such as ``"cuda:0"``; "" without one.
        has_clients: Whether any session has one, who would wait behind what the reading thread does.
        values_lock: Held by the thread that stores non-tensor values.
    """

    stores: OpenStores
    small_reads: SmallReads
    pool: BufferPool
    report: Callable[[worker_pb2.Report], None]
    transfer_timeout_s: float
    device: str = ""
    has_clients: Callable[[], bool] = lambda: True
    values_lock: Lock = field(default_factory=Lock)


class WorkerSession:
    """The thread of one session. Session 0 has no client: it does what concerns stores as a whole.

    Args:
        number: The session, as control names it.
        surroundings: Shared with the other sessions.
        perform: Carries out one order; what it raises becomes the order's Failure.
        is_quick: Whether an order takes no longer than to hand it to the session's thread.
    """

    def __init__(
        self,
        number: int,
        surroundings: Surroundings,
        perform: Callable[[WorkerSession, worker_pb2.Order], worker_pb2.Worked],
        is_quick: Callable[[WorkerSession, worker_pb2.Order], bool],
    ) -> None:
        self.number = number
        self.surroundings = surroundings
        self._perform = perform
        self._is_quick = is_quick
        self._num_queued = 0  # written by the reading thread alone,
        self._num_done = 0  # and this by the session's
        self._sent: deque[Work] = deque()
        self._orders: SimpleQueue[worker_pb2.Order | None] = SimpleQueue()
        self._kv_store: KVStore | None = None
        self._channel: Channel | None = None
        self._mailbox = Mailbox(number, surroundings.report, self._answer)
        self._opened = Event()
        self._is_closed = False
        self._thread = Thread(target=self._run, name=f"tdserve-session-{number}", daemon=True)
        self._thread.start()

    def put(self, order: worker_pb2.Order) -> None:
        """Queues an order; called by the thread that reads the socket."""
        kind = order.WhichOneof("body")
        if kind == "mail":
            # At once, in front of what moves: an answer may be what the client waits for to take content.
            if self._mailbox.send(order.mail):
                self._queue(order)
        elif kind == "open_session":
            if order.open_session.is_mail:
                self._mailbox.open(order)
            else:
                self._start_opening(order)
        elif kind == "rendezvous":
            if order.rendezvous.is_mail:
                self._mailbox.feed(order.rendezvous)
            elif self._kv_store is not None:
                self._kv_store.feed(order.rendezvous.key, order.rendezvous.value)
        elif self._is_idle and self._is_quick(self, order):
            self._carry_out(order)
            if len(self._sent) >= 2 * MAX_SENT:
                self._queue(worker_pb2.Order(mail=b""))
        else:
            self._queue(order)

    @property
    def _is_idle(self) -> bool:
        """Whether an order that comes now need not wait."""
        return self._num_queued == self._num_done and (self._channel is not None or self.number == 0)

    @property
    def is_busy(self) -> bool:
        """Whether there are orders that were not carried out."""
        return self._num_queued != self._num_done

    def keep(self, works: Iterable[Work]) -> None:
        """Keeps sends that nobody waits for now: one that is dropped is given up."""
        self._sent.extend(works)

    def _answer(self, mail: bytes) -> bytes | None:
        """As of ``SmallReads.answer``; called by the thread that reads mail."""
        may_send = self._is_idle and self.channel.transport == "gloo"
        return self.surroundings.small_reads.answer(mail, self._send_at_once if may_send else None)

    def _send_at_once(self, tag: int, messages: Sequence[Message], source: Source) -> None:
        self.keep(start_send(self.channel, tag, messages, source, self.surroundings.pool))
        if len(self._sent) >= 2 * MAX_SENT:
            self._reap()

    def _queue(self, order: worker_pb2.Order) -> None:
        self._num_queued += 1
        self._orders.put(order)

    def close(self) -> None:
        """Ends the session: its channel goes, orders in its queue fail, the thread ends after the current one."""
        self._is_closed = True
        self._close_channel()
        self._opened.set()  # whoever waits for one that does not form has waited long enough
        self._mailbox.close()
        self._orders.put(None)

    @property
    def channel(self) -> Channel:
        """The channel; waits while it is being connected.

        Raises:
            PeerLostError: There is none: not connected in time, lost, or closed.
        """
        if self._channel is None and not self._is_closed:
            self._opened.wait(CONNECT_TIMEOUT_S)
        channel = self._channel
        if channel is None:
            raise PeerLostError(peer=f"the client of session {self.number}", reason="its channel is not open")
        return channel

    def prepared(self, order: worker_pb2.Order, values: bytes, *, values_nbytes: int = 0) -> None:
        """Tells control that a read's values are these, or so many bytes behind its tensors, which come next."""
        report = worker_pb2.Report(order=order.order, session=self.number)
        report.prepared.values, report.prepared.values_nbytes = values, values_nbytes
        order.is_accepted = True  # from here on the client waits for bytes: a failure must close the channel
        self.surroundings.report(report)

    def _publish(self, key: str, value: bytes) -> None:
        report = worker_pb2.Report(session=self.number)
        report.rendezvous.key, report.rendezvous.value = key, value
        self.surroundings.report(report)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            if not order.HasField("mail"):
                self._carry_out(order)
            self._reap()
            self._num_done += 1

    def _carry_out(self, order: worker_pb2.Order) -> None:
        report = worker_pb2.Report(order=order.order, session=self.number)
        try:
            report.done.CopyFrom(self._perform(self, order))
        except TDServeError as error:
            self._fail(order, report, error)
        except Exception as fault:  # noqa: BLE001 (the boundary of an order)
            _log.exception("order %s failed", order.WhichOneof("body"))
            self._fail(order, report, LocalProtocolError(reason=f"{type(fault).__name__}: {fault}"[:500]))
        else:
            self.surroundings.report(report)

    def _reap(self) -> None:
        """Waits for what was sent long ago; here, where a client that takes nothing stops nobody else."""
        timeout_s = self.surroundings.transfer_timeout_s
        self._mailbox.reap(timeout_s)
        try:
            while len(self._sent) > MAX_SENT:
                self._sent.popleft().wait(timeout_s)
        except IndexError:  # another thread waits for the last of them
            pass
        except (TransportError, DeadlineExceededError) as error:
            self._lose(error)

    def _fail(self, order: worker_pb2.Order, report: worker_pb2.Report, error: TDServeError) -> None:
        """Reports a failure. The channel goes first: after the report control gives the rows to somebody else."""
        told = error
        if isinstance(error, DeadlineExceededError):  # ours, not the caller's, who may well have time for a retry
            told = TransferAbortedError(transfer=order.tag, reason=str(error))
        report.failure.CopyFrom(encode_failure(told))
        is_lost = order.is_accepted or isinstance(error, (TransportError, DeadlineExceededError))
        if is_lost:
            self._is_closed = True
            self._close_channel()
        self.surroundings.report(report)
        if is_lost:
            self._lose(error)

    def _lose(self, error: TDServeError) -> None:
        lost = worker_pb2.Report(session=self.number)
        lost.session_lost.reason = str(error)[:500]
        self.surroundings.report(lost)

    def _start_opening(self, order: worker_pb2.Order) -> None:
        """In a thread of its own: orders that came before it, and do not need the channel, go on."""
        self._kv_store = KVStore(self._publish)
        Thread(target=self._open, args=(order, self._kv_store), name="tdserve-open-channel", daemon=True).start()

    def _open(self, order: worker_pb2.Order, kv_store: KVStore) -> None:
        report = worker_pb2.Report(order=order.order, session=self.number)
        peer = f"the client of session {self.number}"
        try:
            device = self.surroundings.device if order.open_session.transport == "nccl" else ""
            self._channel = open_channel(kv_store, WORKER_RANK, host=order.open_session.host, device=device, peer=peer)
            report.done.SetInParent()
        except TDServeError as error:
            report.failure.CopyFrom(encode_failure(error))
        self._opened.set()
        if self._is_closed:
            self._close_channel()
        self.surroundings.report(report)

    def _close_channel(self) -> None:
        if self._kv_store is not None:
            self._kv_store.close()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
