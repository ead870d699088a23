"""The parts of a store that several servers share: where each of them is, and its handle."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from functools import partial
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    DeadlineExceededError,
    ShardLostError,
    StoreMovedError,
    StoreNotFoundError,
    TDServeError,
    TransportError,
    WrongStateError,
)
from tdserve.client.client import Client
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.servers.part_errors import convert_part_errors
from tdserve.client.cluster.stores.divisions import StoreDivision
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.session.calls.reach import reach_within
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.messages.store_kinds import make_kind_error
from tdserve.rules.lost_servers import PROBE_INTERVAL_S, PROBE_TIMEOUT_S, REACH_S
from tdserve.rules.placement import PlacementRecord, name_part


class SharedParts:
    """Finds the parts of one store, each an ordinary store of its own at its server. Threads: safe.

    It keeps to one division of rows or keys among the parts. If the store was made anew with another one, it raises
    WrongStateError.

    Args:
        cluster: The servers.

    Attributes:
        name: Name of the store.
        placement: Which servers have it.
        division: Which rows or keys each part has.
        first: Description of the first part that was found; set by ``note_first``.
        lost_parts: Parts of the store that their servers have lost.
    """

    first: StoreDescription

    def __init__(self, cluster: ClusterServers, name: str, placement: PlacementRecord, division: StoreDivision) -> None:
        self._cluster = cluster
        self.name = name
        self.placement = placement
        self.division = division
        self._handles: dict[int, tuple[Client, Any]] = {}
        self._uids: dict[int, str] = {}
        self.lost_parts = cluster.get_lost_parts(name)
        self._placement_read_s = -math.inf

    @property
    def num_shards(self) -> int:
        """Number of parts."""
        return self.placement.num_shards

    def note_first(self, found: StoreDescription) -> None:
        """Takes note of the part that was found first: each other one is of its kind."""
        self.first = found
        self._uids[int(found.name.rpartition("#")[2])] = found.uid

    def list_open(self) -> list[Any]:
        """Returns the handles of the parts that were used."""
        return [handle for _, handle in list(self._handles.values())]

    def get_part(self, shard: int) -> Any:
        """Returns the handle of a part, as a step of this thread's call.

        Raises:
            ConnectError: Its server has no address now, or does not answer.
            ShardLostError: Its server has no such part.
        """
        client = self._cluster.members.get(self.placement.servers[shard])
        kept = self._handles.get(shard)
        if kept is not None and kept[0] is client:
            return kept[1]
        try:
            found = client.catalog.find(name_part(self.name, shard))
        except StoreMovedError as moved:  # or is being moved
            return self._open_moved(shard, client, moved)
        if found is None:
            self.check_exists()
            place = self._cluster.directory.find_again(name_part(self.name, shard))
            if place is not None and place.server != self.placement.servers[shard]:
                return self._open_at(shard, place.server, client)
            found = self._wait_for_part(shard, client)
        handle = self._open_part(shard, client, found)
        self.lost_parts.note_found(shard)
        self._handles[shard], self._uids[shard] = (client, handle), found.uid
        return handle

    def check_exists(self) -> None:
        """Raises StoreNotFoundError if the store was deleted, and WrongStateError if its name means a store of a single
        server now, as far as the server with its record answers."""
        directory = self._cluster.directory
        with suppress(TransportError):
            found = self._find_by_name()
            if found is None:
                directory.forget(self.name)  # the record may be lost, too, and there are copies
                if directory.find(self.name).placement is not None:
                    return
                found = self._find_by_name()  # another server may have a store of this name
            if found is None:
                raise StoreNotFoundError(name=self.name)
            if found.kind != "placement":
                directory.forget(self.name)
                wanted = f"shared {self.first.shown_kind}"
                raise make_kind_error(self.name, found.shown_kind, wanted=wanted, is_unshared=True)
            if not self.placement.has_same_division(PlacementRecord.from_json(found.settings)):
                raise self.make_anew_error()

    def make_anew_error(self) -> WrongStateError:
        """Returns the error of a call for a store that now has another division."""
        self._cluster.directory.forget(self.name)
        state = f"{self.name!r} was made anew with other shards, rows or kind; open it again: client[{self.name!r}]"
        return WrongStateError(state=state, event="a call of a handle of the former store")

    def _open_part(self, shard: int, client: Client, found: StoreDescription) -> Any:
        """Returns the handle of a part. Raises WrongStateError if it is one of a store with another division."""
        handle = client.open_handle(self.check_part(shard, found))
        self.division.bind(handle)
        return handle

    def check_part(self, shard: int, found: StoreDescription) -> StoreDescription:
        """Returns the description of a part. Raises WrongStateError if it is one of a store with another division, or
        of another kind."""
        if not self.division.is_valid_part(shard, self._check_kind(found)):
            raise self.make_anew_error()
        return found

    def _find_by_name(self) -> StoreDescription | None:
        """Describes what has the store's name: the record of it, or another store; None if nothing has."""
        directory = self._cluster.directory
        client = self._cluster.members.get(directory.find(self.name).server)
        try:
            return client.catalog.find(self.name)
        except StoreMovedError as moved:  # a store of a single server
            return self._cluster.members.get(directory.find_moved(moved).server).catalog.find(self.name)

    def _wait_for_part(self, shard: int, client: Client) -> StoreDescription:
        """Describes a part that is not there: it is being created, or lost."""
        wait_s = self._cluster.make_deadline(None).limit(math.inf)
        found = self.lost_parts.wait(shard, partial(client.catalog.find, name_part(self.name, shard)), wait_s)
        if found is None:
            self.check_exists()
            server = self.placement.servers[shard]
            raise ShardLostError(name=self.name, shard=shard, server=server, address=client.address)
        return found

    def reopen_part(self, shard: int) -> Any | None:
        """Returns the handle of a part that its server did not have any more, once it is there again; None if another
        store has its name now.

        Raises:
            ShardLostError, StoreNotFoundError: The part, or the store, is not there.
        """
        before = self._handles.pop(shard, None)
        handle = self.get_part(shard)
        if self._is_the_same(shard):
            return handle
        if before is not None:
            self._handles[shard] = before
        return None

    def _is_the_same(self, shard: int) -> bool:
        """Returns whether another part is the one that this handle has opened: then the store was not made anew."""
        for other, uid in list(self._uids.items()):
            if other != shard:
                with suppress(TDServeError):
                    found = self._look(other)
                    if found is not None and found.uid == uid:
                        return True
        return False

    def _probe(self, shard: int) -> StoreDescription | None:
        """Looks for a lost part, in a moment: the call goes on without it."""
        with within(Deadline.after(PROBE_TIMEOUT_S)):
            return self._look(shard)

    def _look(self, shard: int) -> StoreDescription | None:
        with reach_within(REACH_S):
            return self._cluster.members.get(self.placement.servers[shard]).catalog.find(name_part(self.name, shard))

    def forget_part(self, shard: int) -> None:
        """Opens a part anew when it is needed next: it was not there."""
        self._handles.pop(shard, None)

    def _open_moved(self, shard: int, before: Client, moved: StoreMovedError) -> Any:
        """Returns the handle of a part that is at another server than was known."""
        self.read_placement()
        if self._cluster.members.get(self.placement.servers[shard]) is not before:
            return self.get_part(shard)
        return self._open_at(shard, self._cluster.directory.find_moved(moved).server, before)

    def _open_at(self, shard: int, server: int, before: Client) -> Any:
        """Returns the handle of a part that a server has, and not the one of another client."""
        if server not in self.placement.servers:
            self.placement = self.placement.replace_server(shard, server)
            return self.get_part(shard)
        # Another part is there as well, until one of them moves on: this one stays counted to the server that it left.
        there = self._cluster.members.get(server)
        handle = self._open_part(shard, there, there.describe(name_part(self.name, shard), timeout_s=None))
        self._handles[shard] = (before, handle)
        return handle

    def read_placement(self) -> None:
        """Reads where the parts are: one may have moved before its server was lost."""
        with suppress(TransportError, StoreMovedError, DeadlineExceededError):
            placement = self._cluster.directory.find_now(self.name).placement
            if placement is not None and placement.num_shards == self.num_shards:
                self.placement = placement

    def is_away(self, shard: int) -> bool:
        """Returns whether the server of a shard did not answer when it was last asked."""
        return self.placement.servers[shard] in self._cluster.members.lost

    def list_live(self) -> list[int]:
        """Returns the shards whose servers answered when they were last asked, and have them."""
        members, servers = self._cluster.members, self.placement.servers
        return [
            shard
            for shard in range(self.num_shards)
            if not members.is_lost(servers[shard]) and not self.lost_parts.is_lost(shard, partial(self._probe, shard))
        ]

    def note_unreached(self, shard: int, failure: TransportError) -> None:
        """Takes note of the server that a call for a part has not reached: if not the known one, the part is there."""
        lost = self._cluster.members.note_unreached(self.placement.servers[shard], failure)
        if lost not in self.placement.servers:
            self.placement = self.placement.replace_server(shard, lost)

    def find_moved_parts(self) -> None:
        """Reads where the parts are, from time to time, while servers of them are lost: they may have moved before."""
        if set(self._cluster.members.lost).isdisjoint(self.placement.servers):
            self._placement_read_s = -math.inf
        elif time.monotonic() - self._placement_read_s >= PROBE_INTERVAL_S:
            self._placement_read_s = time.monotonic()
            self.read_placement()

    def _check_kind(self, part: StoreDescription) -> StoreDescription:
        with convert_part_errors(self.name):
            return part.check_kind(self.first.shown_kind)
