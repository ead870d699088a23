"""A group of clients: calls of all members, or of two, on tensordicts. It needs no process group of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, InvalidRequestError, LocalProtocolError, TDServeError
from tdserve.base.integers import check_integer, to_integer
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.groups.agreement import ROOTED, Agreed, agree, agree_pair, describe_structure
from tdserve.client.groups.epoch import GroupEpoch, Member
from tdserve.client.groups.epoch_entry import GroupAsk
from tdserve.client.groups.member_parts import GivenPart, TakenPart
from tdserve.client.groups.movers import DeviceMover, GroupMover, HostMover
from tdserve.client.groups.reducing import Reducing, parse_operation
from tdserve.client.session.session_client import SessionClient
from tdserve.structure.trees.tree import Spec
from tdserve.transport.group_content import CALL_TAG, PAIR_TAG, CallChannel
from tdserve.v1 import group_pb2

_Part = TypeVar("_Part", GivenPart, TakenPart, Reducing)


@leave_modes_in_calls
class Group:
    """A group, as one of its members sees it. Made by ``client.group``; a context manager.

    All members make the same calls of all members (``broadcast``, ``scatter``, ``gather``, ``all_reduce``, ``barrier``)
    in the same order; ``send`` matches ``recv`` at the other member, ``init_remote`` matches ``from_remote_init``.
    Structures are compared before content moves: if they differ, or a member cannot take part, every member of the call
    gets an error, and the group continues.

    Every call takes ``timeout_s``, seconds; None is the client's default. The loss of a member, and a call that does
    not end in time, end the *epoch*: from then on calls raise PeerLostError (the late one DeadlineExceededError) until
    ``next_epoch`` has formed another. After a member has left in good order, only calls that need it raise: those of
    all members, and those of two with it.

    Threads: safe; calls are made one after the other.
    """

    def __init__(self, client: SessionClient, ask: GroupAsk, epoch: GroupEpoch, backend: str) -> None:
        self._client = client
        self._ask = ask
        self._epoch = epoch
        self.backend = backend
        self._lock = Lock()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Group {self.name!r}, epoch {self.epoch}: rank {self.rank} of {self.world_size}>"

    @property
    def name(self) -> str:
        """Name of the group."""
        return self._ask.name

    @property
    def rank(self) -> int:
        """Rank of this member in this epoch."""
        return self._epoch.rank

    @property
    def world_size(self) -> int:
        """Number of members of this epoch."""
        return len(self._epoch.members)

    @property
    def epoch(self) -> int:
        """Number of this epoch; it grows."""
        return self._epoch.number

    @property
    def members(self) -> tuple[Member, ...]:
        """Rank, host and process id of the members of this epoch, by rank."""
        return self._epoch.members

    def broadcast(self, td: Any = None, src: int = 0, *, timeout_s: float | None = None) -> Any:
        """Sends rank ``src``'s tensordict to all members, including non-tensor leaves.

        Args:
            td: At the source: the content. Elsewhere: filled in place; None builds a new one.

        Returns:
            ``td``, or the new one.

        Raises:
            SpecMismatchError: The structure of a member differs; nothing was written anywhere.
            TransferAbortedError: Another member cannot take part.
            PeerLostError, DeadlineExceededError: The epoch is over; what was being filled is undefined.
        """
        is_src = src == self.rank
        call = group_pb2.GroupCall(kind="broadcast", root=describe_rank(src))
        if is_src:
            with self._call(call, self._prepare_given(td), timeout_s, src=src) as (channel, mover, given, _):
                mover.broadcast_from(channel, given)
            return td
        with self._call(call, self._prepare_taken(td), timeout_s, src=src) as (channel, mover, taken, agreed):
            spec = get_spec(agreed)
            mover.broadcast_to(channel, taken, spec, agreed.values_nbytes[src], src)
        return taken.finish(spec)

    def scatter(self, tds: Sequence[Any] | None = None, src: int = 0, *, timeout_s: float | None = None) -> Any:
        """Sends ``tds[i]`` of rank ``src`` to member ``i``.

        Args:
            tds: At the source: one tensordict per member, of one structure. Elsewhere: None.

        Returns:
            The tensordict of this member; at the source the one in the list itself.

        Raises:
            As for ``broadcast``.
        """
        call = group_pb2.GroupCall(kind="scatter", root=describe_rank(src))
        if src == self.rank:
            givens: list[GivenPart] = []

            def give_first() -> GivenPart:
                givens.extend(self._list_givens(tds))
                call.values_nbytes.extend(given.values_nbytes for given in givens)
                return givens[0]

            with self._call(call, give_first, timeout_s, src=src) as (channel, mover, _, _):
                for rank, given in enumerate(givens):
                    if rank != src:
                        mover.give(channel, given, rank)
            return tds[src] if tds is not None else None
        with self._call(call, self._prepare_taken(None), timeout_s, src=src) as (channel, mover, taken, agreed):
            spec = get_spec(agreed)
            mover.take(channel, taken, spec, agreed.values_nbytes[self.rank], src)
        return taken.finish(spec)

    def gather(self, td: Any, dst: int = 0, *, timeout_s: float | None = None) -> list[Any] | None:
        """Collects the tensordicts of all members, of one structure, at rank ``dst``.

        Returns:
            At ``dst`` one tensordict per member, its own unchanged; elsewhere None.

        Raises:
            As for ``broadcast``.
        """
        call = group_pb2.GroupCall(kind="gather", root=describe_rank(dst))
        taken: dict[int, TakenPart] = {}
        with self._call(call, self._prepare_given(td), timeout_s, dst=dst) as (channel, mover, given, agreed):
            spec = get_spec(agreed)
            if self.rank != dst:
                mover.give(channel, given, dst)
            else:
                for rank in range(self.world_size):
                    if rank != dst:
                        taken[rank] = self._prepare_taken(None)()
                        mover.take(channel, taken[rank], spec, agreed.values_nbytes[rank], rank)
        if self.rank != dst:
            return None
        return [td if rank == dst else taken[rank].finish(spec) for rank in range(self.world_size)]

    def all_reduce(self, td: Any, op: Any = "sum", *, timeout_s: float | None = None) -> Any:
        """Reduces the tensors of all members' tensordicts in place; the results are bitwise equal.

        Other leaves are unchanged.

        Args:
            op: ``"sum"``, ``"product"``, ``"mean"``, ``"max"`` or ``"min"``, or a ``ReduceOp`` of torch.distributed.

        Returns:
            ``td``.

        Raises:
            InvalidRequestError, NotSupportedError: There is no such operation (for one of the dtypes).
            Otherwise as for ``broadcast``.
        """
        op = parse_operation(op)
        call = group_pb2.GroupCall(kind="all_reduce", op=op)

        def make() -> Reducing:
            return Reducing(td, op, name=self.name, device=self._ask.device)

        with self._call(call, make, timeout_s) as (channel, mover, reducing, _):
            mover.reduce(channel, reducing, op)
        reducing.finish(self.world_size)
        return td

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Waits until every member has called this.

        Raises:
            PeerLostError, DeadlineExceededError: The epoch is over.
        """
        call = group_pb2.GroupCall(kind="barrier")
        with self._call(call, self._prepare_taken(None), timeout_s):
            pass

    def send(self, td: Any, dst: int, *, timeout_s: float | None = None) -> None:
        """Sends content to a member that calls ``recv`` with a tensordict of the same structure.

        Raises:
            SpecMismatchError: The structures differ; nothing was written.
            Otherwise as for ``broadcast``.
        """
        self._give("send", td, dst, timeout_s)

    def recv(self, td: Any, src: int, *, timeout_s: float | None = None) -> Any:
        """Fills a tensordict in place with what a member sends, and returns it.

        Raises:
            As for ``send``.
        """
        if td is None:
            raise InvalidRequestError(argument="td", reason="is None; from_remote_init(src) builds a new one")
        return self._take("recv", td, src, timeout_s)

    def init_remote(self, td: Any, dst: int, *, timeout_s: float | None = None) -> None:
        """Sends structure and content to a member that calls ``from_remote_init``.

        Raises:
            As for ``broadcast``.
        """
        self._give("init_remote", td, dst, timeout_s)

    def from_remote_init(self, src: int, *, timeout_s: float | None = None) -> Any:
        """Returns a new tensordict with what a member sends by ``init_remote``.

        Raises:
            As for ``broadcast``.
        """
        return self._take("from_remote_init", None, src, timeout_s)

    def next_epoch(self, world_size: int | None = None, *, timeout_s: float | None = None) -> Group:
        """Forms the next epoch with the members that call this too, and the clients that wait to be admitted.

        Ranks keep their order and are renumbered; new members come last.

        Args:
            world_size: None waits for all living members of the last epoch. With a number it returns as soon as that
                many have joined, without members that are alive but hang.

        Returns:
            This object.

        Raises:
            DeadlineExceededError: They did not join in time. There is no epoch; this may be called again.
            ClosedError: The group was closed.
            ForkedClientError: This is a forked child of the process that it belongs to.
        """
        deadline = self._client.make_deadline(timeout_s)
        self._epoch.check_owner()
        if world_size is not None:
            world_size = check_integer("world_size", world_size, 1)
        if self._is_closed or self._epoch.is_closed:
            raise ClosedError(what=f"group {self.name!r}")
        self._epoch.retire()
        epoch = self._ask.join(world_size=world_size, rank=None, last=self._epoch, deadline=deadline)
        with self._lock:
            self._epoch = epoch
            is_closed = self._is_closed
        if is_closed:  # by another thread, which has left the epoch before
            epoch.leave()
            raise ClosedError(what=f"group {self.name!r}")
        return self

    def close(self) -> None:
        """Leaves the group; closing the client and the end of the program do so too. Idempotent.

        For the others the epoch ends, except for calls of two of them. A call of ``next_epoch`` that waits in another
        thread raises ClosedError, and leaves the epoch that it has joined.
        """
        with self._lock:
            self._is_closed = True
            epoch = self._epoch
        epoch.leave()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare_given(self, td: Any) -> Callable[[], GivenPart]:
        def make() -> GivenPart:
            if td is None:
                raise InvalidRequestError(argument="td", reason="is None at a member that sends")
            given = GivenPart(td, name=self.name, allow_pickle=self._client.allow_pickle)
            given.check_device(self._ask.device)
            return given

        return make

    def _prepare_taken(self, out: Any) -> Callable[[], TakenPart]:
        def make() -> TakenPart:
            taken = TakenPart(out, name=self.name, allow_pickle=self._client.allow_pickle)
            taken.check_device(self._ask.device)
            return taken

        return make

    def _list_givens(self, tds: Sequence[Any] | None) -> list[GivenPart]:
        if tds is None or len(tds) != self.world_size:
            reason = f"{'none' if tds is None else len(tds)} for {self.world_size} members"
            raise InvalidRequestError(argument="tds", reason=reason)
        givens = [self._prepare_given(td)() for td in tds]
        for given in givens[1:]:
            given.check(givens[0].spec)
        return givens

    @contextmanager
    def _call(
        self, call: group_pb2.GroupCall, make: Callable[[], _Part], timeout_s: float | None, **ranks: int
    ) -> Iterator[tuple[CallChannel, GroupMover, _Part, Agreed]]:
        """Makes a call of all members: agrees, and lets the block move the content."""
        deadline, epoch = self._client.make_deadline(timeout_s), self._epoch
        epoch.check()
        part, own = self._make_part(make, ranks)
        is_chosen = epoch.rank == (call.root if call.kind in ROOTED else 0)
        with epoch.call(deadline, f"{call.kind}()") as whole:
            call.number = epoch.num_calls
            if part is not None:
                call.fingerprint = part.fingerprint
                if is_chosen and not isinstance(part, TakenPart):
                    describe_structure(call, part.spec, part.fingerprint, epoch.known)
                if isinstance(part, GivenPart) and call.kind != "scatter":
                    call.values_nbytes.append(part.values_nbytes)
            channel = CallChannel(whole, CALL_TAG, deadline, self._client.pool)
            check = part.check if part is not None and not is_chosen else None
            agreed = agree(channel, call, known=epoch.known, check=check, own=own)
            if agreed.failure is None and part is not None:
                yield channel, self._make_mover(epoch, deadline), part, agreed
                return
        raise agreed.failure or LocalProtocolError(reason="a call was agreed on without a part in it")

    def _give(self, kind: str, td: Any, dst: int, timeout_s: float | None) -> None:
        deadline, epoch = self._client.make_deadline(timeout_s), self._epoch
        self._check_peer("dst", dst)
        epoch.check(dst)
        given, own = self._make_part(self._prepare_given(td), {})
        call = group_pb2.GroupCall(kind=kind)
        with epoch.call(deadline, f"{kind}()", dst) as whole:
            channel = CallChannel(whole, PAIR_TAG, deadline, self._client.pool)
            if given is not None:
                describe_structure(call, given.spec, given.fingerprint, epoch.sent_specs[dst])
                call.values_nbytes.append(given.values_nbytes)
            sent_specs, received_specs = epoch.sent_specs[dst], epoch.received_specs[dst]
            agreed = agree_pair(
                channel, dst, call, sent_specs=sent_specs, received_specs=received_specs, check=None, own=own
            )
            if agreed.failure is None and given is not None:
                self._make_mover(epoch, deadline).give(channel, given, dst)
        if agreed.failure is not None:
            raise agreed.failure

    def _take(self, kind: str, out: Any, src: int, timeout_s: float | None) -> Any:
        deadline, epoch = self._client.make_deadline(timeout_s), self._epoch
        self._check_peer("src", src)
        epoch.check(src)
        taken, own = self._make_part(self._prepare_taken(out), {})
        call = group_pb2.GroupCall(kind=kind, fingerprint=b"" if taken is None else taken.fingerprint)
        with epoch.call(deadline, f"{kind}()", src) as whole:
            channel = CallChannel(whole, PAIR_TAG, deadline, self._client.pool)
            check = _refuse if taken is None else taken.check
            sent_specs, received_specs = epoch.sent_specs[src], epoch.received_specs[src]
            agreed = agree_pair(
                channel, src, call, sent_specs=sent_specs, received_specs=received_specs, check=check, own=own
            )
            if agreed.failure is None and taken is not None:
                self._make_mover(epoch, deadline).take(channel, taken, get_spec(agreed), sum(agreed.values_nbytes), src)
        if agreed.failure is not None or taken is None:
            raise agreed.failure or LocalProtocolError(reason="a call was agreed on without a destination")
        return taken.finish(get_spec(agreed))

    def _make_part(self, make: Callable[[], _Part], ranks: dict[str, int]) -> tuple[_Part | None, TDServeError | None]:
        """Returns this member's part in a call, or the error why it has none.

        The others get the error and do not wait.
        """
        try:
            for argument, rank in ranks.items():
                if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
                    raise InvalidRequestError(argument=argument, reason=f"{rank!r} is not a rank of {self!r}")
            return make(), None
        except TDServeError as error:
            return None, error

    def _check_peer(self, argument: str, rank: int) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size or rank == self.rank:
            raise InvalidRequestError(argument=argument, reason=f"{rank!r} is not another member of {self!r}")

    def _make_mover(self, epoch: GroupEpoch, deadline: Deadline) -> GroupMover:
        return HostMover() if epoch.nccl is None else DeviceMover(epoch.nccl, deadline)


