"""One client's session in the control process."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

from tdserve.base.config import MAIL_BYTES, MAIL_INLINE_BYTES
from tdserve.base.deadline import Deadline
from tdserve.base.errors import LocalProtocolError, PeerLostError, TDServeError, TransferAbortedError
from tdserve.base.ids import make_secret
from tdserve.base.logs import choose_failure_level, name_request
from tdserve.control.servicer import SessionConnection
from tdserve.control.status import encode_failure
from tdserve.rules.access.grants import FULL_CALLER, Caller
from tdserve.rules.channel_transports import BASE_TRANSPORT, CHANNEL_TRANSPORTS
from tdserve.rules.tags import make_tag
from tdserve.server.access.gate import Gate, add_grant
from tdserve.server.execution import inline_tasks
from tdserve.server.execution.traces import RequestSpan
from tdserve.server.execution.waiting import Waiters, retrieve_exception
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.local_client import Invitation, LocalClient
from tdserve.server.sessions.mover import Movers
from tdserve.server.sessions.session_limits import MAX_ENTRIES, HeldAnswers, UnsentMessages, UnsentRefusals, is_short
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2, worker_pb2

_log = logging.getLogger("tdserve.server")
_State = TypeVar("_State")

MAX_CHANNELS = 100_000
"""Most channels of one session, one after the other. A healthy client gives one up only when a call ends in the middle
of content."""


class _ChannelKind(Enum):
    """The channels of a session."""

    CONTENT = auto()
    MAIL = auto()


class ClientSession:
    """One client's session: its stream, its worker, and the requests under way.

    Args:
        number: Unique in this run of the server.
        hello: The client's first message.
        connection: The client's stream.
        make_movers: Makes the movers of a session that is otherwise complete.
        worker: The data worker that moves the session's bytes.
        interface: Address on which that worker waits for the client.
        inline_bytes: Content up to this size is sent inside messages of the stream.
        invitation: The invitation that a client on this machine gets.
        channel_transport: Transport of content that moves over a channel.
        is_traced: Whether the spans of its requests are exported, if its client asks for that.
        caller: The origin of the session, with what its token grants.
        gate: Checks what it asks for; None if it may do everything.
        why_unlinked: Why the client may not be linked to others, in groups or as a relay; "" if it may.

    Attributes:
        caller: As given.
        end_error: What the client is told at the end of a session that the server ends; None: it may open another.
        connection: Connection for answers: the stream, or the local connection once the client is attached.
        movers: Move the session's content; replaced when a local client is attached.
        requests: Requests under way.
        accepted_requests: Requests under way whose content on the channel a worker deals with already.
        cancelled_requests: Requests under way that are to be given up as soon as they wait; rows that they lease go
            back.
        mailed_requests: Requests under way that came by mail: their answers go the same way if they fit.
        last_epoch: Number of the last group epoch that the session was in. The next one, of whatever group, has a
            higher number, so that late messages of an old epoch are not taken for the new one's.
        channel_number: Number of the newest channel for content; earlier ones are gone.
        held_nbytes: Memory of the session's requests under way.
        answers: Counts the memory of answers to its reads.
        refusals: Counts the refusals that are on their way to the client.
        secret: Shared secret with which both ends of the session's gloo groups prove their identity.
        begun_s: When it began, by ``time.monotonic``.
        degraded: Stores of a cluster of which parts are out of the client's reach, as it reports.
        bytes_in, bytes_out: Content to the server and from it, as the client reports it.
        reported_s: When it has last reported, by ``time.monotonic``; 0.0 before.
        num_requests, num_errors: Requests that have ended, and those of them that have failed.
        spans: Spans of traced requests under way, of which their orders are part.
        known_specs: Structures of versions that the client has sent, each in its latest order of keys, by fingerprint.
    """

    def __init__(
        self,
        number: int,
        hello: control_pb2.Hello,
        connection: SessionConnection | LocalClient,
        *,
        make_movers: Callable[[ClientSession], Movers],
        worker: DataWorker,
        interface: str,
        inline_bytes: int,
        invitation: Invitation | None = None,
        channel_transport: str = BASE_TRANSPORT,
        is_traced: bool = False,
        why_unlinked: str = "",
        caller: Caller = FULL_CALLER,
        gate: Gate | None = None,
    ) -> None:
        self.why_unlinked = why_unlinked
        self._gate, self.caller = gate, caller
        self.end_error: TDServeError | None = None
        self.channel_transport = channel_transport
        self._is_traced = is_traced
        self.spans: dict[int, RequestSpan] = {}
        self.invitation = invitation
        self._losing: asyncio.Task[None] | None = None
        self.number = number
        self.hello = hello
        self.connection = connection
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
        self.answers = HeldAnswers()
        self.begun_s = time.monotonic()
        self.num_requests = self.num_errors = 0
        self.degraded: tuple[str, ...] = ()
        self.bytes_in, self.bytes_out, self.reported_s = 0, 0, 0.0
        self._num_entries = 0
        self._unsent = UnsentMessages()
        self.refusals = UnsentRefusals(self.ended)
        self.secret = make_secret()
        self.known_specs: dict[bytes, Spec] = {}
        self._inline_bytes = inline_bytes
        self._interface = interface
        self._opened: set[_ChannelKind] = set()
        self._ends: dict[int, asyncio.Event] = {}
        self._tasks: dict[asyncio.Task[Any], int] = {}
        self._waiting: set[asyncio.Task[Any]] = set()
        self.movers = make_movers(self)

    @property
    def client_id(self) -> bytes:
        """The client of this session, the same across its reconnects."""
        return self.hello.client_id

    @property
    def transport(self) -> str:
        """Transport of the session's content."""
        return self.movers.transport

    @property
    def num_promised_descriptors(self) -> int:
        """Number of descriptors of its worker that the session may still come to need."""
        if self.ended.is_set() or not self.movers.uses_channels:
            return 0
        transports = {_ChannelKind.CONTENT: self.channel_transport}
        if CHANNEL_TRANSPORTS[self.channel_transport].has_mail:
            transports[_ChannelKind.MAIL] = BASE_TRANSPORT
        return sum(CHANNEL_TRANSPORTS[transports[kind]].num_descriptors for kind in transports.keys() - self._opened)

    def attach(self, local: LocalClient, movers: Movers) -> None:
        """Attaches a local client, which moves its content itself from now on; only what it reads if it holds no
        lock."""
        self.connection, self.movers = local, movers
        self._losing = asyncio.create_task(self._lose_at_end(local), name=f"tdserve-session-{self.number}-end")

    async def _lose_at_end(self, local: LocalClient) -> None:
        await self.ended.wait()
        local.lose()

    def run(self, serving: Coroutine[Any, Any, None], request: int) -> None:
        """Serves a request in a task of its own; ``request`` is 0 for anything else."""
        self._keep(asyncio.create_task(serving, name=self._make_task_name(request)), request)

    def run_at_once(self, serving: Coroutine[Any, Any, None], request: int) -> None:
        """Like ``run``, but takes the first step at once. Call it outside a task."""
        inline_tasks.start(serving, name=self._make_task_name(request), keep=partial(self._keep, request=request))

    def authorize(self, kind: str, asked: Any) -> AbstractContextManager[None]:
        """Returns the context of a request; arguments and errors as in ``Gate.authorize``."""
        return nullcontext() if self._gate is None else self._gate.authorize(self.caller, kind, asked)

    def begin(self, request: int) -> None:
        """Begins a request that is not under way."""
        self.requests.add(request)

    async def wait_ended(self, request: int) -> None:
        """Waits until a request has ended, if it is under way."""
        await inline_tasks.ensure_task()
        with self.mark_waiting():
            while request in self.requests:
                await self._ends.setdefault(request, asyncio.Event()).wait()

    def bind(self, request: int, channel_number: int) -> None:
        """Binds a request that begins to the channel on which its content moves. If that channel is lost before the
        content is used, the request fails."""
        self._channel_of[request] = channel_number
        self._drop_channels_before(channel_number)

    def _drop_channels_before(self, channel_number: int) -> None:
        """Drops the channels before this one: the client uses it, so they are gone, reported or not."""
        if channel_number > self.channel_number:
            self.lose_channel(channel_number - 1, "the client uses a later one")

    def lose_channel(self, number: int, reason: str) -> bool:
        """Closes a channel that one end has lost, and all before it; what is under way there fails.

        Args:
            reason: Which end has lost it, and why; for the log.

        Returns:
            Whether the loss was not known yet and another channel replaces it. If none can, the session ends.
        """
        if number < self.channel_number or self.ended.is_set() or not self.movers.uses_channels:
            return False
        _log.info("session %d: channel %d for content is lost: %s", self.number, number, reason)
        if not CHANNEL_TRANSPORTS[self.channel_transport].is_reopened or number >= MAX_CHANNELS:
            self.ended.set()
            return False
        self.channel_number = number + 1
        self._opened.discard(_ChannelKind.CONTENT)
        self._num_entries = 0
        order = worker_pb2.Order(session=self.number, channel=number)
        order.close_channel.SetInParent()
        self.worker.send(order)
        lost = {request for request, bound in self._channel_of.items() if bound <= number}
        for task in [task for task in self._waiting if self._tasks.get(task) in lost]:
            task.cancel()
        return True

    def end(self, request: int) -> None:
        """Ends a request, however it was answered."""
        self._channel_of.pop(request, None)
        self.accepted_requests.discard(request)
        self.mailed_requests.discard(request)
        self.cancelled_requests.discard(request)
        self.requests.remove(request)
        if request in self._ends:
            self._ends.pop(request).set()

    def cancel(self, request: int) -> bool:
        """Gives up a request if it waits; one that already moves content runs to its end.

        Returns:
            Whether the request is under way.
        """
        # A task that is done stays in _tasks for one more turn of the loop. It does not count: nothing looks for its
        # request in cancelled_requests any more.
        tasks = [task for task, number in self._tasks.items() if number == request and not task.done()]
        waiting = [task for task in tasks if task in self._waiting]
        for task in waiting:
            task.cancel()
        is_under_way = bool(tasks) or request in self.requests
        # One that has not begun may be about to; one that has may be about to wait, whether or not a retry waits.
        if is_under_way and (not waiting or request in self.requests):
            self.cancelled_requests.add(request)
        return is_under_way

    async def wait(
        self,
        waiters: Waiters,
        attempt: Callable[[], _State | None],
        deadline: Deadline,
        what: Callable[[], str],
        *,
        line: Hashable = None,
        give_back: Callable[[_State], None] | None = None,
    ) -> _State:
        """Waits until an attempt succeeds, as ``Waiters.wait_for`` does, unless the first one does."""
        state = waiters.attempt_at_once(attempt, line)
        if state is not None:
            return state
        await inline_tasks.ensure_task()
        with self.mark_waiting():
            return await waiters.wait_for(attempt, deadline, what, line=line, give_back=give_back)

    async def wait_until(
        self, waiters: Waiters, condition: Callable[[], bool], deadline: Deadline, what: Callable[[], str]
    ) -> None:
        """Waits until a condition holds, which others may have changed again by then; otherwise like ``wait``."""
        await self.wait(waiters, lambda: condition() or None, deadline, what)

    @contextmanager
    def mark_waiting(self) -> Iterator[None]:
        """Runs a block that a cancellation or the end of the session interrupts: nothing has been begun in it."""
        task = asyncio.current_task()
        if task is None:
            raise LocalProtocolError(reason="mark_waiting() outside a task")
        request = self._tasks.get(task, 0)
        is_lost = self._channel_of.get(request, self.channel_number) != self.channel_number
        if self.ended.is_set() or request in self.cancelled_requests or is_lost:
            raise asyncio.CancelledError
        self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)

    def make_order(self, request: int = 0, *, is_accepted: bool = False) -> worker_pb2.Order:
        """Returns an empty order for this session's worker, tagged with the request's number.

        Args:
            is_accepted: Whether the worker deals with the client's content on the channel even if the order fails.

        Raises:
            PeerLostError: The session has ended and its worker forgets it; an order would open it there again.
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
        order = worker_pb2.Order(
            session=self.number, tag=make_tag(request), is_accepted=is_accepted, channel=self.channel_number
        )
        if (span := self.spans.get(request)) is not None:
            order.trace.CopyFrom(span.make_context())
        return order

    def send_rendezvous(self, entry: control_pb2.Rendezvous) -> None:
        """Sends a rendezvous entry of the client to the worker; the first one of a channel opens it there."""
        if self.ended.is_set():
            return
        self._num_entries += 1
        if self._num_entries > MAX_ENTRIES or not is_short(entry):
            self.ended.set()  # the worker keeps all entries
            return
        if not entry.is_mail:
            self._drop_channels_before(entry.channel)
            if entry.channel != self.channel_number:
                return
        self._open_at_worker(_ChannelKind.MAIL if entry.is_mail else _ChannelKind.CONTENT)
        order = self.make_order()
        order.rendezvous.CopyFrom(entry)
        self.worker.send(order)

    def open_stream(self, channel_number: int) -> socket.socket:
        """Opens a channel whose bytes control relays; returns the socket to relay them by, which the caller closes.

        Raises:
            PeerLostError: The session has ended, the channel is gone or open already, or no data worker takes it.
        """
        self._drop_channels_before(channel_number)
        is_wanted = channel_number == self.channel_number and _ChannelKind.CONTENT not in self._opened
        if self.ended.is_set() or not is_wanted:
            raise PeerLostError(peer=f"channel {channel_number} of session {self.number}", reason="it is gone")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.worker.hand_over(self.number, channel_number, theirs)
            except PeerLostError:
                ours.close()
                raise
        self._open_at_worker(_ChannelKind.CONTENT)
        return ours

    def _open_at_worker(self, kind: _ChannelKind) -> None:
        """Has the worker open its end of a channel, once."""
        if kind in self._opened:
            return
        self._opened.add(kind)
        is_mail = kind is _ChannelKind.MAIL
        opening = self.make_order()
        opening.open_session.is_mail = is_mail
        opening.open_session.transport = BASE_TRANSPORT if is_mail else self.channel_transport
        opening.open_session.host = self._interface
        opening.open_session.secret = self.secret
        opening.open_session.client_id = self.client_id
        opening.open_session.is_traced = self._is_traced
        add_grant(opening.open_session, self.caller.grant)
        self.worker.submit(opening).add_done_callback(partial(self._on_opened, opening))

    def _on_opened(self, order: worker_pb2.Order, opening: asyncio.Future[worker_pb2.Worked]) -> None:
        if not opening.cancelled() and opening.exception() is not None and not self.ended.is_set():
            what = "the channel for mail" if order.open_session.is_mail else f"channel {order.channel} for content"
            _log.warning("session %d: %s was not formed: %s", self.number, what, opening.exception())

    def discard(self, request: int, content: control_pb2.Content, *, channel_number: int | None = None) -> None:
        """Has the worker receive and drop the content that the client already sends for a refused request.

        Args:
            channel_number: Channel of the content, for a request that has not begun.
        """
        if channel_number is None:
            channel_number = self._channel_of.get(request, self.channel_number)
            self.accepted_requests.add(request)  # discard once, even if the answer fails later
        self._drop_channels_before(channel_number)
        if content.message_nbytes and channel_number == self.channel_number and not self.ended.is_set():
            order = self.make_order()
            order.tag = make_tag(request)
            order.discard.message_nbytes.extend(content.message_nbytes)
            self.worker.submit(order).add_done_callback(retrieve_exception)

    def send_void(self, request: int, message_nbytes: Sequence[int]) -> None:
        """Has the worker send the content that the client of a refused read already waits for, marked as failed."""
        if self.ended.is_set() or self._channel_of.get(request, self.channel_number) != self.channel_number:
            return  # the client's wait ended together with its channel
        order = self.make_order(request, is_accepted=True)
        order.send_void.message_nbytes.extend(message_nbytes)
        self.worker.submit(order).add_done_callback(retrieve_exception)

    def compute_inline_limit(self, request: int) -> int:
        """Returns how many bytes of content may be sent inline in the answer to a request."""
        return min(self._inline_bytes, MAIL_INLINE_BYTES) if request in self.mailed_requests else self._inline_bytes

    async def send_accepted(self, request: int, accepted: control_pb2.Accepted) -> None:
        """Sends the answer that content follows over the channel."""
        accepted.channel = self._channel_of.get(request, self.channel_number)
        await self._answer(control_pb2.ServerMessage(request=request, accepted=accepted))

    async def send_done(self, request: int, done: control_pb2.Done) -> None:
        """Sends the answer that a request is done."""
        await self._answer(control_pb2.ServerMessage(request=request, done=done))

    def send(self, message: control_pb2.ServerMessage) -> None:
        """Sends a message without waiting; such messages of one session arrive in order. A session whose client takes
        none of them ends."""
        if not self._unsent.has_room(message):
            self.ended.set()
        self.run(self._unsent.send(self.connection.send, message), 0)

    async def fail(self, request: int, error: TDServeError) -> None:
        """Sends the answer that a request was refused or has failed. Never by mail: that channel may have failed
        itself."""
        error.note_request(self.make_request_id(request))
        extra = name_request(error.request_id)
        _log.log(choose_failure_level(error), "a request has failed: %s: %s", error.code, error, extra=extra)
        await self.connection.send(control_pb2.ServerMessage(request=request, failure=encode_failure(error)))

    def make_request_id(self, request: int) -> str:
        """Returns the id of a request in the log, which a client's error repeats."""
        return f"{self.number}-{request}"

    async def finish(self, timeout_s: float) -> bool:
        """Cancels all waits and waits until every transfer under way has ended; the worker ends them.

        Returns:
            Whether nothing is under way any more.
        """
        for task in list(self._waiting):
            task.cancel()
        holder = self.movers.writes.claim_holder
        for claim in list(holder.claims.values()) if holder is not None else ():
            claim.take_back()  # commits the rows that were filled
        deadline = Deadline.after(timeout_s)
        self.movers.move_to_tasks()
        while self._tasks and not deadline.expired:  # others may begin meanwhile, such as one that sends an entry
            await asyncio.wait(set(self._tasks), timeout=deadline.remaining_s)
            self.movers.move_to_tasks()
        return not self._tasks

    def send_by_mail(self, message: control_pb2.ServerMessage) -> bool:
        """Sends an answer by mail; returns False if the request did not come that way or the answer does not fit."""
        if message.request not in self.mailed_requests:
            return False
        content = message.SerializeToString()
        if len(content) > MAIL_BYTES:
            return False
        if not self.ended.is_set():
            self.worker.send(worker_pb2.Order(session=self.number, mail=content))
        return True

    async def _answer(self, message: control_pb2.ServerMessage) -> None:
        if not self.send_by_mail(message):
            await self.connection.send(message)

    def _make_task_name(self, request: int) -> str:
        return f"tdserve-session-{self.number}-request-{request}"

    def _keep(self, task: asyncio.Task[None], request: int) -> None:
        self._tasks[task] = request
        task.add_done_callback(self._on_finished)

    def _on_finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            _log.error("request %s failed", task.get_name(), exc_info=task.exception())
