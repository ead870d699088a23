"""Finds the server of each store: the owner of its name, or another.

``server/README.md`` has a reading order of moves.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from tdserve.base.deadline import ONCE_GRACE_S, Deadline
from tdserve.base.errors import (
    ConnectError,
    DeadlineExceededError,
    PermissionDeniedError,
    ServerBusyError,
    StoreMovedError,
    StoreNotFoundError,
    TDServeError,
    TransportError,
    WrongStateError,
)
from tdserve.client.client import Client
from tdserve.client.cluster.servers.calls_that_follow import call_and_follow
from tdserve.client.cluster.servers.latest_records import choose_latest
from tdserve.client.cluster.servers.members import Members
from tdserve.client.cluster.servers.placement_records import ForwardCheck, delete_copy, find_here, record_forwards
from tdserve.client.moves.move_steps import request_step
from tdserve.client.session.calls.call_conditions import may_repeat
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.session.calls.reach import reach_within
from tdserve.client.session.catalog.catalog_client import ONCE
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.rules.lost_servers import REACH_S
from tdserve.rules.placement import PlacementRecord, choose_owner, find_whole, name_part

_Result = TypeVar("_Result")

MAX_REMEMBERED = 65_536
"""Names whose place a client remembers."""


class Place(NamedTuple):
    """Where a store is.

    Attributes:
        server: Its server; of a store that several share, the owner of its name, or one that has a copy of the record
            while the owner does not answer.
        placement: How several servers share it; None if one has all of it.
    """

    server: int
    placement: PlacementRecord | None = None


SHORTEST_S = 0.5
"""Time for a server's answer, and for the connection to it, while so much is left of the call's own."""

LEAST_S = 0.05
"""The same once the call's own is over: 0 would be the time of a call that asks once, which waits longer."""

LOOK_S = 10.0
"""Most time for a server's answer, before it is found out whether it hangs; one that is busy is asked again."""

LOOK_AGAIN_S = 0.02
"""Pause before it is asked again where a store is that is being moved."""

_Answer = StoreDescription | StoreMovedError | None


def compute_look_s(deadline: Deadline) -> float:
    """Returns how long a call waits for the answer of a server, if it may have to ask others, too."""
    if deadline.timeout_s == 0:  # as any call that asks once
        return ONCE_GRACE_S
    rest_s = deadline.remaining_s
    return LOOK_S if rest_s is None else min(max(SHORTEST_S, rest_s / 2), max(rest_s, LEAST_S), LOOK_S)


