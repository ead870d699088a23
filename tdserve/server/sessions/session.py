"""One client's session as the control process holds it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from tdserve.base.addresses import address_towards
from tdserve.base.config import MAIL_BYTES, MAIL_INLINE_BYTES
from tdserve.base.deadline import Deadline
from tdserve.base.errors import ConnectError, LocalProtocolError, PeerLostError, TDServeError, TransferAbortedError
from tdserve.base.ids import new_secret
from tdserve.control.servicer import SessionLink
from tdserve.control.status import encode_failure
from tdserve.rules.channel_transports import CHANNEL_TRANSPORTS
from tdserve.rules.tags import tag_of
from tdserve.server import inline_tasks
from tdserve.server.sessions.local_client import Invitation, LocalClient
from tdserve.server.sessions.mover import Mover
from tdserve.server.waiting import Waiters, hear
from tdserve.server.workers import DataWorker
from tdserve.structure.tree import Spec
from tdserve.v1 import control_pb2, worker_pb2

NUM_PAIRS = 2
"""Of a session with its worker, each with a descriptor there: for content, and for mail."""

_log = logging.getLogger("tdserve.server")
_State = TypeVar("_State")

MAX_ENTRIES = 1_000
"""Of the rendezvous of one session: two groups take about ten."""

MAX_ENTRY_BYTES = 1 << 16
"""Of a key or a value of them: they take some hundreds."""

MAX_CHANNELS = 100_000
"""Of one session, one after the other. A client that is well gives one up when a call ends in the middle of content."""

MAX_REFUSING = 8_000
"""Refusals that are on their way to one client."""


class ClientSession:
    """A session: its stream, its worker, and the requests under way.

    Args:
        number: Unique in this run of the server.
        hello: What the client said of itself.
        link: Its stream.
        make_mover: Makes the mover of a session that is open otherwise.
        worker: The data worker that moves its bytes.
        interface: Address on which that worker waits for it.
        inline_bytes: Content up to this size rides in messages of the stream.
        invitation: What a client on this machine was told.
        channel_transport: By which its content moves over a channel.

    Attributes:
        link: Where the client is told what it asked for; of one on this machine another from when it is attached.
        mover: What moves its content; of a client on this machine another from when it is attached.
        requests: Those under way.
        cancelled_requests: Those under way that are to be given up when they wait; nobody has what they lease.
        mailed_requests: Those under way that came over the channel: their answers go the same way, where they fit.
        last_epoch: Number of the last epoch of a group that it was in. The next one has a higher number, whatever its
            group: what comes late of one that is over must not be taken for the next one's.
        channel_number: Of its newest channel for content; those before are gone.
        held_nbytes: Of its requests under way.
        secret: What both ends of its gloo groups prove to know.
        told_specs: Structures of versions that the client has told, each in its last order of keys, by fingerprint.
    """

    def __init__(
        self,
        number: int,
        hello: control_pb2.Hello,
        link: SessionLink | LocalClient,
        *,
        make_mover: Callable[[ClientSession], Mover],
        worker: DataWorker,
        interface: str,
        inline_bytes: int,
        invitation: Invitation | None = None,
        channel_transport: str = "gloo",
    ) -> None:
        self.channel_transport = channel_transport
        self.invitation = invitation
        self._losing: asyncio.Task[None] | None = None
        self.number = number
        self.hello = hello
        self.link = link
        self.worker = worker
        self.requests: set[int] = set()
        self.ended = asyncio.Event()
        self.accepted_requests: set[int] = set()
        self.mailed_requests: set[int] = set()
        self.cancelled_requests: set[int] = set()
        self.channel_number = 0
        self._channel_of: dict[int, int] = {}
        self.last_epoch = 0
        self.held_nbytes = 0
        self._num_refusing = 0
        self._num_entries = 0
        self._has_refused = asyncio.Event()
        self.secret = new_secret()
        self.told_specs: dict[bytes, Spec] = {}
        self._inline_bytes = inline_bytes
        self._interface = interface
        self._is_opened: set[bool] = set()
        self._ends: dict[int, asyncio.Event] = {}
        self._tasks: dict[asyncio.Task[Any], int] = {}
        self._waiting: set[asyncio.Task[Any]] = set()
        self.mover = make_mover(self)

    @property
    def client_id(self) -> bytes:
        """The client behind this session, the same across its reconnects."""
        return self.hello.client_id

    @property
    def transport(self) -> str:
        """How content moves."""
        return self.mover.transport

    @property
    def num_promised_descriptors(self) -> int:
        """How many descriptors of its worker it may still come to need."""
        return 0 if self.ended.is_set() else max(self.mover.num_channels - len(self._is_opened), 0)

    def attach(self, local: LocalClient, mover: Mover) -> None:
        """The client has shown that it is on this machine: from now on it moves its content by itself."""
        self.link, self.mover = local, mover
        self._losing = asyncio.create_task(self._lose_at_end(local), name=f"tdserve-session-{self.number}-end")

    async def _lose_at_end(self, local: LocalClient) -> None:
        await self.ended.wait()
        local.lose()

    def run(self, serving: Coroutine[Any, Any, None], request: int) -> None:
        """Serves a request in a task of its own; 0 for what is no request."""
        self._keep(asyncio.create_task(serving, name=self._task_name(request)), request)

    def run_at_once(self, serving: Coroutine[Any, Any, None], request: int) -> None:
        """As ``run``, but begins before it returns. To be called outside a task."""
        inline_tasks.start(serving, name=self._task_name(request), keep=partial(self._keep, request=request))

    def begin(self, request: int) -> None:
        """A request begins that is not under way."""
        self.requests.add(request)

    async def end_of(self, request: int) -> None:
        """Waits until a request that is under way has ended."""
        await inline_tasks.in_task()
        with self.waiting():
            while request in self.requests:
                await self._ends.setdefault(request, asyncio.Event()).wait()

    def bind(self, request: int, channel_number: int) -> None:
        """A request that begins has content under way on this channel, or waits for some there. If that has gone
        meanwhile, it will not get as far as to use it."""
        self._channel_of[request] = channel_number
        self._hear_of(channel_number)

    def _hear_of(self, channel_number: int) -> None:
        """The client has this channel: those before it are gone, of which other news may have been overtaken."""
        if channel_number > self.channel_number:
            self.lose_channel(channel_number - 1)

    def lose_channel(self, number: int) -> bool:
        """A channel is gone for one of its ends, and all before it: what is under way there fails.

        Returns:
            Whether that is news, and another takes its place. Where none can, the session ends.
        """
        if number < self.channel_number or self.ended.is_set() or not self.mover.num_channels:
            return False
        if not CHANNEL_TRANSPORTS[self.channel_transport].is_reopened or number >= MAX_CHANNELS:
            self.ended.set()
            return False
        self.channel_number = number + 1
        self._is_opened.discard(False)
        self._num_entries = 0
        order = worker_pb2.Order(session=self.number, channel=number)
        order.close_channel.SetInParent()
        self.worker.send(order)
        lost = {request for request, bound in self._channel_of.items() if bound <= number}
        for task in [task for task in self._waiting if self._tasks.get(task) in lost]:
            task.cancel()
        return True

    def end(self, request: int) -> None:
        """A request ends, however it was answered."""
        self._channel_of.pop(request, None)
        self.accepted_requests.discard(request)
        self.mailed_requests.discard(request)
        self.cancelled_requests.discard(request)
        self.requests.remove(request)
        if request in self._ends:
            self._ends.pop(request).set()

    def cancel(self, request: int) -> bool:
        """Gives up a request that waits; one that already moves content goes on to its end.

        Returns:
            Whether it is under way.
        """
        # One that is done is forgotten a turn of the loop later, and nobody looks any more for what cancels it.
        tasks = [task for task, number in self._tasks.items() if number == request and not task.done()]
        waiting = [task for task in tasks if task in self._waiting]
        for task in waiting:
            task.cancel()
        is_under_way = bool(tasks) or request in self.requests
        if is_under_way and not waiting:  # it may be just about to begin, or to wait
            self.cancelled_requests.add(request)
        return is_under_way

    async def wait(
        self,
        waiters: Waiters,
        look: Callable[[], _State | None],
        deadline: Deadline,
        what: Callable[[], str],
        *,
        line: Hashable = None,
        give_back: Callable[[_State], None] | None = None,
    ) -> _State:
        """Waits for a state, as ``Waiters.wait_for`` does, unless it is there already."""
        state = waiters.at_once(look, line)
        if state is not None:
            return state
        await inline_tasks.in_task()
        with self.waiting():
            return await waiters.wait_for(look, deadline, what, line=line, give_back=give_back)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block that a cancellation or the end of the session cuts short: nothing was begun yet."""
        task = asyncio.current_task()
        if task is None:
            raise LocalProtocolError(reason="waiting() outside a task")
        request = self._tasks.get(task, 0)
        is_lost = self._channel_of.get(request, self.channel_number) != self.channel_number
        if self.ended.is_set() or request in self.cancelled_requests or is_lost:
            raise asyncio.CancelledError
        self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)

    def order(self, request: int = 0, *, is_accepted: bool = False) -> worker_pb2.Order:
        """An empty order for this session's worker, with the request's number as tag.

        With ``is_accepted`` the worker deals with what the client has on the channel, whatever becomes of the order.

        Raises:
            PeerLostError: The session has ended, and its worker forgets it: an order now would begin it anew there.
            TransferAbortedError: The channel on which the request has begun is gone.
        """
        if self.ended.is_set():
            raise PeerLostError(peer=f"the client of session {self.number}", reason="its session has ended")
        number = self._channel_of.setdefault(request, self.channel_number) if request else self.channel_number
        if number != self.channel_number:
            reason = f"channel {number} of session {self.number} was lost, another takes its place"
            raise TransferAbortedError(transfer=request, reason=reason)
        if is_accepted:
            self.accepted_requests.add(request)
        return worker_pb2.Order(
            session=self.number, tag=tag_of(request), is_accepted=is_accepted, channel=self.channel_number
        )

    def rendezvous(self, entry: control_pb2.Rendezvous) -> None:
        """Hands an entry of the client to the worker; the first one of a channel opens it there."""
        if self.ended.is_set():
            return
        self._num_entries += 1
        if self._num_entries > MAX_ENTRIES or len(entry.key) > MAX_ENTRY_BYTES or len(entry.value) > MAX_ENTRY_BYTES:
            self.ended.set()  # the worker keeps them all
            return
        if not entry.is_mail:
            self._hear_of(entry.channel)
            if entry.channel != self.channel_number:
                return
        if entry.is_mail not in self._is_opened:
            self._is_opened.add(entry.is_mail)
            opening = self.order()
            opening.open_session.is_mail = entry.is_mail
            opening.open_session.transport = "gloo" if entry.is_mail else self.channel_transport
            opening.open_session.host = self._interface
            opening.open_session.secret = self.secret
            self.worker.order(opening).add_done_callback(hear)
        order = self.order()
        order.rendezvous.CopyFrom(entry)
        self.worker.send(order)

    def discard(self, request: int, content: control_pb2.Content, *, channel_number: int | None = None) -> None:
        """Has the worker take in and forget what the client already sends for a refused request.

        Args:
            channel_number: Where it comes, of a request that has not begun.
        """
        if channel_number is None:
            channel_number = self._channel_of.get(request, self.channel_number)
            self.accepted_requests.add(request)  # once is enough, whatever becomes of its answer
        self._hear_of(channel_number)
        if content.message_nbytes and channel_number == self.channel_number and not self.ended.is_set():
            order = self.order()
            order.tag = tag_of(request)
            order.discard.message_nbytes.extend(content.message_nbytes)
            self.worker.order(order).add_done_callback(hear)

    def send_void(self, request: int, message_nbytes: Sequence[int]) -> None:
        """Has the worker send what the client of a refused read already waits for, marked as failed."""
        if self.ended.is_set() or self._channel_of.get(request, self.channel_number) != self.channel_number:
            return  # together with its channel
        order = self.order(request, is_accepted=True)
        order.send_void.message_nbytes.extend(message_nbytes)
        self.worker.order(order).add_done_callback(hear)

    def inline_limit(self, request: int) -> int:
        """Bytes of content that may ride in the answer to a request."""
        return min(self._inline_bytes, MAIL_INLINE_BYTES) if request in self.mailed_requests else self._inline_bytes

    async def send_accepted(self, request: int, accepted: control_pb2.Accepted) -> None:
        """Answers: content follows over the channel."""
        accepted.channel = self._channel_of.get(request, self.channel_number)
        await self._answer(control_pb2.ServerMessage(request=request, accepted=accepted))

    async def send_done(self, request: int, done: control_pb2.Done) -> None:
        """Answers: done."""
        await self._answer(control_pb2.ServerMessage(request=request, done=done))

    def tell(self, message: control_pb2.ServerMessage) -> None:
        """Sends a message that nothing waits for; those of one session arrive in order."""
        self.run(self.link.send(message), 0)

    async def fail(self, request: int, error: TDServeError) -> None:
        """Answers: refused or failed. Never over the channel, which may be what failed."""
        await self.link.send(control_pb2.ServerMessage(request=request, failure=encode_failure(error)))

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """A block that tells the client that a request is not even begun. Such requests are held by nobody else: a
        client that has too many of them and does not read what it is told is sent away."""
        self._num_refusing += 1
        if self._num_refusing > MAX_REFUSING:
            self.ended.set()
        try:
            yield
        finally:
            self._num_refusing -= 1
            self._has_refused.set()

    async def catch_up(self) -> None:
        """Waits while more refusals are on their way to the client than may be when it sends its next request."""
        while self._num_refusing > MAX_REFUSING // 2 and not self.ended.is_set():
            self._has_refused.clear()
            await self._has_refused.wait()

    async def finish(self, timeout_s: float) -> bool:
        """Cuts waits short, and waits until every transfer under way has ended; its worker sees to that.

        Returns:
            Whether nothing is under way any more.
        """
        for task in list(self._waiting):
            task.cancel()
        for claims in list(self.mover.claims.values()):
            claims.take_back()  # what the client has filled by itself is committed, and it claims no more
        deadline = Deadline.after(timeout_s)
        self.mover.move_to_tasks()
        while self._tasks and not deadline.expired:  # others may begin meanwhile, such as to hand on an entry
            await asyncio.wait(set(self._tasks), timeout=deadline.remaining_s)
            self.mover.move_to_tasks()
        return not self._tasks

    def mail(self, message: control_pb2.ServerMessage) -> bool:
        """Sends an answer over the channel; False when the request did not come that way, or the answer does not
        fit."""
        if message.request not in self.mailed_requests:
            return False
        content = message.SerializeToString()
        if len(content) > MAIL_BYTES:
            return False
        if not self.ended.is_set():
            self.worker.send(worker_pb2.Order(session=self.number, mail=content))
        return True

    async def _answer(self, message: control_pb2.ServerMessage) -> None:
        if not self.mail(message):
            await self.link.send(message)

    def _task_name(self, request: int) -> str:
        return f"tdserve-session-{self.number}-request-{request}"

    def _keep(self, task: asyncio.Task[None], request: int) -> None:
        self._tasks[task] = request
        task.add_done_callback(self._on_finished)

    def _on_finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            _log.error("request %s failed", task.get_name(), exc_info=task.exception())


def as_error(fault: Exception) -> TDServeError:
    """What a client is told of a fault that is not its own."""
    if isinstance(fault, TDServeError):
        return fault
    _log.exception("a request failed", exc_info=fault)
    return LocalProtocolError(reason=f"{type(fault).__name__}: {fault}"[:500])


def local_address_towards(peer: str) -> str:
    """The address of the interface through which this machine reaches a gRPC peer (``ipv4:10.0.0.2:1234``)."""
    family, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]").removeprefix("::ffff:")
    try:
        return address_towards(host) if family in ("ipv4", "ipv6") else "127.0.0.1"
    except ConnectError:
        return "127.0.0.1"
