"""The steps of every call of a group: each member's part, the agreement, and the movement of content."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, LocalProtocolError, TDServeError
from tdserve.client.groups.agreement import ROOTED, Agreed, agree, agree_pair, describe_structure
from tdserve.client.groups.epoch import GroupEpoch
from tdserve.client.groups.epoch_entry import GroupAsk
from tdserve.client.groups.member_parts import GivenPart, TakenPart
from tdserve.client.groups.movers import DeviceMover, GroupMover, HostMover
from tdserve.client.groups.reducing import Reducing
from tdserve.client.session.calls import SessionClient
from tdserve.structure.tree import Spec, check_matches
from tdserve.transport.group_content import CALL_TAG, PAIR_TAG, GroupWire
from tdserve.v1 import group_pb2

_Part = TypeVar("_Part", GivenPart, TakenPart, Reducing)


class GroupCalls:
    """The steps that all calls of a group share. Threads: safe; calls are made one after the other.

    Args:
        client: Provides sessions, pool and settings.
        ask: What this member requests for each epoch.
        epoch: The first one, connected.
    """

    def __init__(self, client: SessionClient, ask: GroupAsk, epoch: GroupEpoch) -> None:
        self._client = client
        self._ask = ask
        self._epoch = epoch

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
            check_matches(givens[0].spec, given.spec, store=self.name)
        return givens

    @contextmanager
    def _call(
        self, call: group_pb2.GroupCall, make: Callable[[], _Part], timeout_s: float | None, **ranks: int
    ) -> Iterator[tuple[GroupWire, GroupMover, _Part, Agreed]]:
        """Makes a call of all members: agrees, and lets the block move the content."""
        deadline, epoch = self._client.deadline(timeout_s), self._epoch
        epoch.check()
        part, own = self._make_part(make, ranks)
        is_chosen = epoch.rank == (call.root if call.kind in ROOTED else 0)
        with epoch.call(deadline, f"{call.kind}()") as link:
            call.number = epoch.num_calls
            if part is not None:
                call.fingerprint = part.fingerprint
                if is_chosen and not isinstance(part, TakenPart):
                    describe_structure(call, part.spec, part.fingerprint, epoch.known)
                if isinstance(part, GivenPart) and call.kind != "scatter":
                    call.values_nbytes.append(part.values_nbytes)
            wire = GroupWire(link, CALL_TAG, deadline, self._client.pool)
            check = part.check if part is not None and not is_chosen else None
            agreed = agree(wire, call, known=epoch.known, check=check, own=own)
            if agreed.failure is None and part is not None:
                yield wire, self._make_mover(epoch, deadline), part, agreed
                return
        raise agreed.failure or LocalProtocolError(reason="a call was agreed on without a part in it")

    def _give(self, kind: str, td: Any, dst: int, timeout_s: float | None) -> None:
        deadline, epoch = self._client.deadline(timeout_s), self._epoch
        self._check_peer("dst", dst)
        epoch.check(dst)
        given, own = self._make_part(self._prepare_given(td), {})
        call = group_pb2.GroupCall(kind=kind)
        with epoch.call(deadline, f"{kind}()", dst) as link:
            wire = GroupWire(link, PAIR_TAG, deadline, self._client.pool)
            if given is not None:
                describe_structure(call, given.spec, given.fingerprint, epoch.sent_specs[dst])
                call.values_nbytes.append(given.values_nbytes)
            sent_specs, received_specs = epoch.sent_specs[dst], epoch.received_specs[dst]
            agreed = agree_pair(
                wire, dst, call, sent_specs=sent_specs, received_specs=received_specs, check=None, own=own
            )
            if agreed.failure is None and given is not None:
                self._make_mover(epoch, deadline).give(wire, given, dst)
        if agreed.failure is not None:
            raise agreed.failure

    def _take(self, kind: str, out: Any, src: int, timeout_s: float | None) -> Any:
        deadline, epoch = self._client.deadline(timeout_s), self._epoch
        self._check_peer("src", src)
        epoch.check(src)
        taken, own = self._make_part(self._prepare_taken(out), {})
        call = group_pb2.GroupCall(kind=kind, fingerprint=b"" if taken is None else taken.fingerprint)
        with epoch.call(deadline, f"{kind}()", src) as link:
            wire = GroupWire(link, PAIR_TAG, deadline, self._client.pool)
            check = _refuse if taken is None else taken.check
            sent_specs, received_specs = epoch.sent_specs[src], epoch.received_specs[src]
            agreed = agree_pair(
                wire, src, call, sent_specs=sent_specs, received_specs=received_specs, check=check, own=own
            )
            if agreed.failure is None and taken is not None:
                self._make_mover(epoch, deadline).take(wire, taken, get_spec(agreed), sum(agreed.values_nbytes), src)
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