def join_group(
    client: SessionClient,
    name: str,
    world_size: int,
    rank: int | None,
    *,
    backend: str,
    device: Any,
    interface: str | None,
    timeout_s: float | None,
) -> Group:
    """Joins a group; see ``Client.group``."""
    world_size = check_integer("world_size", world_size, 1)
    if rank is not None and (to_integer(rank) is None or not 0 <= rank < world_size):
        raise InvalidRequestError(argument="rank", reason=f"{rank!r} is not a rank of {world_size} members")
    deadline = client.make_deadline(timeout_s)
    ask = GroupAsk(client, name, backend=backend, device=device, interface=interface)
    epoch = ask.join(world_size=world_size, rank=rank, last=None, deadline=deadline)
    return Group(client, ask, epoch, backend)


def get_spec(agreed: Agreed) -> Spec:
    """Returns the structure that was agreed on."""
    if agreed.spec is None:
        raise LocalProtocolError(reason="content was agreed on without a structure")
    return agreed.spec


def describe_rank(rank: Any) -> int:
    """Returns a rank as a message can carry it; an invalid one is reported in another field."""
    return rank if type(rank) is int and 0 <= rank < 1 << 31 else 0


def _refuse(spec: Spec) -> None:
    raise LocalProtocolError(reason="there is no destination")
