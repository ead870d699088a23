"""The client's end of one session: its stream, its requests under way, its channel to the data worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tdserve.base.config import MAIL_INLINE_BYTES
from tdserve.base.errors import (
    ConnectError,
    LocalProtocolError,
    NotLocalError,
    PeerLostError,
    TDServeError,
    TransferAbortedError,
    TransportError,
)
from tdserve.client.content.gpu import NO_GPU, Gpu, check_channel
from tdserve.client.local.end import LocalEnd, open_local
from tdserve.client.local.root_files import FileAccess
from tdserve.client.relays.relay import SessionRelays
from tdserve.client.session.calls.call_traces import find_call_traces
from tdserve.client.session.calls.cancellation import get_cancellation
from tdserve.client.session.calls.observed_calls import ObservedCalls
from tdserve.client.session.channels.client_control_channel import ClientControlChannel
from tdserve.client.session.channels.content_channel import ContentChannel, ContentChannels
from tdserve.client.session.channels.group_inbox import GroupInbox
from tdserve.client.session.channels.hello import make_hello
from tdserve.client.session.channels.network_interface import find_content_address, make_channel_error
from tdserve.client.session.requests.abandoned_requests import AbandonedRequests, Brings
from tdserve.client.session.requests.client_mover import ClientMovers
from tdserve.client.session.requests.open_requests import OpenRequests
from tdserve.client.session.requests.pending import (
    OnAnnounced,
    OnAnswer,
    OnPermit,
    Pending,
    RequestStage,
    WaitOutcome,
)
from tdserve.client.session.requests.request_numbers import RequestNumbers
from tdserve.control.connection import ControlConnection, SessionStream
from tdserve.control.status import encode_failure
from tdserve.rules.channel_transports import BASE_TRANSPORT, CHANNEL_TRANSPORTS, is_local_allowed
from tdserve.structure.trees.tree import Spec
from tdserve.transport.channel import Channel
from tdserve.transport.gloo import CLIENT_RANK
from tdserve.transport.proving import make_session_credential
from tdserve.transport.rendezvous import CONNECT_TIMEOUT_S, KVStore
from tdserve.transport.session_channels import ChannelEnd, open_channel
from tdserve.v1 import control_pb2

LOSS_NOTICE_S = 1.0
"""Time within which a client notices the end of a server on its own machine."""

FLUSH_TIMEOUT_S = 1.0
"""Time for the server to receive what was sent before the end; it takes longer only if the server hardly runs."""

_log = logging.getLogger("tdserve.client")


class Session:
    """An open session. Threads: safe; requests of several threads run side by side.

    Args:
        connection: The channel to the control process.
        client_id: Names the client object, across its sessions.
        transport: Transport of the content.
        requests: Those that the client may still send again.
        timeout_s: For Hello and Welcome.
        access: How the client reaches the server's files.
        gpu: GPU of the client, for content by NCCL.
        observed_calls: Counts its calls; by default they are its own.
        why_one_port: As in ``make_hello``.

    Attributes:
        movers: Move its content; set by the code that opens the session.
        channel_transport: The transport of its content channel.
        device: The client's GPU, if content moves from GPU to GPU; "" over any other transport.
        why_not_channel: Why that is not the one asked for, or none between GPUs although a GPU was named; else "".
        channel_failure: Why the attempt to open its first channel failed.
        local: Its local end, if the client reads and writes the server's files itself.
        why_not_local: Why it has none, if the client asked for one; else "".
        requests: Numbers of its client's requests.
        contents: Its channels for content.
        groups: Receives the events of groups.
        relays: Passes versions on to other clients.
        known_specs: Structures that the server has received, the last one by fingerprint: others differ in the order of
            keys.

    Raises:
        ConnectError, UnauthenticatedError, ProtocolVersionError: No session could be opened.
    """

    movers: ClientMovers

    def __init__(
        self,
        connection: ControlConnection,
        *,
        client_id: bytes,
        transport: str,
        requests: RequestNumbers,
        timeout_s: float,
        access: FileAccess | None = None,
        gpu: Gpu = NO_GPU,
        observed_calls: ObservedCalls | None = None,
        why_one_port: str = "",
    ) -> None:
        self.device = self.why_not_channel = self.channel_failure = self.why_not_local = ""
        self.channel_transport = BASE_TRANSPORT
        self.local: LocalEnd | None = None
        self.groups = GroupInbox()
        self.address = connection.address
        self.known_specs: dict[bytes, Spec] = {}
        self.requests = requests
        self.observed_calls = observed_calls or ObservedCalls()
        self._abandoned = AbandonedRequests()
        greeting = Pending(on_silence=self.close_without_waiting)
        self._open_requests = OpenRequests(greeting)
        self.contents = ContentChannels(
            self._make_channel,
            self._send_rendezvous,
            peer=self._peer,
            on_unformed=self._end_unformed,
            make_error=self._make_channel_error,
        )
        self._control_channel: ClientControlChannel | None = None
        self.relays = SessionRelays(self.notify, self.find_interface)
        self._open_content = connection.open_content
        self._stream = connection.open_session(on_message=self._on_message, on_lost=self._on_lost)
        self._connection: SessionStream | LocalEnd = self._stream
        hello = make_hello(client_id, transport=transport, gpu=gpu.uuid, why_one_port=why_one_port)
        self._stream.send(control_pb2.ClientMessage(hello=hello, answered=requests.report_answered()))
        try:
            self.welcome = greeting.wait(timeout_s, "Hello").welcome
            channel = check_channel(self.welcome, gpu, transport=transport, address=self.address)
            self.channel_transport, self.why_not_channel = channel
            self.device = gpu.device if CHANNEL_TRANSPORTS[channel.transport].needs_device else ""
            if is_local_allowed(transport) and not self.device:
                self._open_local(transport, access or FileAccess())
        except BaseException:
            self.close()
            raise
        if self.local is not None or not CHANNEL_TRANSPORTS[self.channel_transport].has_mail:
            return
        credential = make_session_credential(self.welcome.secret, self.welcome.session, is_mail=True)
        control_channel = ClientControlChannel(
            self.find_interface, self._send_rendezvous, self._on_message, credential=credential, peer=self._peer
        )
        self._control_channel = control_channel
        control_channel.begin()
        if self.is_lost:  # perhaps before there was this channel to close
            control_channel.close()

    @property
    def is_lost(self) -> bool:
        """Whether this session is over; the next call opens another."""
        return self._open_requests.loss is not None

    @property
    def transport(self) -> str:
        """How content moves."""
        return self.movers.transport

    def send(
        self,
        request: int,
        *,
        on_answer: OnAnswer | None = None,
        on_permit: OnPermit | None = None,
        free: Callable[[], None] | None = None,
        content_channel: ContentChannel | None = None,
        on_announced: OnAnnounced | None = None,
        **body: Any,
    ) -> Pending:
        """Sends a request.

        Args:
            request: Its number.
            on_answer, on_permit, on_announced: As in Pending.
            free: Called when the server has finished the request.
            content_channel: The channel of data messages that the request announces, or waits for.
            **body: One field of ClientMessage.

        Raises:
            TransportError: The session is lost.
        """
        on_silence = partial(self._stop_waiting, request, body)
        pending = Pending(on_answer, on_silence=on_silence, on_permit=on_permit, on_announced=on_announced)
        pending.content_channel = content_channel
        pending.call, pending.begun_s = next(iter(body), ""), time.perf_counter()
        self._open_requests.add(request, pending, free)
        number, answered = content_channel.number if content_channel else None, self.requests.report_with(request)
        message = control_pb2.ClientMessage(request=request, answered=answered, channel=number, **body)
        if (traces := find_call_traces()) is not None:
            pending.traced_call = traces.trace_request(message, pending.call, self)
        try:
            pending.mail_number = 0 if self._control_channel is None else self._control_channel.send(message)
            if not pending.is_mailed:
                self._connection.send(message)
            self.requests.note_sent(request)
        except TransportError:
            if self._open_requests.withdraw(request, pending):
                raise
            # The session was lost during the send, and `pending` holds that error already: raised here too, it would
            # make the caller retry twice.
        if (cancellation := get_cancellation()) is not None:
            cancellation.follow(partial(self.cancel, request))
        return pending

    def notify(self, message: control_pb2.ClientMessage) -> None:
        """Sends a message that has no answer; it is lost if the session is."""
        with suppress(ConnectError):
            self._connection.send(message)

    def flush(self) -> None:
        """Waits until all messages have reached the server. No more can be sent: ``close`` must follow."""
        self._connection.flush(FLUSH_TIMEOUT_S)

    def end_request(self, request: int) -> None:
        """Ends a request that is answered, or whose answer does not matter any more: counts its call, ends its trace
        and forgets it.

        The server may still read what was spooled for a request without an answer: that stays until it has answered.
        """
        pending = self._open_requests.forget(request)
        if self._control_channel is not None and pending is not None:
            is_answered = pending.stage is not RequestStage.SENT
            self._control_channel.forget(request, answered=pending.mail_number if is_answered else 0)
        if pending is not None and pending.call:
            self.count_call(pending.call, pending.begun_s, pending.code)
            pending.end_trace()

    def count_call(self, call: str, begun_s: float, code: str = "") -> None:
        """Counts a call that ends now, and reports if that is due; arguments as in ``ObservedCalls.count``."""
        if self.observed_calls.count(call, begun_s, code):
            self.report_calls()

    def report_calls(self) -> bool:
        """Reports the calls that were counted since the last report; returns whether there were any."""
        if (report := self.observed_calls.take_report()) is not None:
            self.notify(control_pb2.ClientMessage(client_report=report))
        return report is not None

    def disown(self, request: int, *, is_sent: bool) -> None:
        """Abandons a request with an early return whose caller was interrupted: it is not retried.

        Args:
            is_sent: Whether some of its content may be under way and the rest does not follow: the session ends.
        """
        pending = self._open_requests.find(request)
        if pending is not None:
            pending.disown()
            if is_sent:
                self.close()
            self.end_request(request)

    def cancel(self, request: int) -> None:
        """Asks the server to cancel a waiting request; over the same channel, so as not to overtake it."""
        message = control_pb2.ClientMessage(cancel=control_pb2.CancelRequest(cancelled=request))
        pending = self._open_requests.find(request)
        way: Any = self._control_channel if pending is not None and pending.is_mailed else self._connection
        with suppress(TransportError):
            way.send(message)

    @property
    def is_turning(self) -> bool:
        """Same as ``ClientControlChannel.is_turning``."""
        return self._control_channel is not None and self._control_channel.is_turning

    @property
    def inline_bytes(self) -> int:
        """Largest content that a request carries itself."""
        limit: int = self.welcome.inline_bytes
        is_mail = self._control_channel is not None and self._control_channel.is_open
        return min(limit, MAIL_INLINE_BYTES) if is_mail else limit

    @property
    def _peer(self) -> str:
        return f"the server at {self.address}"

    def find_channel(self, pending: Pending, accepted: control_pb2.Accepted) -> ContentChannel:
        """Returns the channel that carries the content of an answer.

        Raises:
            TransferAbortedError: It was lost in the meantime.
        """
        pending.content_channel = self.contents.find(accepted.channel)
        return pending.content_channel

    def _end_unformed(self, error: ConnectError) -> TDServeError:
        self.channel_failure = str(error)
        reason = self._open_requests.loss or self._make_channel_error(str(error.fields["reason"]))
        self._on_lost(reason)  # first, so that waiting callers get the same error
        self.close()
        return reason

    def _make_channel_error(self, reason: str) -> ConnectError:
        return make_channel_error(reason, self.address, self.welcome.interface)

    def replace_channel(self, content_channel: ContentChannel, error: TDServeError) -> None:
        """Replaces a channel that is lost, or has content in it that is never received or sent.

        If that is not possible, the session ends. No buffer is read or written any more when this returns.
        """
        self._lose_channel(content_channel.number, str(error)[:500], waits=True)
        if content_channel.is_open:
            content_channel.lose(error)  # another thread may be doing the same, and is not finished

    def _lose_channel(self, number: int, reason: str, *, waits: bool = False) -> None:
        if number < self.contents.current.number:
            return
        if not CHANNEL_TRANSPORTS[self.channel_transport].is_reopened or self.contents.is_worn_out:
            self.close()
        elif self.contents.replace(number, reason, waits=waits):
            _log.debug("session %d: channel %d for content is lost: %s", self.welcome.session, number, reason)
            lost = control_pb2.ChannelLost(channel=number, reason=reason)
            with suppress(TransportError):
                self._stream.send(control_pb2.ClientMessage(channel_lost=lost))

    def end_overwrites(self) -> None:
        """Finishes what a local client overwrites at the moment, which would else be lost.

        See ``LocalEnd.end_overwrites``.
        """
        if self.local is not None and not self.is_lost:
            self.local.end_overwrites()

    @property
    def is_silent(self) -> bool:
        """Whether the server has owed this session an answer for long, which this client would have received."""
        return self._abandoned.is_silent and not (self.local is not None and self.local.is_copying)

    def _stop_waiting(self, request: int, body: dict[str, Any]) -> None:
        self._abandoned.add(request, body)
        pending = self._open_requests.find(request)
        late = None if pending is None else pending.take_late()  # between the end of the wait and this
        if isinstance(late, control_pb2.ServerMessage):
            self._handle_if_abandoned(late)
        self.cancel(request)

    def close(self) -> None:
        """Ends the session and everything under way in it; finishes overwrites of a local client first. Idempotent."""
        if not self.is_lost:
            self.report_calls()
        self.end_overwrites()
        self.close_without_waiting()

    def close_without_waiting(self) -> None:
        """Closes the session of a server that no longer answers: waits for nothing of it."""
        self._lose(ConnectError(address=self.address, reason="the session was closed by this client"))
        self._stream.close()

    def find_interface(self) -> str:
        """Returns the address of this machine at which others reach this client."""
        return find_content_address(self.address, self.welcome.interface)

    def _make_channel(self, number: int, kv_store: KVStore) -> Channel:
        timeout_s = CONNECT_TIMEOUT_S if number else self.contents.connect_timeout_s
        credential = make_session_credential(self.welcome.secret, self.welcome.session, channel_number=number)
        stream = partial(self._open_content, self.welcome.session, number, self.welcome.secret)
        ours = kv_store, CLIENT_RANK, self.find_interface(), credential, self._peer
        end = ChannelEnd(*ours, device=self.device, timeout_s=timeout_s, open_stream=stream)
        return open_channel(self.channel_transport, end)

    def _send_rendezvous(self, entry: control_pb2.Rendezvous) -> None:
        self._stream.send(control_pb2.ClientMessage(rendezvous=entry))

    def _on_message(self, message: control_pb2.ServerMessage) -> None:
        if self._handle_if_abandoned(message):
            return
        pending = self._open_requests.find(message.request)
        if message.HasField("rendezvous"):
            self._on_rendezvous(message.rendezvous)
        elif message.HasField("group_event"):
            self.groups.on_event(message.group_event)
        elif message.HasField("relay_order"):
            self.relays.on_order(message.relay_order)
        elif message.HasField("channel_lost"):
            self._lose_channel(message.channel_lost.channel, message.channel_lost.reason)
        elif pending is None:
            if not self._handle_if_abandoned(message) and message.accepted.uid:  # a permit that no call waits for
                self._answer_failure(message.request, TransferAbortedError(transfer=0, reason="the caller gave up"))
        elif pending.takes_permit and message.HasField("accepted"):
            self._write_in_place(message.request, pending, message.accepted)
        else:
            pending.put(message)
            if pending.outcome is WaitOutcome.GIVEN_UP:  # meanwhile
                self._handle_if_abandoned(message)
        self._open_requests.on_handled(message)

    def _handle_if_abandoned(self, message: control_pb2.ServerMessage) -> bool:
        """Handles a message if it answers an abandoned request; returns whether it does.

        A caller may give up while its answer is handled, so an answer that finds no caller is looked at once more.
        """
        brings = self._abandoned.look(message)
        if brings is Brings.PLACE:
            self.close_without_waiting()
        elif brings is Brings.CONTENT:
            self._lose_channel(message.accepted.channel, "the caller of its content has stopped waiting")
        return brings is not Brings.NOTHING

    def _on_rendezvous(self, entry: control_pb2.Rendezvous) -> None:
        if entry.hop:
            self.relays.feed(entry)
        elif not entry.is_mail:
            self.contents.feed(entry)
        elif self._control_channel is not None:
            self._control_channel.feed(entry)

    def _write_in_place(self, request: int, pending: Pending, accepted: control_pb2.Accepted) -> None:
        try:
            self.answer(request, pending.write_in_place(accepted))
        except LocalProtocolError as error:  # rows are half written, which the server concludes from the session's end
            pending.put(error)
            self._lose(ConnectError(address=self.address, reason="a write of this client ended in the middle"))
        except TDServeError as error:
            self._answer_failure(request, error)
        except Exception:  # noqa: BLE001 (outermost frame: it is unknown how much was written)
            _log.exception("content could not be written in place")
            self._lose(LocalProtocolError(reason="content could not be written in place; see the log"))

    def _answer_failure(self, request: int, error: TDServeError) -> None:
        self.answer(request, control_pb2.Written(failure=encode_failure(error)))

    def answer(self, request: int, written: control_pb2.Written) -> None:
        """Tells the server that the permitted work is done; if the socket is gone, the server notices by itself."""
        self.notify(control_pb2.ClientMessage(request=request, written=written))

    def _open_local(self, transport: str, access: FileAccess) -> None:
        try:
            self.local, self.why_not_local = open_local(
                self.welcome,
                transport=transport,
                access=access,
                address=self.address,
                on_message=self._on_message,
                on_lost=self._on_local_lost,
            )
        except NotLocalError:
            # A server that has ended since its welcome, or was restarted, leaves such files behind. Then this client
            # is fine, and the loss of the session will be noticed at once.
            if not self._open_requests.is_over.wait(LOSS_NOTICE_S):
                raise
        self._connection = self.local or self._stream
        if self._open_requests.loss is not None:  # which may be the reason
            raise self._open_requests.loss

    def _on_local_lost(self) -> None:
        self._on_lost(PeerLostError(peer=self._peer, reason="the local socket was closed"))
        self._stream.close()

    def _lose(self, error: TDServeError) -> None:
        self._on_lost(error)
        if self.local is not None:
            self.local.close()

    def _on_lost(self, error: TDServeError) -> None:
        if not self._open_requests.end(error):
            return
        self.groups.lose(error)
        self.contents.lose(error)
        if self._control_channel is not None:
            self._control_channel.close()
        self.relays.close()