class Directory:
    """The places of stores, as one client knows them. Threads: safe.

    Args:
        members: The servers.
        begin_wait: Returns the deadline of a wait for a store that is being moved.
    """

    def __init__(self, members: Members, begin_wait: Callable[[], Deadline]) -> None:
        self._members = members
        self._begin_wait = begin_wait
        self._lock = Lock()
        self._places: OrderedDict[str, Place] = OrderedDict()
        self._missed: OrderedDict[str, None] = OrderedDict()
        self._forward_check = ForwardCheck(members)

    @property
    def num_servers(self) -> int:
        """Number of servers, alive or not."""
        return len(self._members)

    def get_owner(self, name: str) -> int:
        """Returns the server that decides whether a store of this name may be created."""
        return choose_owner(name, len(self._members))

    def find(self, name: str, deadline: Deadline | None = None) -> Place:
        """Returns the place of a store; of one that does not exist, where it will be created.

        Args:
            deadline: Deadline of the search, and of the wait for one that is being moved; None: the client's default.

        Returns:
            While the owner does not answer, and no other server has the store, the owner: a caller that asks it waits
            for it.

        Raises:
            StoreMovedError: It is still being moved.
            DeadlineExceededError: A server that is alive has not answered in time.
        """
        known = self._places.get(name)
        deadline = deadline or self._begin_wait()
        while known is None:
            try:
                with within(deadline):
                    known = self._search(name, deadline)
            except (StoreMovedError, ServerBusyError, DeadlineExceededError):  # or it has not answered yet
                if deadline.expired:
                    raise
                time.sleep(LOOK_AGAIN_S)
        return known

    def find_moved(self, moved: StoreMovedError, deadline: Deadline | None = None) -> Place:
        """Returns the place of a store that a server has refused with this error.

        The server that the error names is waited for: others may not know of the move, and it may have the store
        without showing it yet. Further arguments and errors as in ``find``.
        """
        self.forget(moved.name)
        deadline = deadline or self._begin_wait()
        if moved.server is not None:
            with suppress(StoreMovedError), within(deadline):  # it is moving on
                answer, is_lost = self._ask_target(moved.name, moved, deadline)
                if is_lost:
                    self._show(moved.name, moved, deadline)
                    answer = self._ask_server(moved.server, moved.name)
                if answer is not None:
                    return self._follow(moved.name, moved.server, answer, deadline)
        return self.find(moved.name, deadline)

    def find_now(self, name: str, deadline: Deadline | None = None) -> Place:
        """Returns the place of a store, as in ``find``, by what servers say now: it may have been deleted, and made
        anew elsewhere or for other servers, since this client last heard of it."""
        with self._lock:
            self._places.pop(name, None)
        return self.find(name, deadline)

    def find_for_creation(self, name: str, deadline: Deadline | None = None) -> Place:
        """Returns the place of a store that a call may create. The owner of the name decides about that itself; any
        other place holds only as long as the owner says so. Arguments and errors as in ``find``."""
        known = self._places.get(name)
        if known is not None and known == Place(self.get_owner(name)):
            return known
        return self.find_now(name, deadline)

    def find_again(self, name: str, deadline: Deadline | None = None) -> Place | None:
        """Looks again for a store that was not where it was looked for: it has moved, or the server to which it had
        moved does not show it before it is asked to. Returns None if no server has it."""
        self.forget(name)
        self.find(name, deadline)
        return self._places.get(name)

    def has_store(self, name: str, deadline: Deadline) -> bool:
        """Returns whether one of these servers has a store, or gets it at the moment, by what they answer now."""
        try:
            return self.find_again(name, deadline) is not None
        except (StoreMovedError, DeadlineExceededError):
            return True
        except WrongStateError:  # it is at a server that is not one of these
            return False

    def describe(self, name: str, deadline: Deadline, *, is_awaited: bool = False) -> tuple[StoreDescription, Place]:
        """Describes a store, or the record that its owner has of it.

        Args:
            is_awaited: Whether to wait for one that does not exist yet.

        Raises:
            StoreNotFoundError, StoreNotCreatedError: As in ``Client.describe``.
        """

        def describe(client: Client) -> StoreDescription:
            return client.describe(name, timeout_s=None if is_awaited else ONCE)

        try:
            found, place = self.ask_home(name, describe, deadline)
        except StoreNotFoundError:
            again = self.find_again(name, deadline)
            if again is None:
                raise
            place = again
            with within(deadline):
                found = describe(self._members.get(place.server))
        known = self._places.get(name)  # the call may have followed it to another server
        return found, self._remember(name, place.server if known is None else known.server, found)

    def ask_home(self, name: str, call: Callable[[Client], _Result], deadline: Deadline) -> tuple[_Result, Place]:
        """Asks the server that has a store, or of a shared one the record; while that does not answer, one that has a
        copy of the record. Returns the answer, and the place that was asked."""
        place = self.find(name, deadline)
        if place.placement is None:
            return self.call_there(name, place, call, deadline)
        try:
            with reach_within(REACH_S), within(deadline.shorten(compute_look_s(deadline))):
                return call(self._members.get(place.server)), place
        except TransportError as error:
            if not error.retryable:
                raise
            self._members.note_unreached(place.server, error)
        except DeadlineExceededError:
            if deadline.expired:
                raise
            self._members.note_silent(place.server)
        except TDServeError as error:  # at rest, or busy
            if not may_repeat(error, deadline):
                raise
        self.forget(name)
        place = self.find(name, deadline)
        with within(deadline):
            return call(self._members.get(place.server)), place

    def call_there(
        self, name: str, place: Place, call: Callable[[Client], _Result], deadline: Deadline
    ) -> tuple[_Result, Place]:
        """Calls the client of the server that has a store. While no server listens there, and nothing was sent, it is
        looked for again: it may have moved before its server ended. Returns the answer, and the place that gave it."""

        def look_again(error: ConnectError) -> bool:
            nonlocal place
            lost = self._members.note_unreached(place.server, error)
            with suppress(TDServeError):
                place = self.find_now(name, deadline)
            return place.server != lost

        with within(deadline):
            return call_and_follow(lambda: call(self._members.get(place.server)), look_again, deadline), place

    @contextmanager
    def begin_creation(self, name: str, server: int) -> Iterator[None]:
        """Runs a block that creates a store at the server that decides about its name.

        Raises:
            ConnectError: The port is closed, and nothing was sent before that was found out; or a server that does
                not answer may have such a store. The error names the server; the client's timeout is not waited for.
        """
        role = f"which {'decides about' if server == self.get_owner(name) else 'has'} the name {name!r}"
        if server in self._members.lost:  # one that hangs would take the request, and carry it out later
            self._members.check_answers(server, role, patience_s=REACH_S)
        self.check_creation(name)
        try:
            with reach_within(REACH_S, is_for_unsent=True):
                yield
        except ConnectError as error:
            if not error.retryable:
                raise
            reason = f"server {server}, {role}, does not answer: {error.reason}"
            raise ConnectError(address=error.address, reason=reason) from error

    def check_creation(self, name: str) -> None:
        """Raises ConnectError if no server is known to have a store of this name, and one that does not answer may have
        it. Nothing was created."""
        if name not in self._places:
            self._forward_check.check_creation(name)

    def forget(self, name: str) -> None:
        """Forgets where a store is: it was deleted."""
        with self._lock:
            self._places.pop(name, None)
            self._missed.pop(name, None)

    def _search(self, name: str, deadline: Deadline) -> Place:
        owner = self.get_owner(name)
        asked, lost = self._ask(self._members.list_alive([owner]), name, deadline)
        lost = lost or not asked
        if found := asked.get(owner):
            return self._follow(name, owner, found, deadline)
        if len(self._members) == 1 or (name in self._missed and not lost):
            return Place(owner)
        others = [server for server in range(len(self._members)) if server != owner]
        alive = self._members.list_alive(others)
        everywhere, are_lost = self._ask(alive, name, deadline)
        there = {server: found for server, found in everywhere.items() if found is not None}
        if there:
            server = choose_latest(there)
            place = self._follow(name, server, there[server], deadline)
            if owner in asked:
                with suppress(TDServeError):  # the token may not grant it
                    record_forwards(self._members, {place.server: [name]})
            return place
        if not lost and not are_lost and alive == others:  # a server that is away may have it
            with self._lock:
                self._missed[name] = None
                _drop_oldest(self._missed)
        return Place(owner)

    def _find_copy(self, name: str, deadline: Deadline) -> Place | None:
        """Returns the place of the latest copy of the record of a shared store; None if no server has one."""
        answers, _ = self._ask(self._members.list_alive(range(len(self._members))), name, deadline)
        copies = {server: found for server, found in answers.items() if isinstance(found, StoreDescription)}
        if not copies:
            return None
        server = choose_latest(copies)
        return self._remember(name, server, copies[server])

    def _ask(self, servers: list[int], name: str, deadline: Deadline) -> tuple[dict[int, _Answer], bool]:
        """Asks servers about a store; returns their answers, and whether one did not answer.

        Raises:
            DeadlineExceededError: One that is alive did not answer within half of the time.
        """
        look = Deadline.after(compute_look_s(deadline))
        calls = {server: partial(self._ask_server, server, name) for server in servers}
        found, lost = self._members.ask_all(calls, reach_s=REACH_S, deadline=look)
        return found, bool(lost)

    def _ask_server(self, server: int, name: str) -> _Answer:
        return find_here(self._members.get(server), name)

    def _follow(self, name: str, server: int, found: StoreDescription | StoreMovedError, deadline: Deadline) -> Place:
        """Returns where a store is, by what a server has answered: it, or to which server it has moved."""
        first = server
        for _ in range(len(self._members) + 1):
            if not isinstance(found, StoreMovedError):
                place = self._remember(name, server, found)
                return place if place.placement is None else self._find_record(name, place, place.placement, deadline)
            answer, is_lost = self._ask_target(name, found, deadline)
            if is_lost:
                return self._find_copy(name, deadline) or Place(found.server)
            if answer is None:  # it was deleted there
                with suppress(PermissionDeniedError):  # then a client whose token grants it removes that record
                    request_step(self._members.get(server), name, move=found.move, place="")
                return Place(self.get_owner(name) if find_whole(name) is None else first)
            server, found = found.server, answer
        raise StoreMovedError(name=name)  # it has moved on faster than it was followed

    def _find_record(self, name: str, place: Place, placement: PlacementRecord, deadline: Deadline) -> Place:
        """Returns the place of the record of a shared store, where this one may be a copy; the copy's while the owner
        does not answer, or if its disk was lost. A copy whose server has no part any more is one of a store that was
        deleted."""
        owner = placement.owner
        if not placement.is_copy or owner is None or self._members.is_lost(owner):
            return place
        asked, is_lost = self._ask([owner], name, deadline)
        if is_lost:
            return place
        record = asked[owner]
        if isinstance(record, StoreDescription):
            return self._remember(name, owner, record)
        with suppress(TDServeError):
            parts = [name_part(name, shard) for shard, at in enumerate(placement.servers) if at == place.server]
            if any(isinstance(self._ask_server(place.server, part), StoreDescription) for part in parts):
                return place
            delete_copy(self._members, name, place.server)
        return Place(self.get_owner(name))

    def _ask_target(self, name: str, moved: StoreMovedError, deadline: Deadline) -> tuple[_Answer, bool]:
        """Asks the server to which a store has moved; returns its answer, and whether it does not answer."""
        self._check_server(name, moved.server)
        asked, is_lost = self._ask([moved.server], name, deadline)
        answer = asked.get(moved.server)
        if not is_lost and not isinstance(answer, StoreDescription):
            self._show(name, moved, deadline)
            answer = self._ask_server(moved.server, name)
        return answer, is_lost

    def _show(self, name: str, moved: StoreMovedError, deadline: Deadline) -> None:
        """Makes the server to which a store has moved show it, if the client that moved it did not do so."""
        with suppress(StoreNotFoundError):
            request_step(self._members.get(moved.server), name, move=moved.move, show=True, deadline=deadline)

    def _check_server(self, name: str, server: int) -> None:
        if server >= len(self._members):
            state = f"{name!r} is on server {server} of more than the {len(self._members)} given here"
            raise WrongStateError(state=state, event="finding it")

    def _remember(self, name: str, server: int, found: StoreDescription) -> Place:
        """Remembers where a store is, by what a server has said about it."""
        place = Place(server)
        if found.kind == "placement":
            placement = PlacementRecord.from_json(found.settings)
            _check_order(name, server, placement)
            for shard_server in placement.servers:
                self._check_server(name, shard_server)
            place = Place(server, placement)
        if place.placement is None or not place.placement.is_copy:  # the owner's record is looked for each time
            with self._lock:
                self._places[name] = place
                self._missed.pop(name, None)
                _drop_oldest(self._places)
        return place


def _check_order(name: str, server: int, placement: PlacementRecord) -> None:
    """Raises WrongStateError if this client numbers the servers otherwise than the one that made a record."""
    number = placement.copy_at if placement.is_copy else placement.owner
    if number not in (None, server):
        state = (
            f"server {server} of these was server {number} for the client that created {name!r} "
            f"(all clients list the servers in the same order)"
        )
        raise WrongStateError(state=state, event=f"finding the parts of {name!r}")


def _drop_oldest(remembered: OrderedDict[str, Any]) -> None:
    if len(remembered) > MAX_REMEMBERED:
        remembered.popitem(last=False)
