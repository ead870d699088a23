"""One session of a data worker: its mail, and its lanes, one at a time, for its orders."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread

from google.protobuf.message import DecodeError

from tdserve.base.config import MAIL_READ, MAIL_WRITE
from tdserve.base.errors import (
    DeadlineExceededError,
    PermissionDeniedError,
    TDServeError,
    TransferAbortedError,
    TransportError,
)
from tdserve.control.status import encode_failure
from tdserve.rules.access.grants import NO_LIMITS, Grant, Limits
from tdserve.rules.access.roles import Role
from tdserve.transport.channel import Channel
from tdserve.transport.gloo import WORKER_RANK
from tdserve.transport.message_channel import MAX_SENT, REAP_TIMEOUT_S, MessageChannel
from tdserve.transport.proving import make_session_credential
from tdserve.transport.rendezvous import KVStore
from tdserve.transport.session_channels import ChannelEnd, open_channel
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.worker.descriptors import check_room
from tdserve.worker.lane import Lane, Perform, WorkerContext
from tdserve.worker.session_writes import Handled, SessionWrites
from tdserve.worker.spans import describe_mail


class Mailbox:
    """The mail of one session, over a channel of its own: messages never wait behind content.

    gloo's thread spins on a connection while another thread writes a long message to it (measured: a third of a core);
    a connection for mail has no long messages.

    Args:
        session: Its number.
        report: Sends a report to control; thread-safe.
        handle: Handles a message with this label, and returns what to send.
    """

    def __init__(
        self,
        session: int,
        report: Callable[[worker_pb2.Report], None],
        handle: Callable[[bytes, int], Handled],
    ) -> None:
        self._session = session
        self._report = report
        self._handle = handle
        self._kv_store = KVStore(self._publish)
        self._channel: Channel | None = None
        self._mail: MessageChannel | None = None
        self._is_closed = False

    def open(self, order: worker_pb2.Order) -> None:
        """Forms the channel, in a thread of its own."""
        Thread(target=self._open, args=(order,), name="tdserve-open-mail", daemon=True).start()

    def feed(self, entry: control_pb2.Rendezvous) -> None:
        """Takes an entry of the client's rendezvous."""
        self._kv_store.feed(entry.key, entry.value)

    def send(self, content: bytes) -> bool:
        """Sends a message of control at once; returns whether ``reap`` has to be called."""
        mail = self._mail
        if mail is None:
            return False
        try:
            mail.send(content)
        except TransportError as error:
            self._on_lost(error)
        return mail.num_sent >= 2 * MAX_SENT

    def reap(self, timeout_s: float) -> None:
        """Waits until the client has taken what was sent long ago; a client that takes nothing loses its session."""
        mail = self._mail
        if mail is not None:
            try:
                mail.reap(timeout_s)
            except (TransportError, DeadlineExceededError) as error:
                self._on_lost(error)

    def close(self) -> None:
        """Ends the channel and the thread that reads. Idempotent."""
        self._is_closed = True
        self._kv_store.close()
        channel = self._channel
        if channel is not None:
            channel.close()

    def _open(self, order: worker_pb2.Order) -> None:
        report = worker_pb2.Report(order=order.order, session=self._session)
        peer = f"the client of session {self._session}"
        try:
            opening = order.open_session
            check_room(1)
            credential = make_session_credential(opening.secret, self._session, is_mail=True)
            self._channel = open_channel(
                opening.transport, ChannelEnd(self._kv_store, WORKER_RANK, opening.host, credential, peer)
            )
            name = f"tdserve-mail-{self._session}"
            self._mail = MessageChannel(self._channel, on_message=self._on_message, on_lost=self._on_lost, name=name)
            self._mail.begin()
            report.done.SetInParent()
        except TDServeError as error:
            report.failure.CopyFrom(encode_failure(error))
        if self._is_closed:
            self.close()
        self._report(report)

    def _publish(self, key: str, value: bytes) -> None:
        report = worker_pb2.Report(session=self._session)
        report.rendezvous.key, report.rendezvous.value, report.rendezvous.is_mail = key, value, True
        self._report(report)

    def _on_message(self, content: bytes, label: int) -> None:
        to_client, to_control = self._handle(content, label)
        if to_control:
            self._report(worker_pb2.Report(session=self._session, mail=to_control))
        if to_client and self.send(to_client):
            self.reap(REAP_TIMEOUT_S)

    def _on_lost(self, error: TDServeError) -> None:
        if not self._is_closed:
            lost = worker_pb2.Report(session=self._session)
            lost.session_lost.reason = str(error)[:500]
            self._report(lost)


