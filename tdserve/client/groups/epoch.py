"""One epoch of a group at one member: its channel, and the reasons for its end."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Lock, Timer
from typing import Any, NamedTuple, cast
from weakref import WeakSet

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, DeadlineExceededError, ForkedClientError, PeerLostError, TDServeError
from tdserve.client.groups.agreement import Known, meet
from tdserve.client.groups.losses import Losses
from tdserve.client.session.session import Session
from tdserve.transport.channel_forming import Forming
from tdserve.transport.group_content import CALL_TAG, CallChannel
from tdserve.transport.group_gloo import GroupChannel
from tdserve.transport.group_nccl import NcclGroupChannel
from tdserve.transport.pool import BufferPool
from tdserve.transport.proving import make_epoch_credential
from tdserve.transport.rendezvous import KVStore
from tdserve.v1 import control_pb2

LOST_GRACE_S = 0.25
"""How long a call continues after a member leaves, and how long a member whose connection breaks waits for the report
of who left."""

_open: WeakSet[GroupEpoch] = WeakSet()
"""Epochs to leave in good order when the interpreter exits: the others may still be in a call that is over here."""


def _leave_all() -> None:
    for session in {epoch.session for epoch in list(_open) if not epoch.is_foreign}:
        session.groups.leave_all(session.flush)


class Member(NamedTuple):
    """One member of an epoch."""

    rank: int
    host: str
    pid: int


class GroupEpoch:
    """An epoch, from the server's answer to its end. Threads: safe; calls are made one after the other.

    Args:
        session: The session that requested it; the epoch ends with it.
        name: Name of the group.
        formed: The server's answer.
        host: Address of the interface at which the members reach this one.
        device: CUDA device of the backend nccl; None: the backend is gloo.

    Attributes:
        number: Number of the epoch.
        rank: Rank of this member.
        members: By rank.
        known: Structures that were sent to all members.
        sent_specs, received_specs: Structures that this member has sent to one other member alone, or received from it.
        nccl: Moves content on GPUs; None: the backend is gloo.
    """

    def __init__(
        self, session: Session, name: str, formed: control_pb2.GroupFormed, *, host: str, device: Any = None
    ) -> None:
        self.session = session
        self.name = name
        self.number: int = formed.epoch
        self.rank: int = formed.rank
        self.members = tuple(Member(rank, member.host, member.pid) for rank, member in enumerate(formed.members))
        self.known = Known({})
        self.sent_specs = [Known({}) for _ in formed.members]
        self.received_specs = [Known({}) for _ in formed.members]
        self.nccl: NcclGroupChannel | None = None
        self._host = host
        self._secret: bytes = formed.secret
        self._device = device
        self._pid = os.getpid()
        self._calling = Lock()
        self._changed = Condition()
        self._losses = Losses()
        self._is_open = False
        self._over: TDServeError | None = None
        self._grace: Timer | None = None
        self._channel: GroupChannel | None = None
        self._forming: Forming | None = None
        self._kv_store = KVStore(lambda key, value: self._publish(key, value, is_mail=False))
        self._nccl_store = KVStore(lambda key, value: self._publish(key, value, is_mail=True))
        session.groups.attach(name, self.number, self._on_event, self._on_session_lost, self.leave)
        _open.add(self)
        atexit.unregister(_leave_all)
        atexit.register(_leave_all)  # runs before the session is closed

    def __repr__(self) -> str:
        return f"<GroupEpoch {self.number} of {self.name!r}: rank {self.rank} of {len(self.members)}>"

    @property
    def is_lost(self) -> bool:
        """Whether this member knows that another has left."""
        return self._losses.is_any

    @property
    def num_calls(self) -> int:
        """Calls of all members that this one has begun."""
        return self._losses.num_begun

    @property
    def is_in_call(self) -> bool:
        """Whether a call of this member is under way."""
        return self._losses.is_in_call

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child of the process that the epoch belongs to."""
        return os.getpid() != self._pid

    @property
    def is_closed(self) -> bool:
        """Whether this member has left the group."""
        return isinstance(self._over, ClosedError)

    def open(self, deadline: Deadline, pool: BufferPool) -> None:
        """Opens the connections to all members: one that leaves afterwards hinders none of the others.

        Raises:
            PeerLostError: A member was lost in the meantime; the others are notified too.
            ConnectError: They could not be opened. The epoch is over.
        """
        remaining_s = deadline.remaining_s or 0.0

        def make() -> GroupChannel:
            channel = GroupChannel(
                self._kv_store,
                self.rank,
                len(self.members),
                host=self._host,
                credential=make_epoch_credential(self._secret, self.name, self.number),
                name=self.name,
                timeout_s=max(remaining_s, 1.0),
                peers=[self._describe_rank(rank) for rank in range(len(self.members))],
            )
            if self._device is not None:
                try:
                    self.nccl = NcclGroupChannel(
                        self._nccl_store, self.rank, len(self.members), device=self._device, name=self.name
                    )
                except BaseException:
                    channel.close()
                    raise
            return channel

        with self._changed:
            loss = self._losses.find_loss(None)
            if loss is not None:
                raise self._make_lost_error(loss)
            name = f"tdserve-group-{self.name}-form"
            forming = self._forming = Forming(cast(Any, make), peer=f"group {self.name!r}", name=name)
        try:
            channel = cast(GroupChannel, cast(object, forming.wait(remaining_s)))
        except TDServeError as error:
            raise self._end(error, deadline) from error
        with self._changed:
            self._channel = channel
        try:
            meet(CallChannel(channel, CALL_TAG, deadline, pool))
        except TDServeError as error:
            raise self._end(error, deadline) from error
        with self._changed:
            self._is_open = True

    @contextmanager
    def call(self, deadline: Deadline, what: str, peer: int | None = None) -> Iterator[GroupChannel]:
        """Runs a block as a call on the channel; any exception in the block ends the epoch.

        Args:
            peer: Rank of the only other member that the call needs; None: it needs all.

        Raises:
            PeerLostError: The epoch is over, or the call needs a member that has left.
            ClosedError: It was closed by this member.
            DeadlineExceededError: The block raised it, or another call of this member took all the time.
        """
        if not self._calling.acquire(timeout=deadline.remaining_s or 0.0):
            raise DeadlineExceededError(what=f"the end of another call of {self.name!r}", timeout_s=deadline.timeout_s)
        try:
            channel, is_well = self.check(peer, begins=True), False
            try:
                yield channel
                is_well = True
            except TDServeError as error:
                raise self._end(error, deadline, what, peer) from error
            except BaseException as fault:
                reason = f"{what} was interrupted by {type(fault).__name__}"
                self._end(PeerLostError(peer=self._describe_rank(self.rank), reason=reason), deadline, what, peer)
                raise
            finally:
                with self._changed:
                    self._losses.finish(is_well=is_well)
        finally:
            self._calling.release()

    def check(self, peer: int | None = None, *, begins: bool = False) -> GroupChannel:
        """Returns the channel, unless the epoch is over.

        Args:
            peer: As for ``call``.
            begins: Whether a call begins now.

        Raises:
            PeerLostError: It is over, or a member that the call needs has left.
            ClosedError: It was closed by this member.
            ForkedClientError: This is a forked child of the process that it belongs to.
        """
        self.check_owner()
        with self._changed:
            if self._over is None and self._losses.end is not None:
                self._over = self._make_lost_error(self._losses.end)
            over, channel, missed = self._over, self._channel, self._losses.find_loss(peer)
            if begins and over is None and channel is not None and missed is None:
                self._losses.begin(peer)
        if over is not None or channel is None:
            self._close_channel()
            raise over or ClosedError(what=f"group {self.name!r}")
        if missed is not None:
            raise self._make_lost_error(missed)
        return channel

    def check_owner(self) -> None:
        """Raises ForkedClientError in a forked child of the process that it belongs to."""
        if self.is_foreign:
            raise ForkedClientError(what=f"group {self.name!r}", pid=self._pid)

    def leave(self, *, stays_connected: bool = False) -> None:
        """Leaves the epoch, and notifies the others. Idempotent.

        Args:
            stays_connected: Keeps the connections until this is called again: when one breaks, the others know the
                reason.
        """
        with self._changed:
            is_first = not isinstance(self._over, ClosedError)
            if is_first:
                self._over = ClosedError(what=f"group {self.name!r}")
            parting = self._describe_parting()
        _open.discard(self)
        if self.is_foreign:
            return
        if is_first:
            self.session.groups.detach(self.name, self.number)
            if not self.session.is_lost:
                self._notify(leave=True, **parting)
        if not stays_connected:
            self._close_channel()

    def retire(self) -> None:
        """Ends the channel because the member moves on to the next epoch. The others are notified, for their calls."""
        with self._changed:
            is_first = self._over is None and self._losses.end is None
            self._over = self._over or self._make_finished_error("this member has gone on")
            parting = self._describe_parting()
        _open.discard(self)
        if is_first and not self.session.is_lost:
            self._notify(given_up="it has gone on to the next epoch", **parting)
        self.session.groups.detach(self.name, self.number)
        self._close_channel()

    def _end(
        self, error: TDServeError, deadline: Deadline, what: str = "its formation", peer: int | None = None
    ) -> TDServeError:
        """Ends the epoch after a fault of the channel; returns the error to raise."""
        self._close_channel()
        with self._changed:
            if not isinstance(error, DeadlineExceededError):
                self._changed.wait_for(lambda: self._losses.find_cause(peer) is not None, deadline.limit(LOST_GRACE_S))
            loss = self._losses.find_cause(peer)
            if isinstance(self._over, ClosedError):
                return self._over
            # A member that gives up because the time of all is over is not at fault.
            is_late = deadline.remaining_s is not None and deadline.remaining_s <= LOST_GRACE_S
            if loss is not None and not (loss.has_given_up and is_late):
                found: TDServeError = self._make_lost_error(loss)
            elif isinstance(error, DeadlineExceededError) or is_late:
                waited = f"it waited for {error.what}; " if isinstance(error, DeadlineExceededError) else ""
                what = f"{what} of group {self.name!r} ({waited}{self._advice})"
                found = DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)
            elif isinstance(error, PeerLostError):
                found = PeerLostError(peer=error.peer, reason=f"{error.reason}; {self._advice}")
            else:
                found = error
            # Only some calls need a member that has left: the others are told that this one is leaving too.
            is_first = self._over is None and (loss is None or loss.has_left)
            parting = {"num_finished": self._losses.num_finished} if loss is not None and self._is_open else {}
            failed = f"{what} has failed: {str(found).replace(f'; {self._advice}', '')}"
            if self._over is None:
                self._over = self._make_lost_error(loss) if loss is not None else self._make_finished_error(failed)
        if is_first and not self.session.is_lost:
            self._notify(given_up=failed[:500], **parting)
        return found

    def _describe_parting(self) -> dict[str, Any]:
        """Returns what a leaving member reports about its calls."""
        if self.is_in_call or not self._is_open:
            return {"is_busy": True}
        return {"num_finished": self._losses.num_finished}

    def _close_channel(self) -> None:
        with self._changed:
            channel, forming, grace, self._forming, self._grace = self._channel, self._forming, self._grace, None, None
        if grace is not None:
            grace.cancel()
        self._kv_store.close()
        self._nccl_store.close()
        if channel is not None:
            channel.close()
        elif forming is not None:
            forming.cancel(self._over or self._make_finished_error("its channel was closed"))
        if self.nccl is not None:
            self.nccl.close()

    def _on_event(self, event: control_pb2.GroupEvent) -> None:
        if event.HasField("entry"):
            store = self._nccl_store if event.entry.is_mail else self._kv_store
            store.feed(event.entry.key, event.entry.value)
        elif event.HasField("loss"):
            self._on_loss(event.loss)

    def _on_session_lost(self, error: TDServeError) -> None:
        self._on_loss(control_pb2.GroupLoss(rank=self.rank, reason=f"the session of this member has ended: {error}"))

    def _on_loss(self, loss: control_pb2.GroupLoss) -> None:
        with self._changed:
            # A member that has left has done its part, and the others may continue. Only over NCCL a waiting member
            # would not notice.
            is_vain = self._channel is None or self._losses.is_end_of_call(loss)
            is_end = self._losses.take(loss, ends_all=self.nccl is not None or self._channel is None)
            self._changed.notify_all()
            if self._grace is None and is_end:
                self._grace = Timer(0.0 if is_vain else LOST_GRACE_S, self._close_channel)
                self._grace.name, self._grace.daemon = f"tdserve-group-{self.name}-end", True
                self._grace.start()

    @property
    def _advice(self) -> str:
        return f"epoch {self.number} is over, next_epoch() forms another"

    def _describe_rank(self, rank: int) -> str:
        member = self.members[rank]
        return f"rank {rank} of group {self.name!r} (process {member.pid} on {member.host})"

    def _make_lost_error(self, loss: control_pb2.GroupLoss) -> PeerLostError:
        return PeerLostError(peer=self._describe_rank(loss.rank), reason=f"{loss.reason}; {self._advice}")

    def _make_finished_error(self, reason: str) -> PeerLostError:
        return PeerLostError(peer=f"group {self.name!r}", reason=f"{reason}; {self._advice}")

    def _publish(self, key: str, value: bytes, *, is_mail: bool) -> None:
        self._notify(entry=control_pb2.Rendezvous(key=key, value=value, is_mail=is_mail))

    def _notify(self, **body: Any) -> None:
        notice = control_pb2.GroupNotice(name=self.name, epoch=self.number, **body)
        self.session.notify(control_pb2.ClientMessage(group_notice=notice))
