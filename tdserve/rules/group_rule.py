"""Membership of a group, epoch by epoch: the rule alone. No I/O, no clock, no torch.

An epoch has members with ranks and never changes. A member that leaves ends it for all. The next one is formed of the
members that ask for it::

    first epoch     as soon as world_size members have asked
    each next one   as soon as all living members of the last epoch have asked; with world_size, as soon as that many
                    of them have. Then newcomers are admitted, behind them; with world_size, as far as there is room
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tdserve.base.errors import InvalidRequestError, NotSupportedError, WrongStateError

MAX_WORLD_SIZE = 4096
"""Most members: each has a connection to every other."""

MAX_CLAIMED_EPOCH = 1 << 53
"""Largest number that a member may claim its last epoch had, unless it has it from this server: the next epoch has a
larger one, which must fit into messages."""


@dataclass(frozen=True)
class Backend:
    """How the content of a group's calls moves.

    Attributes:
        needs_device: Whether it moves tensors on GPUs, of which each member needs one of its own.
    """

    needs_device: bool


BACKENDS = {"gloo": Backend(needs_device=False), "nccl": Backend(needs_device=True)}


def check_backend(name: str) -> str:
    """Returns ``name`` if groups have such a backend.

    Raises:
        InvalidRequestError: With those that there are.
    """
    if name not in BACKENDS:
        reason = f"it must be one of {', '.join(BACKENDS)}, got {name!r}"
        raise InvalidRequestError(argument="backend", reason=reason)
    return name


@dataclass(frozen=True)
class Ask:
    """One member's request to be in the next epoch.

    Attributes:
        member: Its number, unique.
        world_size: Members of the epoch; 0: not given.
        rank: Requested rank in the first epoch; None: any.
        backend: How content moves among the members.
        device: Machine-wide name of its GPU, if the backend needs one.
        epoch: The last epoch that it was in; 0: none.
        last_rank: Its rank there.
        last_world_size: The size of that epoch.
        above: Number up to which it takes epochs for old ones.
    """

    member: int
    world_size: int = 0
    rank: int | None = None
    backend: str = "gloo"
    device: str = ""
    epoch: int = 0
    last_rank: int = 0
    last_world_size: int = 0
    above: int = 0


@dataclass(frozen=True)
class Epoch:
    """Members by rank."""

    number: int
    members: tuple[int, ...]


class GroupRule:
    """One group.

    Args:
        name: Its name, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._epoch = Epoch(0, ())
        self._backend = ""  # of that epoch
        self._living: set[int] = set()
        self._asks: dict[int, Ask] = {}  # in order of arrival

    def __repr__(self) -> str:
        state = f"epoch {self._epoch.number}, {len(self._living)} of {len(self._epoch.members)} live"
        return f"<GroupRule {self.name!r}: {state}, {len(self._asks)} ask>"

    @property
    def is_over(self) -> bool:
        """Whether the group has no members, and none asks."""
        return not self._living and not self._asks

    @property
    def epoch(self) -> Epoch:
        """The last epoch that was formed; number 0 before the first."""
        return self._epoch

    def list_others(self, member: int, epoch: int) -> list[int]:
        """Returns the other living members of an epoch; none if it is not the last one, or this member is not in it."""
        if epoch != self._epoch.number or member not in self._living:
            return []
        return [other for other in self._epoch.members if other in self._living and other != member]

    def is_living(self, member: int) -> bool:
        """Returns whether it is in the last epoch, and has not left."""
        return member in self._living

    def get_rank(self, member: int) -> int:
        """Returns its rank in the last epoch."""
        return self._epoch.members.index(member)

    def ask(self, ask: Ask) -> None:
        """Adds a member's request to be in the next epoch.

        Raises:
            InvalidRequestError: It contradicts itself or another request. Nothing was changed.
            WrongStateError: This member asks already. Nothing was changed.
        """
        if ask.member in self._asks:
            state = f"this client waits for group {self.name!r} already (each member has a client of its own)"
            raise WrongStateError(state=state, event="asking for it again")
        if not 0 <= ask.world_size <= MAX_WORLD_SIZE:
            reason = f"{ask.world_size} is not from 1 to {MAX_WORLD_SIZE}"
            raise InvalidRequestError(argument="world_size", reason=reason)
        if ask.rank is not None and not 0 <= ask.rank < max(ask.world_size, 1):
            reason = f"{ask.rank} is not a rank of {ask.world_size} members"
            raise InvalidRequestError(argument="rank", reason=reason)
        _check_last(ask)
        if self._living and ask.backend != self._backend:
            reason = f"{ask.backend!r}, the members of group {self.name!r} have {self._backend!r}"
            raise InvalidRequestError(argument="backend", reason=reason)
        for other in self._asks.values():
            if (other.member in self._living) is (ask.member in self._living):
                self._check_agree(ask, other)
        self._asks[ask.member] = ask

    def withdraw(self, member: int) -> None:
        """Withdraws a member's request."""
        self._asks.pop(member, None)

    def leave(self, member: int) -> None:
        """Removes a member that has gone or closed the group, and its request."""
        self._asks.pop(member, None)
        self._living.discard(member)

    def form(self) -> Epoch | None:
        """Returns the next epoch if it can be formed now; called after every change.

        Raises:
            NotSupportedError: Two of its members share a GPU, which the backend does not allow. The requests of all
                members are withdrawn.
        """
        chosen = self._find_first() if not self._living else self._find_following()
        if not chosen:
            return None
        for ask in chosen:
            del self._asks[ask.member]
        _check_devices(chosen)
        number = max(self._epoch.number, *(max(ask.epoch, ask.above) for ask in chosen)) + 1
        self._epoch = Epoch(number, tuple(ask.member for ask in chosen))
        self._living, self._backend = set(self._epoch.members), chosen[0].backend
        return self._epoch

    def describe_missing(self) -> str:
        """Returns what the next epoch waits for, for messages."""
        if not self._living:
            return f"{len(self._asks)} of {self._get_first_size()} members have asked"
        silent = [str(rank) for rank, member in enumerate(self._epoch.members) if self._is_silent(member)]
        asked = f"rank {', '.join(silent)} of epoch {self._epoch.number} has not asked" if silent else "all have asked"
        size = self._get_wanted_size()
        return f"{asked}, {size} members are wanted" if size else asked

    def _is_silent(self, member: int) -> bool:
        return member in self._living and member not in self._asks

    def _check_agree(self, ask: Ask, other: Ask) -> None:
        """Raises unless two requests of one kind (of members, or of newcomers) can be granted together."""
        if ask.backend != other.backend:
            reason = f"{ask.backend!r}, another member of group {self.name!r} has asked for {other.backend!r}"
            raise InvalidRequestError(argument="backend", reason=reason)
        if ask.world_size and other.world_size and ask.world_size != other.world_size:
            reason = f"{ask.world_size}, another member of group {self.name!r} has asked for {other.world_size}"
            raise InvalidRequestError(argument="world_size", reason=reason)
        if ask.rank is not None and ask.rank == other.rank:
            reason = f"rank {ask.rank} of group {self.name!r} is taken by another member"
            raise InvalidRequestError(argument="rank", reason=reason)

    def _get_first_size(self) -> int:
        largest = max((ask.world_size for ask in self._asks.values()), default=0)
        return largest or max((ask.last_world_size for ask in self._asks.values()), default=0)

    def _find_first(self) -> list[Ask]:
        """Returns the members of a first epoch, by rank."""
        size = self._get_first_size()
        if not size or len(self._asks) < size:
            return []
        asks = list(self._asks.values())[:size]
        ranks: dict[int, Ask] = {ask.rank: ask for ask in asks if ask.rank is not None and ask.rank < size}
        placed = {ask.member for ask in ranks.values()}
        rest = sorted((ask for ask in asks if ask.member not in placed), key=_get_sort_key)
        free = (rank for rank in range(size) if rank not in ranks)
        ranks.update(zip(free, rest, strict=True))
        return [ranks[rank] for rank in range(size)]

    def _get_wanted_size(self) -> int:
        return max((ask.world_size for ask in self._asks.values() if ask.member in self._living), default=0)

    def _find_following(self) -> list[Ask]:
        """Returns the members of the epoch after the last one, by rank."""
        known = [self._asks[member] for member in self._epoch.members if member in self._living & self._asks.keys()]
        newcomers = [ask for ask in self._asks.values() if ask.member not in self._living]
        is_all = len(known) == len(self._living)
        size = self._get_wanted_size()
        if not size:
            return [*known, *newcomers] if is_all else []
        if len(known) >= size or (is_all and len(known) + len(newcomers) >= size):
            return [*known, *newcomers][:size]
        return []


def _get_sort_key(ask: Ask) -> tuple[bool, int]:
    """Returns the sort key: earlier members come first, in the same order; the sort keeps the others in order."""
    return ask.epoch == 0, ask.last_rank


def _check_last(ask: Ask) -> None:
    """Raises InvalidRequestError if a member claims an epoch that can never have been."""
    most = max(MAX_CLAIMED_EPOCH, ask.above)
    for argument, number, largest in (
        ("epoch", ask.epoch, most),
        ("last_rank", ask.last_rank, MAX_WORLD_SIZE - 1),
        ("last_world_size", ask.last_world_size, MAX_WORLD_SIZE),
    ):
        if not 0 <= number <= largest:
            raise InvalidRequestError(argument=argument, reason=f"{number} is not from 0 to {largest}")


def _check_devices(asks: Iterable[Ask]) -> None:
    seen: dict[str, int] = {}
    for rank, ask in enumerate(asks):
        if ask.device and ask.device in seen:
            reason = f"ranks {seen[ask.device]} and {rank} share the GPU {ask.device}; use backend='gloo'"
            raise NotSupportedError(feature="a group with backend 'nccl'", reason=reason)
        seen[ask.device] = rank