class WorkerSession:
    """Passes orders of a session to its mailbox or its lane. Session 0 has no client and serves orders about whole
    stores.

    Args:
        number: The session, as control names it.
        context: Shared with the other sessions.
        perform: Carries out one order; an error that it raises becomes the order's Failure.
        is_quick: Tells whether an order takes no longer than passing it to the lane's thread.

    Attributes:
        lane: The lane of the newest channel; a broken one is closed and replaced.
    """

    def __init__(
        self,
        number: int,
        context: WorkerContext,
        perform: Perform,
        is_quick: Callable[[Lane, worker_pb2.Order], bool],
    ) -> None:
        self.number = number
        self.context = context
        self._perform = perform
        self._is_quick = is_quick
        self._writes: SessionWrites | None = None
        self._is_traced = False
        self._grant: Grant | None = None
        self.mailbox = Mailbox(number, context.report, self._handle)
        self.lane = self._make_lane(0)

    def put(self, order: worker_pb2.Order) -> None:
        """Takes an order; called by the thread that reads the socket."""
        kind = order.WhichOneof("body")
        if kind == "mail":
            # At once, ahead of content: the client may need an answer before it takes content.
            self.send_mail(order.mail)
        elif kind == "open_session" and order.open_session.is_mail:
            self._writes = SessionWrites(
                order.open_session.client_id, self.context.worker_claims, self.context.observed
            )
            self._is_traced = order.open_session.is_traced
            self._grant = _read_grant(order.open_session)
            self.mailbox.open(order)
        elif kind == "rendezvous" and order.rendezvous.is_mail:
            self.mailbox.feed(order.rendezvous)
        else:
            self._put_in_lane(order, kind)

    def send_mail(self, content: bytes) -> None:
        """Sends the client a message; called by the thread that reads the socket."""
        if self.mailbox.send(content):
            self.lane.reap_soon()

    def _put_in_lane(self, order: worker_pb2.Order, kind: str | None) -> None:
        if order.channel > self.lane.channel_number:
            self._replace_lane(order.channel)
        lane = self.lane
        if order.channel < lane.channel_number:
            if order.order:
                lane.refuse(order, TransferAbortedError(transfer=order.tag, reason="its channel was replaced"))
        elif kind == "close_channel":
            self._replace_lane(order.channel + 1)
        elif kind == "open_session":
            lane.open(order)
        elif kind == "rendezvous":
            lane.feed(order.rendezvous)
        elif lane.is_idle and self._is_quick(lane, order):
            lane.carry_out(order)
            if lane.num_sent >= 2 * MAX_SENT:
                lane.reap_soon()
        else:
            lane.queue(order)

    def _replace_lane(self, channel_number: int) -> None:
        self.lane.close()
        self.lane = self._make_lane(channel_number)

    @property
    def is_busy(self) -> bool:
        """Whether there are orders that are not done."""
        return self.lane.is_busy

    def close(self) -> None:
        """Ends the session: its channels close, waiting orders fail."""
        self.lane.close()
        self.mailbox.close()

    def _make_lane(self, channel_number: int) -> Lane:
        return Lane(self.number, channel_number, self.context, self._perform, reap_mail=self.mailbox.reap)

    def _handle(self, mail: bytes, label: int) -> Handled:
        """Handles a message of the client; called by the thread that reads mail."""
        if not self._is_traced:
            return self._answer(mail, label)
        begun_ns = time.time_ns()
        handled = self._answer(mail, label)
        if handled.to_client or not handled.to_control:
            span = describe_mail(mail, handled.to_client, begun_ns)
            if span is not None:
                self.context.report(worker_pb2.Report(session=self.number, span=span))
        return handled

    def _answer(self, mail: bytes, label: int) -> Handled:
        lane = self.lane
        if self._grant is not None and not _is_granted(mail, self._grant):
            return Handled(to_control=mail)
        if label == MAIL_WRITE and self._writes is not None:
            return self._writes.handle(mail, lane)
        answer = None
        if label == MAIL_READ:
            send = lane.send_at_once if lane.may_send_at_once else None
            answer = self.context.small_reads.answer(
                mail, send, channel_number=lane.channel_number, session=self.number
            )
        return Handled(to_control=mail) if answer is None else Handled(answer)


def _read_grant(opening: worker_pb2.OpenSession) -> Grant | None:
    """Returns what limits the requests that the worker answers by itself; None if nothing does."""
    if not opening.HasField("grant"):
        return None
    granted = opening.grant
    limits = Limits(requests=1) if granted.is_counted else NO_LIMITS
    return Grant("", Role(granted.role), tuple(granted.stores), limits)


def _is_granted(mail: bytes, grant: Grant) -> bool:
    """Returns whether the worker may look at a message of the client; otherwise control does."""
    if grant.is_counted:
        return False
    try:
        message = control_pb2.ClientMessage.FromString(mail)
        kind = message.WhichOneof("body") or ""
        grant.check(kind, getattr(message, kind, None))
    except (DecodeError, PermissionDeniedError):
        return False
    return True
