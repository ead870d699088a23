"""What stores that several servers share have in common: their parts, and calls to all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ConnectError, StoreMovedError, StoreNotFoundError, TransportError
from tdserve.client.client import Client
from tdserve.client.cluster.cluster_servers import ClusterServers
from tdserve.client.cluster.part_errors import naming_whole
from tdserve.client.cluster.sums import add_up_parts
from tdserve.client.session.by_address import get_process_client
from tdserve.client.session.description import StoreDescription
from tdserve.rules.lost_servers import REACH_S
from tdserve.rules.placement import PlacementRecord, name_part

_Result = TypeVar("_Result")
_log = logging.getLogger("tdserve.client")


class ShardedStore:
    """A store that several servers share, each a part, which is an ordinary store of its own there.

    Threads: safe. Pickled by address; a forked child uses connections of its own.

    Attributes:
        name: Name of the store.
        placement: Which servers have it.
        is_degraded: Whether a part was left out of the last call, since its server did not answer.
    """

    def __init__(self, cluster: ClusterServers, name: str, placement: PlacementRecord, *, timeout_s: float) -> None:
        self._cluster = cluster
        self.name = name
        self.placement = placement
        self._handles: dict[int, tuple[Client, Any]] = {}
        self._left_out: frozenset[int] = frozenset()
        self._first = self._describe_any(timeout_s)

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (type(self), self._cluster.recipe, self.name, self.placement))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} over {self.num_shards} servers of {self._cluster.address}>"

    @property
    def num_shards(self) -> int:
        """Number of parts."""
        return self.placement.num_shards

    @property
    def is_degraded(self) -> bool:
        """See the class."""
        return bool(self._left_out)

    # ------------------------------------------------------------ parts

    def get_part(self, shard: int, timeout_s: float | None = None) -> Any:
        """Returns the handle of a part.

        Args:
            timeout_s: Seconds that it may take to open it.

        Raises:
            ConnectError: Its server has no address now, or does not answer.
        """
        client = self._cluster.members.get(self.placement.servers[shard])
        kept = self._handles.get(shard)
        if kept is not None and kept[0] is client:
            return kept[1]
        try:
            found = client.catalog.find(name_part(self.name, shard), timeout_s=timeout_s)
        except StoreMovedError as moved:  # or is being moved
            return self._open_moved(shard, client, moved, timeout_s)
        if found is None:
            with suppress(TransportError):  # of the server that has the record: the part comes or it does not
                if self.name not in self._cluster.members.get(self._cluster.directory.find(self.name).server):
                    raise StoreNotFoundError(name=self.name)
            place = self._cluster.directory.find_again(name_part(self.name, shard))
            if place is not None and place.server != self.placement.servers[shard]:
                return self._open_at(shard, place.server, client, timeout_s)
            found = client.describe(name_part(self.name, shard), timeout_s=timeout_s)  # it is being created
        handle = client.open_handle(found)
        self._handles[shard] = (client, handle)
        return handle

    def _open_moved(self, shard: int, before: Client, moved: StoreMovedError, timeout_s: float | None) -> Any:
        """Returns the handle of a part that is at another server than was known."""
        self._read_placement()
        if self._cluster.members.get(self.placement.servers[shard]) is not before:
            return self.get_part(shard, timeout_s)
        return self._open_at(shard, self._cluster.directory.find_moved(moved).server, before, timeout_s)

    def _open_at(self, shard: int, server: int, before: Client, timeout_s: float | None) -> Any:
        """Returns the handle of a part that a server has, and not the one of another client."""
        if server not in self.placement.servers:
            self.placement = self.placement.replace_server(shard, server)
            return self.get_part(shard, timeout_s)
        # Another part is there as well, until one of them moves on: this one stays counted to the server that it left.
        there = self._cluster.members.get(server)
        handle = there.open_handle(there.describe(name_part(self.name, shard), timeout_s=timeout_s))
        self._handles[shard] = (before, handle)
        return handle

    def _read_placement(self) -> None:
        """Reads where the parts are: one may have moved before its server was lost."""
        self._cluster.directory.forget(self.name)
        with suppress(TransportError):
            placement = self._cluster.directory.find(self.name).placement
            if placement is not None and placement.num_shards == self.num_shards:
                self.placement = placement

    def list_live(self) -> list[int]:
        """Returns the shards whose servers answered when they were last asked."""
        servers = self.placement.servers
        return [shard for shard in range(self.num_shards) if not self._cluster.members.is_lost(servers[shard])]

    def ask_parts(
        self,
        shards: Iterable[int],
        call: Callable[[int, Any], _Result],
        *,
        reach_s: float = REACH_S,
        deadline: Deadline | None = None,
        skips_lost: bool = True,
    ) -> dict[int, _Result]:
        """Calls each of some parts at the same time; leaves out those whose servers do not answer.

        Args:
            call: Gets the shard and its handle.
            deadline: Of the whole call.
            skips_lost: Whether servers that did not answer lately are left out at once, if others do.

        Returns:
            The results by shard. ``is_degraded`` says whether all live and known shards are in it.

        Raises:
            TransportError: None answers.
            TDServeError: The first other error.
        """
        asked = list(shards)
        if skips_lost:
            asked = [shard for shard in self.list_live() if shard in asked] or asked
        timeout_s = None if deadline is None else deadline.remaining_s
        servers = self.placement.servers
        calls = {servers[shard]: partial(self._ask_part, shard, call, timeout_s) for shard in asked}
        found, lost = self._cluster.members.ask_all(calls, reach_s=reach_s)
        for shard in asked:
            if (failure := lost.get(servers[shard])) is not None:
                self.note_unreached(shard, failure)
        if lost and not found:
            raise next(iter(lost.values()))
        results = {shard: found[servers[shard]] for shard in asked if servers[shard] in found}
        self._note_left_out()
        return results

    def note_unreached(self, shard: int, failure: TransportError) -> None:
        """Takes note of the server that a call for a part has not reached: if not the known one, the part is there."""
        lost = self._cluster.members.note_unreached(self.placement.servers[shard], failure)
        if lost not in self.placement.servers:
            self.placement = self.placement.replace_server(shard, lost)

    def ask_each(
        self,
        shards: Collection[int],
        call: Callable[[int, Any], _Result],
        *,
        reach_s: float | None = None,
        deadline: Deadline | None = None,
    ) -> dict[int, _Result]:
        """Calls each of some parts as ``ask_parts`` does, also those whose servers did not answer lately.

        Args:
            reach_s: How long a server is waited for; None: the client's timeout, as if it were the only one.

        Raises:
            TransportError: One does not answer. The calls of the others were made.
            TDServeError: The first other error.
        """
        reach_s = self._cluster.timeout_s if reach_s is None else reach_s
        found = self.ask_parts(shards, call, reach_s=reach_s, deadline=deadline, skips_lost=False)
        missing = sorted(set(shards) - found.keys())
        if missing:
            reason = f"shards {missing} of {self.name!r} do not answer"
            raise ConnectError(address=self._cluster.address, reason=reason)
        return found

    def ask_part(self, shard: int, call: Callable[[Any], _Result], timeout_s: float | None = None) -> _Result:
        """Calls a part; its errors name the store. Other arguments and errors as of ``get_part``."""
        with naming_whole(self.name):
            return call(self.get_part(shard, timeout_s))

    def _ask_part(self, shard: int, call: Callable[[int, Any], _Result], timeout_s: float | None) -> _Result:
        return self.ask_part(shard, partial(call, shard), timeout_s)

    def _note_left_out(self) -> None:
        lost = set(self._cluster.members.lost)
        if not lost.isdisjoint(self.placement.servers) and not self._left_out:
            self._read_placement()
        left_out = frozenset(shard for shard, server in enumerate(self.placement.servers) if server in lost)
        if left_out - self._left_out:
            _log.warning("store %r goes on without shards %s, until their servers answer", self.name, sorted(left_out))
        if bool(left_out) != self.is_degraded:
            for server, client in self._cluster.members.used.items():
                if server not in lost:
                    client.observed_calls.note_degraded(self.name, bool(left_out))
        self._left_out = left_out

    def ask_any(self, call: Callable[[Client, str], _Result]) -> _Result:
        """Calls the client of the first server that answers, with the name of its part.

        Raises:
            TransportError: None answers.
        """
        failure: TransportError | None = None
        for shard in dict.fromkeys([*self.list_live(), *range(self.num_shards)]):
            server = self.placement.servers[shard]
            try:
                part = name_part(self.name, shard)
                found, lost = self._cluster.members.ask_all({server: partial(self._call_client, server, call, part)})
            except StoreNotFoundError:
                continue  # of this part alone, perhaps: it is being created or deleted
            if not lost:
                return found[server]
            failure = lost[server]
        if failure is None:
            raise StoreNotFoundError(name=self.name)
        raise failure

    def _call_client(self, server: int, call: Callable[[Client, str], _Result], part: str) -> _Result:
        with naming_whole(self.name):
            return call(self._cluster.members.get(server), part)

    def _describe_any(self, timeout_s: float) -> StoreDescription:
        return self.ask_any(lambda client, part: client.describe(part, timeout_s=timeout_s))

    # ------------------------------------------------------------ figures

    def describe(self) -> StoreDescription:
        """Returns the structure of the store, and the sums of its parts' figures."""
        return self._add_up(self._describe_parts())

    def _add_up(self, parts: dict[int, StoreDescription]) -> StoreDescription:
        return add_up_parts(self.name, self.placement.settings, parts.values())

    def _describe_parts(self) -> dict[int, StoreDescription]:
        return self.ask_parts(range(self.num_shards), lambda shard, _: self._describe_part(shard))

    def _describe_part(self, shard: int) -> StoreDescription:
        return self._cluster.members.get(self.placement.servers[shard]).describe(name_part(self.name, shard))

    def info(self) -> dict[str, Any]:
        """Returns figures of the store, as of a store of one server; ``"shards"`` lists those of the parts, None for
        one that does not answer, and ``"degraded"`` the numbers of these."""
        parts = self._describe_parts()
        found = self._add_up(parts).as_dict()
        found["shards"] = [parts[shard].as_dict() if shard in parts else None for shard in range(self.num_shards)]
        found["servers"] = list(self.placement.servers)
        found["degraded"] = [shard for shard in range(self.num_shards) if shard not in parts]
        return found


def _reopen(kind: type[ShardedStore], recipe: Any, name: str, placement: PlacementRecord) -> ShardedStore:
    cluster: Any = get_process_client(recipe)
    return kind(cluster, name, placement, timeout_s=cluster.timeout_s)
