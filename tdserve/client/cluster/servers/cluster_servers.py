"""The servers of a cluster as a client uses them: their clients, and where each store is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreMovedError, StoreNotFoundError
from tdserve.client.client import Client
from tdserve.client.cluster.servers.directory import Directory, Place
from tdserve.client.cluster.servers.lost_parts import LostParts
from tdserve.client.cluster.servers.members import Members
from tdserve.client.cluster.servers.membership import Membership, read_membership
from tdserve.client.cluster.servers.policy_feeds import PolicyFeeds
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.session.calls.background_calls import BackgroundCalls
from tdserve.client.session.calls.call_deadline import begin_call, check_wait_s
from tdserve.client.session.catalog.catalog_client import CatalogClient, MissingNames
from tdserve.client.session.client_connections import ClientConnections, end_with
from tdserve.client.session.recipe import Recipe
from tdserve.client.session.session_client import SessionClient
from tdserve.rules.placement import find_whole

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ClusterRecipe:
    """Address and settings of a cluster's client; equal recipes make equivalent clients.

    Attributes:
        of_client: Settings of a client, with the address of the cluster.
    """

    of_client: Recipe

    def make(self) -> ClusterServers:
        """Finds the servers, to each of which a connection is made when it is first used."""
        return ClusterServers(read_membership(self.of_client.address), self)

    def make_client(self, address: str, token: str | None) -> Client:
        """Makes the client of one server; with a token that its membership keeps, unless the user gave one."""
        given = self.of_client.token
        made = replace(self.of_client, address=address, token=token if given is None else given).make()
        return cast(Client, made)


class ClusterServers:
    """What the client of a cluster and its handles share. Threads: safe.

    Attributes:
        recipe: To make the same elsewhere.
        members: The clients of the servers.
        directory: Where each store is.
        policies: What is known of weights that tables follow.
        numpy: Whether what is read is handed over as NumPy arrays.
        allow_pickle: As in ``connect``.
    """

    def __init__(self, membership: Membership, recipe: ClusterRecipe) -> None:
        self.recipe = recipe
        self.address = membership.text
        self.timeout_s = check_wait_s(recipe.of_client.timeout_s)
        self.numpy = recipe.of_client.numpy
        self.allow_pickle = recipe.of_client.allow_pickle
        self.members = Members(membership, self._make_client, tls=recipe.of_client.tls)
        self.directory = Directory(self.members, lambda: self.make_deadline(None))
        self.policies = PolicyFeeds(self._find_home, self.directory.forget)
        self._lost_parts: dict[str, LostParts] = {}
        self._background = BackgroundCalls("tdserve-cluster-later")
        self._connections: list[ClientConnections] = []  # of all clients that were made
        ends = [self.policies.close, self._background.watch.close]
        self._on_dropped = end_with(self, self._connections, self.address, ends=ends)

    def get_lost_parts(self, name: str) -> LostParts:
        """Returns which parts of a shared store are not where they belong."""
        return self._lost_parts.setdefault(name, LostParts())

    def _find_home(self, name: str) -> Client:
        return self.members.get(self.directory.find(name).server)

    def _make_client(self, address: str) -> Client:
        client = self.recipe.make_client(address, self.members.membership.token)
        client.on_dropped.detach()  # it is dropped with this object, which it refers to
        self._connections.append(client.connections)
        client.find_moved = self.find_moved
        client.follow = self._follow
        client.catalog.follow = self._follow_catalog
        client.catalog.find_moved = lambda error, deadline: self.find_moved(error, deadline).catalog
        client.catalog.find_policy = self.policies.find_news
        client.catalog.missing_names = MissingNames(self._find_names_around)
        return client

    def _find_names_around(self, name: str, num_names: int, timeout_s: float) -> Sequence[str]:
        servers = self.members.list_alive(range(len(self.members)))
        found, _ = self.members.ask_clients(
            servers, lambda client: client.catalog.find_names_around(name, num_names, timeout_s)
        )
        all_names = {each for names in found.values() for each in names}
        # A part that is missing is not meant by the name of its store, by which its error will be shown.
        return sorted({each if each == name else find_whole(each) or each for each in all_names} - {find_whole(name)})

    def find_moved(self, error: StoreMovedError, deadline: Deadline) -> Client:
        """Finds the client of the server that has a store now which another one has refused with this error.

        Raises:
            StoreMovedError: The move has not ended in time.
            ConnectError: A server that knows where it is does not answer.
        """
        return self.members.get(self.directory.find_moved(error, deadline).server)

    def _follow(
        self, client: SessionClient, name: str, call: Callable[[SessionClient], Any], deadline: Deadline
    ) -> Any:
        """Makes a call of the client of a server about a store, or a call of the client to whose server the store has
        moved before the first one ended. Errors as in ``Directory.call_there``."""
        number = next((number for number, each in self.members.used.items() if each.catalog is client.catalog), None)
        if number is None or find_whole(name) is not None:  # handles of shared stores follow their parts
            return call(client)

        def call_known(there: Client) -> Any:
            try:
                return call(there)
            except StoreNotFoundError:
                if there.catalog is client.catalog or number not in self.members.lost:
                    raise
                raise self.members.explain_not_asked(number, f"which may have {name!r}") from None

        is_lost = self.members.is_lost(number)
        place = self.directory.find(name, deadline) if is_lost else Place(number)
        return self.directory.call_there(name, place, call_known, deadline)[0]

    def _follow_catalog(
        self, catalog: CatalogClient, name: str, call: Callable[[CatalogClient], Any], deadline: Deadline
    ) -> Any:
        client = next((each for each in self.members.used.values() if each.catalog is catalog), None)
        if client is None:
            return call(catalog)
        return self._follow(client, name, lambda there: call(there.catalog), deadline)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed; every call then raises ClosedError."""
        return self.members.is_closed

    def make_deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the deadline of a call; None is the client's default timeout, or the deadline of the call of which
        this thread makes a step."""
        return begin_call(timeout_s, self.timeout_s)

    def run_later(self, work: Callable[[], _Result], deadline: Deadline = Deadline.never) -> AwaitableFuture[_Result]:
        """Runs work in a thread of its own, as in ``BackgroundCalls.run``."""
        return self._background.run(work, deadline=deadline)

    def close(self) -> None:
        """Closes the connections to all servers. Idempotent."""
        self.policies.close()
        self.members.close()
        self._background.close()
        self._on_dropped.detach()
