"""The client's end of one session: its stream, its requests under way, its channel to the data worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from threading import Lock
from typing import Any

from tdserve.client.content_channel import ContentChannel
from tdserve.client.given_up import GivenUp
from tdserve.client.gpu import NO_GPU, Gpu, agreed
from tdserve.client.greeting import hello
from tdserve.client.group_inbox import GroupInbox
from tdserve.client.interfaces import address_towards, unformed
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.opening import open_local
from tdserve.client.mailbox import Mailbox
from tdserve.client.pending import OnAnswer, OnGranted, Pending
from tdserve.client.relays.relay import Relays
from tdserve.config import MAIL_INLINE_BYTES
from tdserve.control.connection import ControlConnection
from tdserve.control.status import encode_failure
from tdserve.errors import (
    ConnectError,
    DeadlineExceededError,
    LocalProtocolError,
    PeerLostError,
    TDServeError,
    TransferAbortedError,
    TransportError,
)
from tdserve.spec.tree import Spec
from tdserve.transport.channel import Channel, Work
from tdserve.transport.gloo import CLIENT_RANK, CONNECT_TIMEOUT_S, KVStore
from tdserve.transport.nccl import open_channel
from tdserve.v1 import control_pb2

ANSWER_GRACE_S = 1.0
"""The server ends a wait at its deadline by itself; its answer gets this long to arrive before we give up."""

FLUSH_TIMEOUT_S = 1.0
"""For the server to take what was sent before the end; it takes longer only where it hardly runs."""

_log = logging.getLogger("tdserve.client")


class Session:
    """An open session. Threads: safe; requests of several threads run side by side.

    Args:
        connection: The channel to the control process.
        client_id: Names the client object, across its sessions.
        transport: Of the content.
        oldest_request: Requests before it will not be retried.
        timeout_s: For Hello and Welcome.
        root: Where this process sees the server's root folder, if elsewhere than the server does.
        gpu: Of the client, for content by NCCL.

    Attributes:
        device: The client's GPU, where content goes from GPU to GPU; "" over any other transport.
        why_not_nccl: Why it does not, although a GPU was named.
        nccl_failure: What became of the attempt, where it failed.
        local: Its other end, where the client reads and writes the server's files by itself.
        why_not_local: Why it does not, for messages.
        groups: Where events of groups arrive.
        relays: What it does for other clients.
        told_specs: Those that the server was told of, the last by fingerprint: others differ in the order of keys.
        connect_timeout_s: For whoever uses the channel first: its call may take no longer than it was told.

    Raises:
        ConnectError, UnauthenticatedError, ProtocolVersionError: There is no session.
    """

    def __init__(
        self,
        connection: ControlConnection,
        *,
        client_id: bytes,
        transport: str,
        oldest_request: int,
        timeout_s: float,
        root: str | None = None,
        gpu: Gpu = NO_GPU,
    ) -> None:
        self.device = self.why_not_nccl = self.nccl_failure = ""
        self.local: LocalEnd | None = None
        self.why_not_local = ""
        self.groups = GroupInbox()
        self.address = connection.address
        self.told_specs: dict[bytes, Spec] = {}
        self.connect_timeout_s = CONNECT_TIMEOUT_S
        self._lock = Lock()
        self._given_up = GivenUp()
        greeting = Pending(on_silence=self._give_up)
        self._pending: dict[int, Pending] = {0: greeting}
        self._lost: TDServeError | None = None
        self._content = ContentChannel(self._make_channel, peer=self._peer, on_unformed=self._end_unformed)
        self._mailbox: Mailbox | None = None
        self._kept: dict[int, list[Work]] = {}
        self._spooled: dict[int, tuple[int, int]] = {}
        self._kv_store = KVStore(lambda key, value: self._send_rendezvous(control_pb2.Rendezvous(key=key, value=value)))
        self.relays = Relays(self.notify, self.interface)
        self._stream = connection.open_session(on_message=self._on_message, on_lost=self._on_lost)
        said = hello(client_id, transport=transport, oldest_request=oldest_request, gpu=gpu.uuid)
        self._stream.send(control_pb2.ClientMessage(hello=said))
        try:
            self.welcome = greeting.wait(timeout_s, "Hello").welcome
            self.device, self.why_not_nccl = agreed(self.welcome, gpu, transport=transport, address=self.address)
            if transport in ("auto", "shm") and not self.device:
                self._open_local(transport, root)
        except BaseException:
            self.close()
            raise
        if self.local is not None:
            return
        mailbox = Mailbox(self.interface, self._send_rendezvous, self._on_message, peer=self._peer)
        with self._lock:
            self._mailbox = mailbox
        mailbox.begin()
        if self._lost is not None:
            mailbox.close()

    @property
    def is_lost(self) -> bool:
        """Whether this session is over; the next call opens another."""
        return self._lost is not None

    @property
    def transport(self) -> str:
        """How content moves."""
        if self.local is not None:
            return "shm"
        return "nccl" if self.device else "gloo"

    def send(
        self,
        request: int,
        *,
        on_answer: OnAnswer | None = None,
        place: OnGranted | None = None,
        spooled: tuple[int, int] | None = None,
        **body: Any,
    ) -> Pending:
        """Sends a request.

        Args:
            request: Its number.
            on_answer, place: As in Pending.
            spooled: Where its values lie, until it is forgotten.
            **body: One field of ClientMessage.

        Raises:
            TransportError: The session is lost.
        """
        pending = Pending(on_answer, on_silence=lambda: self._stop_waiting(request, body), place=place)
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._pending[request] = pending
            if spooled is not None:
                self._spooled[request] = spooled
        message = control_pb2.ClientMessage(request=request, **body)
        if self.local is not None:
            self.local.send(message)
            return pending
        pending.is_mailed = self._mailbox is not None and self._mailbox.send(message)
        if not pending.is_mailed:
            self._stream.send(message)
        return pending

    def notify(self, message: control_pb2.ClientMessage) -> None:
        """Sends a message that has no answer; lost when the session is."""
        if self.local is not None:
            with suppress(ConnectError):
                self.local.send(message)
        else:
            self._stream.send(message)

    def flush(self) -> None:
        """What was told the server arrives, and nothing can be told it any more: ``close`` must follow."""
        (self.local or self._stream).flush(FLUSH_TIMEOUT_S)

    def keep(self, request: int, works: Iterable[Work]) -> None:
        """Keeps sends of a refused request: one that is dropped is given up, and the peer would wait for it."""
        with self._lock:
            self._kept[request] = list(works)

    def let_go_before(self, request: int) -> None:
        """This request's content was taken, and with it all that was sent before."""
        if self._kept:
            with self._lock:
                self._kept = {kept: works for kept, works in self._kept.items() if kept > request}

    def forget(self, request: int) -> None:
        """The request is answered, or its answer does not matter any more."""
        with self._lock:
            self._pending.pop(request, None)
            spooled = self._spooled.pop(request, None) if self._spooled else None
        if self._mailbox is not None:
            self._mailbox.forget(request)
        if spooled is not None and self.local is not None:
            self.local.free(spooled)

    def cancel(self, request: int) -> None:
        """Asks the server to give a waiting request up; the same way as the request, which it must not overtake."""
        message = control_pb2.ClientMessage(cancel=control_pb2.CancelRequest(cancelled=request))
        pending = self._pending.get(request)
        way: Any = self.local or (self._mailbox if pending is not None and pending.is_mailed else self._stream)
        with suppress(TransportError):
            way.send(message)

    @property
    def is_turning(self) -> bool:
        """As of ``Mailbox.is_turning``."""
        return self._mailbox is not None and self._mailbox.is_turning

    @property
    def inline_bytes(self) -> int:
        """Content up to this size rides in a request."""
        limit: int = self.welcome.inline_bytes
        is_mail = self._mailbox is not None and self._mailbox.is_open
        return min(limit, MAIL_INLINE_BYTES) if is_mail else limit

    @property
    def _peer(self) -> str:
        return f"the server at {self.address}"

    @property
    def has_channel(self) -> bool:
        """Whether the channel is open."""
        return self._content.is_open

    @property
    def channel(self) -> Channel:
        """The channel to the data worker, connected by the first that needs it.

        Raises:
            ConnectError: It cannot be connected; the session is closed.
        """
        return self._content.get(self.connect_timeout_s)

    def await_channel(self, timeout_s: float) -> None:
        """Waits for the channel.

        Raises:
            ConnectError: Not in time, and it may be there for the next call; or never, and the session is closed.
        """
        try:
            self._content.expect(timeout_s)
        except DeadlineExceededError as error:
            raise unformed(str(error), self.address, self.welcome.interface) from error

    def _end_unformed(self, error: ConnectError) -> TDServeError:
        if self.device:
            self.nccl_failure = str(error)
        told = self._lost or unformed(str(error.fields["reason"]), self.address, self.welcome.interface)
        self._on_lost(told)  # first: whoever waits for an answer is told the same
        self.close()
        return told

    def failure_of(self, pending: Pending, error: TDServeError) -> TDServeError:
        """The true reason of a broken transfer: a Failure that the server sends along, else the transport's error.

        Closes the session: content of this transfer may still be under way, and nobody takes it any more.
        """
        told = error
        if not pending.has_failed and not isinstance(error, DeadlineExceededError):
            try:
                pending.wait(ANSWER_GRACE_S, "the transfer")
            except TDServeError as failure:
                told = failure if pending.has_failed else error
        self.close()
        return told

    def end_overwrites(self) -> None:
        """Before the end: what a local client overwrites just now would be lost. See ``LocalEnd.end_overwrites``."""
        if self.local is not None and self._lost is None:
            self.local.end_overwrites()

    @property
    def is_silent(self) -> bool:
        """Whether the server has owed this session an answer for long."""
        return self._given_up.is_silent

    def _stop_waiting(self, request: int, body: dict[str, Any]) -> None:
        self._given_up.add(request, body)
        self.cancel(request)

    def close(self) -> None:
        """Ends the session and everything under way in it, but overwrites of a local client end first. Idempotent."""
        self.end_overwrites()
        self._give_up()

    def _give_up(self) -> None:
        """As ``close``, when the server does not answer any more: waits for nothing."""
        self._lose(ConnectError(address=self.address, reason="the session was closed by this client"))
        self._stream.close()

    def interface(self) -> str:
        """The address of this machine on which others reach this client."""
        return address_towards(self.address, self.welcome.interface)

    def _make_channel(self) -> Channel:
        more = {"host": self.interface(), "device": self.device, "peer": self._peer}
        return open_channel(self._kv_store, CLIENT_RANK, timeout_s=self.connect_timeout_s, **more)

    def _send_rendezvous(self, entry: control_pb2.Rendezvous) -> None:
        self._stream.send(control_pb2.ClientMessage(rendezvous=entry))

    def _on_message(self, message: control_pb2.ServerMessage) -> None:
        if self._given_up.ends_session(message, is_local=self.local is not None):
            self._give_up()
            return
        if message.HasField("rendezvous"):
            entry = message.rendezvous
            if entry.link:
                self.relays.feed(entry)
            elif not entry.is_mail:
                self._kv_store.feed(entry.key, entry.value)
            elif self._mailbox is not None:
                self._mailbox.feed(entry)
            return
        if message.HasField("group_event"):
            self.groups.on_event(message.group_event)
            return
        if message.HasField("relay_order"):
            self.relays.on_order(message.relay_order)
            return
        pending = self._pending.get(message.request)
        if pending is not None and pending.is_write and message.HasField("accepted"):
            self._write_in_place(message.request, pending, message.accepted)
        elif pending is not None:
            pending.put(message)
        elif message.HasField("accepted") and self.local is not None:  # nobody waits for this request any more
            self._tell(message.request, TransferAbortedError(transfer=0, reason="the caller gave up"))

    def _write_in_place(self, request: int, pending: Pending, accepted: control_pb2.Accepted) -> None:
        try:
            written = pending.grant(accepted)
        except TDServeError as error:
            self._tell(request, error)
        except Exception:  # noqa: BLE001 (the outermost frame: what was written of it, nobody knows)
            _log.exception("content could not be written in place")
            self._lose(LocalProtocolError(reason="content could not be written in place; the log says why"))
        else:
            self.answer(request, written)

    def _tell(self, request: int, error: TDServeError) -> None:
        self.answer(request, control_pb2.Written(failure=encode_failure(error)))

    def answer(self, request: int, written: control_pb2.Written) -> None:
        """Tells the server that what it has let this client do is done; it learns by itself when the socket is gone."""
        if self.local is not None:
            with suppress(ConnectError):
                self.local.send(control_pb2.ClientMessage(request=request, written=written))

    def _open_local(self, transport: str, root: str | None) -> None:
        self.local, self.why_not_local = open_local(
            self.welcome,
            transport=transport,
            root=root,
            address=self.address,
            on_message=self._on_message,
            on_lost=self._on_local_lost,
        )
        if self._lost is not None:  # meanwhile, which may be why there is none
            raise self._lost

    def _on_local_lost(self) -> None:
        self._on_lost(PeerLostError(peer=self._peer, reason="the local socket was closed"))
        self._stream.close()

    def _lose(self, error: TDServeError) -> None:
        self._on_lost(error)
        if self.local is not None:
            self.local.close()

    def _on_lost(self, error: TDServeError) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
            waiting, self._pending = list(self._pending.values()), {}
            mailbox = self._mailbox
        for pending in waiting:
            pending.put(error)
        self._kv_store.close()
        self.groups.lose(error)
        self._content.lose(error)
        if mailbox is not None:
            mailbox.close()
        self.relays.close()
