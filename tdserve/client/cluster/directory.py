"""Finds the server of each store: the owner of its name, or another."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from tdserve.base.errors import StoreNotFoundError, WrongStateError
from tdserve.client.cluster.members import Members
from tdserve.client.session.catalog_client import ONCE, Once
from tdserve.client.session.description import StoreDescription
from tdserve.rules.lost_servers import REACH_S
from tdserve.rules.placement import PlacementRecord, choose_owner

MAX_REMEMBERED = 65_536
"""Names whose place a client remembers."""


class Place(NamedTuple):
    """Where a store is.

    Attributes:
        server: Its server; of a store that several share, the owner of its name.
        placement: How several servers share it; None if one has all of it.
    """

    server: int
    placement: PlacementRecord | None = None


class Directory:
    """The places of stores, as one client knows them. Threads: safe."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._lock = Lock()
        self._places: OrderedDict[str, Place] = OrderedDict()
        self._missed: OrderedDict[str, None] = OrderedDict()

    def get_owner(self, name: str) -> int:
        """Returns the server that decides whether a store of this name may be created."""
        return choose_owner(name, len(self._members))

    def find(self, name: str) -> Place:
        """Returns the place of a store; of one that does not exist, where it will be created.

        Raises:
            ConnectError: The owner does not answer, and no other server has it.
        """
        known = self._places.get(name)
        return known if known is not None else self._search(name)

    def describe(self, name: str, *, timeout_s: float | Once | None = ONCE) -> tuple[StoreDescription, Place]:
        """Describes a store, or the record that its owner has of it; waits for one that does not exist yet.

        Raises:
            StoreNotFoundError, StoreNotCreatedError: As of ``Client.describe``.
        """
        place = self.find(name)
        try:
            found = self._members.get(place.server).describe(name, timeout_s=timeout_s)
        except StoreNotFoundError:
            self.forget(name)
            raise
        place = self._follow(name, place.server, found)
        return found, place

    def forget(self, name: str) -> None:
        """Forgets where a store is: it was deleted."""
        with self._lock:
            self._places.pop(name, None)
            self._missed.pop(name, None)

    def _search(self, name: str) -> Place:
        owner = self.get_owner(name)
        asked, lost = self._ask([owner], name)
        if found := asked.get(owner):
            return self._follow(name, owner, found)
        if len(self._members) == 1 or (name in self._missed and not lost):
            return Place(owner)
        others = [server for server in range(len(self._members)) if server != owner]
        everywhere, _ = self._ask(self._members.list_alive(others), name)
        for server, found in everywhere.items():
            if found is not None:
                return self._follow(name, server, found)
        if not lost:
            with self._lock:
                self._missed[name] = None
                _drop_oldest(self._missed)
        return Place(owner)

    def _ask(self, servers: list[int], name: str) -> tuple[dict[int, StoreDescription | None], bool]:
        calls = {server: partial(self._ask_server, server, name) for server in servers}
        found, lost = self._members.ask_all(calls, reach_s=REACH_S)
        return found, bool(lost)

    def _ask_server(self, server: int, name: str) -> StoreDescription | None:
        return self._members.get(server).catalog.find(name)

    def _follow(self, name: str, server: int, found: StoreDescription) -> Place:
        """Remembers where a store is, by what a server has said about it."""
        place = Place(server)
        if found.kind == "placement":
            placement = PlacementRecord.from_json(found.settings)
            for shard_server in placement.servers:
                if shard_server >= len(self._members):
                    state = f"{name!r} is on server {shard_server} of more than the {len(self._members)} given here"
                    raise WrongStateError(state=state, event="finding it")
            place = Place(server, placement)
        with self._lock:
            self._places[name] = place
            self._missed.pop(name, None)
            _drop_oldest(self._places)
        return place


def _drop_oldest(remembered: OrderedDict[str, Any]) -> None:
    if len(remembered) > MAX_REMEMBERED:
        remembered.popitem(last=False)
