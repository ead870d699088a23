"""Asks the servers of a cluster about their stores, as ``CatalogClient`` asks one. Imports no torch, for commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, TypeVar

from tdserve.base.errors import StoreMovedError, StoreNotFoundError, TDServeError
from tdserve.base.tls import TLS
from tdserve.client.cluster.servers.latest_records import choose_latest
from tdserve.client.cluster.servers.membership import Membership
from tdserve.client.cluster.sums import add_up_parts, add_up_stats
from tdserve.client.session.calls.reach import reach_within
from tdserve.client.session.catalog.catalog_client import CatalogClient, MissingNames
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.rules.lost_servers import REACH_S
from tdserve.rules.placement import PlacementRecord, find_whole, name_part
from tdserve.structure.trees.tree import Path

_Result = TypeVar("_Result")

_LOST = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
"""Codes of the errors of a server that does not answer."""


class LocatedStore(NamedTuple):
    """A store, and where it is.

    Attributes:
        description: Description; for a shared store, with the sums of the parts that answer.
        servers: Numbers of its servers; of a shared store by shard.
        degraded: Shards whose servers do not answer.
    """

    description: StoreDescription
    servers: tuple[int, ...]
    degraded: tuple[int, ...] = ()


class ClusterCatalog:
    """The catalogs of several servers. Threads: one.

    Args:
        membership: Where the servers are.
        token: Bearer token, if they require one.
        tls: TLS of the connections; None for none.
        timeout_s: Timeout of every call, seconds; a server whose port is closed is given up earlier.

    Attributes:
        lost: The errors of servers that did not answer, by number.
    """

    def __init__(self, membership: Membership, *, token: str | None, timeout_s: float, tls: TLS | None = None) -> None:
        self.address = membership.text
        self.lost: dict[int, TDServeError] = {}
        self._clients: dict[int, CatalogClient] = {}
        self._threads = ThreadPoolExecutor(max(membership.num_servers, 1))
        self._open = ExitStack()
        self.num_servers = membership.num_servers
        for server in range(membership.num_servers):
            try:
                address = membership.find(server)
            except TDServeError as error:
                self.lost[server] = error
                continue
            client = CatalogClient(address, token=token or membership.token, timeout_s=timeout_s, tls=tls)
            client.missing_names = MissingNames(self._find_names_around)
            self._clients[server] = self._open.enter_context(client)

    def __enter__(self) -> ClusterCatalog:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._threads.shutdown(wait=False)

    def list_servers(self) -> dict[str, tuple[int, ...]]:
        """Lists the stores, sorted, with the servers that have them; of a shared store those of its parts.

        Raises:
            TDServeError: No server answers.
        """
        found: dict[str, list[int]] = {}
        parts: dict[str, list[int]] = {}
        for server, names in self._ask_all(CatalogClient.stores).items():
            for name in names:
                whole = find_whole(name)
                (found if whole is None else parts).setdefault(whole or name, []).append(server)
        return {name: tuple(dict.fromkeys(parts.get(name) or found[name])) for name in sorted(found)}

    def stores(self) -> list[str]:
        """Lists the names of all stores of the servers that answer, sorted; a shared store once."""
        return list(self.list_servers())

    def locate(self, name: str) -> LocatedStore:
        """Describes a store.

        Raises:
            StoreNotFoundError: There is no such store.
            TDServeError: The server that may have it does not answer.
        """
        found = {
            server: each
            for server, each in self._ask_all(lambda client: _find_unmoved(client, name)).items()
            if each is not None
        }
        if not found:
            if self.lost:
                raise next(iter(self.lost.values()))
            raise next(iter(self._clients.values())).missing_names.explain(StoreNotFoundError(name=name), None)
        server = choose_latest(found)
        described = found[server]
        if described.kind != "placement":
            return LocatedStore(described, (server,))
        record = PlacementRecord.from_json(described.settings)
        shards = {at: shard for shard, at in enumerate(record.servers)}
        parts = self._ask(shards, lambda at, client: _find_unmoved(client, name_part(name, shards[at])))
        answered = {shards[at]: part for at, part in parts.items() if part is not None}
        if not answered:
            raise next(iter(self.lost.values()), StoreNotFoundError(name=name))
        whole = add_up_parts(name, record.settings, answered, num_shards=record.num_shards)
        degraded = tuple(shard for shard in range(record.num_shards) if shard not in answered)
        return LocatedStore(whole, record.servers, degraded)

    def describe(self, name: str) -> StoreDescription:
        """Describes a store; errors as in ``locate``."""
        return self.locate(name).description

    def keys(
        self, name: str, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False
    ) -> list[str | Path]:
        """Lists the keys of a store as ``CatalogClient.keys`` does; errors as in ``locate``."""
        located = self.locate(name)
        shard = next(shard for shard in range(len(located.servers)) if shard not in located.degraded)
        part = name if len(located.servers) == 1 else name_part(name, shard)
        client = self._clients[located.servers[shard]]
        return client.keys(part, include_nested, leaves_only, sort=sort)

    def stats(self) -> dict[str, Any]:
        """Returns the figures of the servers; see ``ClusterClient.stats``."""
        found = self._ask_all(CatalogClient.stats)
        return add_up_stats(self.address, found, self.lost)

    def describe_lost(self) -> list[str]:
        """Returns a line for each server that did not answer."""
        return [f"server {server} does not answer: {error}" for server, error in sorted(self.lost.items())]

    def _ask_all(self, call: Callable[[CatalogClient], _Result]) -> dict[int, _Result]:
        """Asks all servers as ``_ask`` does."""
        return self._ask(range(self.num_servers), lambda _, client: call(client))

    def _ask(self, servers: Iterable[int], call: Callable[[int, CatalogClient], _Result]) -> dict[int, _Result]:
        """Asks servers at the same time; those that do not answer are noted as lost, and not asked again.

        Args:
            call: Asks one of them; gets its number and its client.

        Raises:
            TDServeError: None of all servers answers, or another error of one.
        """

        def ask(server: int) -> _Result | TDServeError:
            try:
                with reach_within(REACH_S):
                    return call(server, self._clients[server])
            except TDServeError as error:
                if error.code not in _LOST:
                    raise
                return error

        asked = [server for server in servers if server not in self.lost]
        found: dict[int, _Result] = {}
        for server, answer in zip(asked, self._threads.map(ask, asked), strict=True):
            if isinstance(answer, TDServeError):
                self.lost[server] = answer
            else:
                found[server] = answer
        if len(self.lost) == self.num_servers:
            raise next(iter(self.lost.values()))
        return found

    def _find_names_around(self, name: str, num_names: int, timeout_s: float) -> Sequence[str]:
        names: set[str] = set()
        with suppress(TDServeError):
            for found in self._ask_all(lambda client: client.find_names_around(name, num_names, timeout_s)).values():
                names.update(find_whole(each) or each for each in found)
        return sorted(names)


def _find_unmoved(client: CatalogClient, name: str) -> StoreDescription | None:
    """Describes a store of a server; None if there is none, or it has moved: the other server has it."""
    try:
        return client.find(name)
    except StoreMovedError:
        return None
