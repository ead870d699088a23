"""A session's small messages at the client: once their channel is formed, requests and answers ride it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from tdserve.base.config import MAIL_BYTES
from tdserve.base.errors import ClosedError, TDServeError
from tdserve.transport.channel import Channel
from tdserve.transport.channel_opener import Forming
from tdserve.transport.control_channel import Mail
from tdserve.transport.gloo import CLIENT_RANK
from tdserve.transport.proving import Bond
from tdserve.transport.rendezvous import KVStore
from tdserve.transport.session_channels import ChannelEnd, open_channel
from tdserve.v1 import control_pb2

REAP_TIMEOUT_S = 30.0
"""For the server to take small messages that were sent long ago."""


class ClientControlChannel:
    """Forms a channel beside the first request, which need not wait for it.

    Where none can be formed, everything small goes on over gRPC.

    Args:
        make_host: Gives the address of the interface to connect from; may fail.
        publish: Sends an entry of the rendezvous.
        on_message: Called for every answer, in the mail's thread.
        bond: What both ends prove to know.
        peer: Name of the other end, for errors.
    """

    def __init__(
        self,
        make_host: Callable[[], str],
        publish: Callable[[control_pb2.Rendezvous], None],
        on_message: Callable[[control_pb2.ServerMessage], None],
        *,
        bond: Bond,
        peer: str,
    ) -> None:
        self._bond = bond
        self._make_host = make_host
        self._publish = publish
        self._on_message = on_message
        self._peer = peer
        self._lock = Lock()
        self._is_closed = False
        self._mail: Mail | None = None
        self._streamed: set[int] = set()  # extends that went another way, and are not answered
        self._early: set[int] = set()  # of them those for which there was no other way
        self._kv_store = KVStore(self._on_entry)
        self._forming: Forming | None = None

    def begin(self) -> None:
        """Begins to form the channel. Apart from making it: the server's answers come back through this very object."""
        self._forming = Forming(self._make, peer=self._peer, name="tdserve-open-mail", on_formed=self._begin_mail)

    @property
    def is_open(self) -> bool:
        """Whether requests ride here."""
        return self._mail is not None

    @property
    def is_turning(self) -> bool:
        """Whether extends will ride here as soon as those are answered that came before the channel."""
        return self._mail is not None and bool(self._early)

    def send(self, message: control_pb2.ClientMessage) -> bool:
        """Sends a message; False when it must go another way: too long, the channel is not formed, or it would overtake
        what went there.

        Raises:
            TransportError: The channel is lost.
        """
        mail, is_extend = self._mail, message.HasField("extend")
        if mail is None or message.ByteSize() > MAIL_BYTES or (is_extend and self._streamed):
            if is_extend:
                self._streamed.add(message.request)
            if is_extend and mail is None:
                self._early.add(message.request)
            return False
        if message.HasField("join_group"):  # behind the notice that it was left, which is no request
            return False
        mail.send(message.SerializeToString())
        mail.reap(REAP_TIMEOUT_S)
        return True

    def forget(self, request: int) -> None:
        """A request is answered."""
        self._streamed.discard(request)
        self._early.discard(request)

    def feed(self, entry: control_pb2.Rendezvous) -> None:
        """Takes an entry of the server's rendezvous."""
        self._kv_store.feed(entry.key, entry.value)

    def close(self) -> None:
        """Ends the channel and joins the threads, of which the caller may be none. Idempotent."""
        with self._lock:
            self._is_closed = True
            mail = self._mail
        self._kv_store.close()
        if self._forming is not None:
            self._forming.cancel(ClosedError(what=f"the session with {self._peer}"))
        if mail is not None:
            mail.join()

    def _make(self) -> Channel:
        return open_channel("gloo", ChannelEnd(self._kv_store, CLIENT_RANK, self._make_host(), self._bond, self._peer))

    def _begin_mail(self, channel: Channel) -> None:
        with self._lock:
            if not self._is_closed:
                name = "tdserve-session-mail"
                self._mail = Mail(channel, on_message=self._on_content, on_lost=_leave_to_stream, name=name)
                self._mail.begin()

    def _on_entry(self, key: str, value: bytes) -> None:
        self._publish(control_pb2.Rendezvous(key=key, value=value, is_mail=True))

    def _on_content(self, content: bytes) -> None:
        self._on_message(control_pb2.ServerMessage.FromString(content))


def _leave_to_stream(error: TDServeError) -> None:
    """The channel is gone: the server notices too and ends the session, behind the reason if there is one to tell."""
