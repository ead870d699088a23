"""One channel of a session at its data worker, and the thread that carries out the session's orders on it in turn."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, RLock, Thread

import torch

from tdserve.base.config import DEFAULT_MEMORY_LIMIT_BYTES
from tdserve.base.errors import (
    DeadlineExceededError,
    LocalProtocolError,
    PeerLostError,
    TDServeError,
    TransferAbortedError,
    TransportError,
)
from tdserve.control.status import encode_failure, get_code
from tdserve.data.mapped_stores import OpenStores
from tdserve.data.values_budget import READ_SHARE, ValuesBudget
from tdserve.messages.layout import Message
from tdserve.rules.channel_transports import CHANNEL_TRANSPORTS
from tdserve.transport.byte_streams import ByteStream
from tdserve.transport.channel import Channel, PerMessage, Work
from tdserve.transport.gloo import WORKER_RANK
from tdserve.transport.message_channel import MAX_SENT
from tdserve.transport.pool import BufferPool
from tdserve.transport.proving import make_session_credential
from tdserve.transport.rendezvous import CONNECT_TIMEOUT_S, KVStore
from tdserve.transport.session_channels import ChannelEnd, open_channel
from tdserve.transport.sources_sinks import Source
from tdserve.transport.stream import start_send
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.worker.descriptors import check_room
from tdserve.worker.observed_work import ObservedWork
from tdserve.worker.small_reads import SmallReads
from tdserve.worker.spans import note_order
from tdserve.worker.worker_claims import WorkerClaims

REAPED_AT_ONCE = MAX_SENT // 2
"""Sends that are waited for together: a wait costs a thread switch."""

COUNTED_BYTES = 128 * 1024
"""Every 128 KiB that the client has not taken count as one more pending send."""

_REAP = worker_pb2.Order()
"""Queued in place of an order: only waits for the end of earlier sends."""

_log = logging.getLogger("tdserve.worker")


@dataclass(frozen=True)
class WorkerContext:
    """The objects that all sessions of a worker share.

    Attributes:
        stores: Mapped stores.
        small_reads: Answers requests that need no decision.
        worker_claims: Writes rows that this worker has claimed.
        pool: Staging buffers.
        report: Sends a report to control; thread-safe.
        transfer_timeout_s: Seconds without a message after which a transfer is given up and its channel closed.
        device: The worker's GPU, such as ``"cuda:0"``; "" without one.
        take_stream: Returns the byte stream of a session's channel that control relays.
        has_clients: Whether any session has a client, which would wait behind work of the reading thread.
        send_mail: Sends the client of a session a message; returns whether it did so. Only the reading thread may.
        values_lock: Held by the thread that stores non-tensor values.
        values_budget: Limits the values that are read and not sent yet.
        observed: Counts what the worker does, by its time.
    """

    stores: OpenStores
    small_reads: SmallReads
    worker_claims: WorkerClaims
    pool: BufferPool
    report: Callable[[worker_pb2.Report], None]
    transfer_timeout_s: float
    device: str = ""
    take_stream: Callable[[int, int], ByteStream] | None = None
    has_clients: Callable[[], bool] = lambda: True
    send_mail: Callable[[int, bytes], bool] = lambda session, content: False
    values_lock: Lock = field(default_factory=Lock)
    values_budget: ValuesBudget = field(default_factory=partial(ValuesBudget, DEFAULT_MEMORY_LIMIT_BYTES // READ_SHARE))
    observed: ObservedWork = field(default_factory=ObservedWork)


class Lane:
    """A channel for content, the orders that use it, and their thread. It closes when its channel breaks or its session
    ends; another lane then starts afresh.

    Args:
        session: Number of its session.
        channel_number: Number of its channel in the session.
        context: Shared with the other sessions.
        perform: Carries out one order; an error that it raises becomes the order's Failure.
        reap_mail: Waits until the client has taken mail that was sent long ago.
    """

    def __init__(
        self,
        session: int,
        channel_number: int,
        context: WorkerContext,
        perform: Perform,
        *,
        reap_mail: Callable[[float], None],
    ) -> None:
        self.session = session
        self.channel_number = channel_number
        self.context = context
        self._perform = perform
        self._reap_mail = reap_mail
        self._num_queued = 0  # written only by the reading thread
        self._num_done = 0  # written only by the lane's thread
        self._sent: deque[tuple[Work, int]] = deque()  # with its bytes
        self._nbytes_sent = 0  # of these; counted, since adding them up takes as long as posting a send
        self._counting = Lock()
        self._orders: SimpleQueue[worker_pb2.Order | None] = SimpleQueue()
        self._kv_store: KVStore | None = None
        self._channel: Channel | None = None
        self._moves_at_once = False
        self._opened = Event()
        self._opened_s: float | None = None
        self._used_s = 0.0
        self._why_unopened = f"it was not formed within {CONNECT_TIMEOUT_S:g} s"
        self._closing = RLock()
        self._is_closed = False
        self._thread = Thread(target=self._run, name=f"tdserve-session-{session}", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether a new order need not wait."""
        return not self.is_busy and (self._channel is not None or self.session == 0)

    @property
    def may_send_at_once(self) -> bool:
        """Whether another thread may send content now without waiting. The lane may close at any moment."""
        return self._moves_at_once and self.is_idle and self._channel is not None

    @property
    def is_busy(self) -> bool:
        """Whether there are orders that are not done."""
        return self._num_queued != self._num_done

    @property
    def num_sent(self) -> int:
        """Number of sends whose end is not awaited yet; a large one counts as several: its client may take none."""
        return len(self._sent) + self._nbytes_sent // COUNTED_BYTES

    def keep(self, works: Sequence[Work], nbytes: int) -> None:
        """Keeps sends, of this many bytes in all, that are not awaited now: a send that is dropped is cancelled."""
        each_nbytes = nbytes // len(works)
        with self._counting:
            self._sent.extend((work, each_nbytes) for work in works)
            self._nbytes_sent += each_nbytes * len(works)

    def send_at_once(self, tag: int, messages: Sequence[Message], source: Source) -> None:
        """Sends without waiting for the client; called by the thread that reads mail."""
        nbytes = sum(message.nbytes for message in messages)
        self.keep(start_send(self.channel, tag, messages, source, self.context.pool), nbytes)
        if self.num_sent >= 2 * MAX_SENT:
            self._reap()

    def receive_at_once(self, tag: int, message_nbytes: Sequence[int]) -> torch.Tensor:
        """Receives messages that the client is sending now, one behind the other; called by the thread that reads mail.

        Raises:
            TransportError, DeadlineExceededError: They did not come.
        """
        channel, content = self.channel, self.context.pool.take(sum(message_nbytes))
        works, at = [], 0
        for nbytes in message_nbytes:
            works.append(channel.recv(content[at : at + nbytes], tag))
            at += nbytes
        channel.wait_all(works, self.context.transfer_timeout_s)
        return content

    def fail(self, error: TDServeError) -> None:
        """Closes the channel after a failure of a transfer, and reports that."""
        self._close_channel()
        self._lose(error)

    def queue(self, order: worker_pb2.Order) -> None:
        """Queues an order for the lane's thread; called by the thread that reads the socket."""
        self._num_queued += 1
        self._orders.put(order)

    def reap_soon(self) -> None:
        """Has the lane's thread wait for sends of long ago, after the orders before; called as ``queue`` is."""
        self.queue(_REAP)

    def close(self) -> None:
        """Ends the lane: its channel closes, queued orders fail, and the thread ends after the current one."""
        self._is_closed = True
        self._close_channel()
        self._opened.set()  # ends the wait of a thread for the channel
        self._orders.put(None)

    @property
    def channel(self) -> Channel:
        """Returns the channel; waits while it is being formed.

        Raises:
            PeerLostError: There is none: not formed, or not in time, lost, or closed.
        """
        if self._channel is None and not self._is_closed:
            self._opened.wait(CONNECT_TIMEOUT_S)
        channel = self._channel
        if channel is None:
            why = "it is closed" if self._is_closed or self._opened_s is not None else self._why_unopened
            raise PeerLostError(peer=f"the client of session {self.session}", reason=f"its channel is not open: {why}")
        return channel

    def report_prepared(self, order: worker_pb2.Order, values: bytes, *, values_nbytes: int = 0) -> None:
        """Reports the values of a read to control, or their size if they follow its tensors on the channel."""
        report = worker_pb2.Report(order=order.order, session=self.session)
        report.prepared.values, report.prepared.values_nbytes = values, values_nbytes
        order.is_accepted = True  # from here on the client waits for bytes: a failure must close the channel
        self.context.report(report)

    def open(self, order: worker_pb2.Order) -> None:
        """Forms the channel, in a thread of its own: earlier orders that do not need it continue."""
        self._kv_store = KVStore(self._publish)
        Thread(target=self._open, args=(order, self._kv_store), name="tdserve-open-channel", daemon=True).start()

    def feed(self, entry: control_pb2.Rendezvous) -> None:
        """Takes an entry of the client's rendezvous."""
        if self._kv_store is not None:
            self._kv_store.feed(entry.key, entry.value)

    def carry_out(self, order: worker_pb2.Order) -> None:
        """Carries out an order now, and reports the result."""
        report = worker_pb2.Report(order=order.order, session=self.session)
        begun_ns = time.time_ns() if order.HasField("trace") else 0
        begun_s = time.perf_counter()
        try:
            report.done.CopyFrom(self._perform(self, order))
        except TDServeError as error:
            self._fail(order, report, error)
        except Exception as fault:  # noqa: BLE001 (the boundary of an order)
            _log.exception("order %s failed", order.WhichOneof("body"))
            self._fail(order, report, LocalProtocolError(reason=f"{type(fault).__name__}: {fault}"[:500]))
        if begun_ns:
            note_order(order, report, begun_ns)
        code = get_code(report.failure) if report.HasField("failure") else ""
        self.context.observed.count(order.WhichOneof("body") or "", begun_s, code)
        self.context.report(report)
        self._used_s = time.monotonic()

    def refuse(self, order: worker_pb2.Order, error: TDServeError) -> None:
        """Reports that an order was not started."""
        failure = encode_failure(error)
        self.context.report(worker_pb2.Report(order=order.order, session=self.session, failure=failure))

    def _publish(self, key: str, value: bytes) -> None:
        report = worker_pb2.Report(session=self.session)
        report.rendezvous.key, report.rendezvous.value = key, value
        report.rendezvous.channel = self.channel_number
        self.context.report(report)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            if order is not _REAP:
                self.carry_out(order)
            self._reap()
            self._num_done += 1

    def _reap(self) -> None:
        """Waits for the end of earlier sends; in this thread a client that takes nothing blocks no other."""
        timeout_s = self.context.transfer_timeout_s
        self._reap_mail(timeout_s)
        if self.num_sent <= MAX_SENT:
            return
        with self._counting:
            oldest = [self._sent.popleft() for _ in range(min(REAPED_AT_ONCE, len(self._sent)))]
            self._nbytes_sent -= sum(nbytes for _, nbytes in oldest)
        try:
            self.channel.wait_all([work for work, _ in oldest], PerMessage(timeout_s))
        except (TransportError, DeadlineExceededError) as error:
            self.fail(error)

    def _fail(self, order: worker_pb2.Order, report: worker_pb2.Report, error: TDServeError) -> None:
        """Makes the report of a failure. The channel closes first, since control reuses the rows after the report. Then
        control learns that it is closed: a client that retries after the failure must not use it."""
        reported = error
        if isinstance(error, (TransportError, DeadlineExceededError)):  # the request is valid: the caller may retry
            reported = TransferAbortedError(transfer=order.tag, reason=str(error))
        if order.is_accepted or reported is not error:
            self.fail(error)
        report.failure.CopyFrom(encode_failure(reported))

    def _lose(self, error: TDServeError) -> None:
        if not self._is_closed:
            self._is_closed = True
            lost = worker_pb2.Report(session=self.session)
            lost.channel_lost.channel = self.channel_number
            lost.channel_lost.reason = f"{str(error)[:500]} ({self._describe_age()})"
            self.context.report(lost)

    def _describe_age(self) -> str:
        if self._opened_s is None:
            return "it had never been open"
        now_s = time.monotonic()
        unused_s = now_s - max(self._used_s, self._opened_s)
        return f"it had been open for {now_s - self._opened_s:.1f} s, and no order had ended for {unused_s:.1f} s"

    def _open(self, order: worker_pb2.Order, kv_store: KVStore) -> None:
        report = worker_pb2.Report(order=order.order, session=self.session)
        peer = f"the client of session {self.session}"
        try:
            opening = order.open_session
            check_room(1)
            transport = CHANNEL_TRANSPORTS[opening.transport]
            device = self.context.device if transport.needs_device else ""
            credential = make_session_credential(opening.secret, self.session, channel_number=self.channel_number)
            take = self.context.take_stream
            open_stream = None if take is None else partial(take, self.session, self.channel_number)
            end = ChannelEnd(
                kv_store, WORKER_RANK, opening.host, credential, peer, device=device, open_stream=open_stream
            )
            self._moves_at_once = transport.moves_at_once
            self._channel = open_channel(opening.transport, end)
            self._opened_s = time.monotonic()
            report.done.SetInParent()
        except TDServeError as error:
            self._why_unopened = str(error)[:500]
            report.failure.CopyFrom(encode_failure(error))
        self._opened.set()
        if self._is_closed:
            self._close_channel()
        self.context.report(report)

    def _close_channel(self) -> None:
        """Closes the channel; after this no buffer of it is read or written, even if another thread is closing it
        too."""
        if self._kv_store is not None:
            self._kv_store.close()
        with self._closing:
            channel, self._channel = self._channel, None
            if channel is not None:
                channel.close()


Perform = Callable[[Lane, worker_pb2.Order], worker_pb2.Worked]
