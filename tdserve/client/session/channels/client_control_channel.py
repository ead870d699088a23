"""The client's end of the control channel, which carries requests and answers once it is open."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from threading import Lock
from typing import NamedTuple

from tdserve.base.config import MAIL_BYTES, MAIL_READ, MAIL_WRITE
from tdserve.base.errors import ClosedError, TDServeError
from tdserve.rules.channel_transports import BASE_TRANSPORT
from tdserve.transport.channel import Channel
from tdserve.transport.channel_forming import Forming
from tdserve.transport.gloo import CLIENT_RANK
from tdserve.transport.message_channel import MAX_SENT, REAP_TIMEOUT_S, MessageChannel
from tdserve.transport.proving import ChannelCredential
from tdserve.transport.rendezvous import KVStore
from tdserve.transport.session_channels import ChannelEnd, open_channel
from tdserve.v1 import control_pb2

MAX_UNRECEIVED = 4096
"""Messages that a server may leave unreceived, 16 MiB, before senders wait for it: one that hangs must not hold
calls beyond their deadlines."""


class _Route(Enum):
    """The way of an extend to control."""

    EARLY = "gRPC, before the channel was open"
    STREAM = "gRPC"
    CONTROL = "mail that the worker passes on"
    WORKER = "mail that the worker may answer"


_LABELS = {_Route.CONTROL: 0, _Route.WORKER: MAIL_WRITE}
"""Labels of mail: the worker looks only into what it may answer by itself."""


class _SentExtend(NamedTuple):
    store: str
    route: _Route


class ClientControlChannel:
    """A channel for small messages. It opens beside the first request, which does not wait for it.

    If it cannot be opened, small messages continue over gRPC.

    Args:
        make_host: Returns the address of the interface to connect from; may fail.
        publish: Sends an entry of the rendezvous.
        on_message: Called for every answer, in the channel's thread.
        credential: Secret that both ends prove to have.
        peer: Name of the other end, for errors.
    """

    def __init__(
        self,
        make_host: Callable[[], str],
        publish: Callable[[control_pb2.Rendezvous], None],
        on_message: Callable[[control_pb2.ServerMessage], None],
        *,
        credential: ChannelCredential,
        peer: str,
    ) -> None:
        self._credential = credential
        self._make_host = make_host
        self._publish = publish
        self._on_message = on_message
        self._peer = peer
        self._lock = Lock()
        self._is_closed = False
        self._mail: MessageChannel | None = None
        self._num_received = 0  # by the server, as far as its answers show
        self._extends: dict[int, _SentExtend] = {}  # those that are not answered yet, by request
        self._kv_store = KVStore(self._on_entry)
        self._forming: Forming | None = None

    def begin(self) -> None:
        """Starts to open the channel.

        Not part of construction, since the server's answers arrive through this object.
        """
        self._forming = Forming(self._make, peer=self._peer, name="tdserve-open-mail", on_formed=self._begin_mail)

    @property
    def is_open(self) -> bool:
        """Whether requests are sent here."""
        return self._mail is not None

    @property
    def is_turning(self) -> bool:
        """Whether extends will be sent here as soon as those from before the channel are answered."""
        return self._mail is not None and any(each.route is _Route.EARLY for each in list(self._extends.values()))

    def send(self, message: control_pb2.ClientMessage) -> int:
        """Sends a message and returns its number, or returns 0.

        0: it must go over gRPC, because it is too long, the channel is not open, or it would overtake an earlier
            message.

        Raises:
            TransportError: The channel is lost.
        """
        mail, label = self._mail, _LABELS[_Route.CONTROL]
        # Control answers what is asked about stores while a worker hangs.
        is_mail = mail is not None and message.ByteSize() <= MAIL_BYTES and not message.HasField("catalog")
        if message.HasField("extend"):
            route = self._choose_route(message, is_mail=is_mail)
            self._extends[message.request] = _SentExtend(message.extend.store, route)
            is_mail, label = route in _LABELS, _LABELS.get(route, 0)
        elif message.write.content.message_nbytes:
            label = MAIL_WRITE
        elif _is_for_worker(message):
            label = MAIL_READ
        if mail is None or not is_mail:
            return 0
        if message.HasField("join_group"):  # must not overtake the notice of leaving, which is no request
            return 0
        number = mail.send(message.SerializeToString(), label)
        num_kept = number - self._num_received + MAX_SENT  # some more: others may have been numbered meanwhile
        mail.reap(REAP_TIMEOUT_S, keep=min(num_kept, MAX_UNRECEIVED))
        return number

    def _choose_route(self, message: control_pb2.ClientMessage, *, is_mail: bool) -> _Route:
        """Returns the route of an extend, which must not overtake another on a faster route."""
        if self._mail is None:
            return _Route.EARLY
        others = list(self._extends.items())
        if not is_mail or any(sent.route in (_Route.EARLY, _Route.STREAM) for _, sent in others):
            return _Route.STREAM
        before = [(request, sent.route) for request, sent in others if sent.store == message.extend.store]
        if not message.extend.wished_claim or any(route is _Route.CONTROL for _, route in before):
            return _Route.CONTROL
        if before:
            message.extend.follows = min(request for request, _ in before)
        return _Route.WORKER

    def forget(self, request: int, *, answered: int = 0) -> None:
        """Forgets a request.

        Args:
            answered: Number of its message if the server has answered it, and so has received all messages before it.
        """
        self._extends.pop(request, None)
        self._num_received = max(self._num_received, answered)

    def feed(self, entry: control_pb2.Rendezvous) -> None:
        """Receives an entry of the server's rendezvous."""
        self._kv_store.feed(entry.key, entry.value)

    def close(self) -> None:
        """Closes the channel and joins its threads; must not be called in one of them. Idempotent."""
        with self._lock:
            self._is_closed = True
            mail = self._mail
        self._kv_store.close()
        if self._forming is not None:
            self._forming.cancel(ClosedError(what=f"the session with {self._peer}"))
        if mail is not None:
            mail.join()

    def _make(self) -> Channel:
        end = ChannelEnd(self._kv_store, CLIENT_RANK, self._make_host(), self._credential, self._peer)
        return open_channel(BASE_TRANSPORT, end)

    def _begin_mail(self, channel: Channel) -> None:
        with self._lock:
            if not self._is_closed:
                name = "tdserve-session-mail"
                self._mail = MessageChannel(channel, on_message=self._on_content, on_lost=_leave_to_stream, name=name)
                self._mail.begin()

    def _on_entry(self, key: str, value: bytes) -> None:
        self._publish(control_pb2.Rendezvous(key=key, value=value, is_mail=True))

    def _on_content(self, content: bytes, _: int) -> None:
        self._on_message(control_pb2.ServerMessage.FromString(content))


def _is_for_worker(message: control_pb2.ClientMessage) -> bool:
    """Returns whether a request is a read that the worker may answer by itself."""
    if message.HasField("get"):
        return not message.get.asks_versions
    return message.HasField("read") or message.sample.is_plain


def _leave_to_stream(error: TDServeError) -> None:
    """Ignores the loss of the channel.

    The server notices it too and ends the session, with the reason if it has one.
    """
