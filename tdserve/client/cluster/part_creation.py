"""Creation and deletion of stores that several servers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tdserve.base.errors import TDServeError
from tdserve.client.client import Client
from tdserve.client.cluster.cluster_servers import ClusterServers
from tdserve.client.cluster.members import Members
from tdserve.client.session.store_changes import create_store
from tdserve.client.session.store_options import StoreOptions
from tdserve.rules.lost_servers import REACH_S
from tdserve.rules.placement import PlacementRecord, name_part, name_splits
from tdserve.structure.capture import capture
from tdserve.v1 import control_pb2


def record_placement(
    cluster: ClusterServers, name: str, placement: PlacementRecord, *, exists_ok: bool
) -> tuple[PlacementRecord, bool]:
    """Makes the owner of a name record that several servers share the store. This is its creation: whoever finds the
    record waits for parts that do not exist yet.

    Returns:
        The record; of a store that exists, with the servers to which its parts have moved. And whether it exists.

    Raises:
        StoreExistsError: There is a store of this name, or another record with ``exists_ok``.
        ConnectError: The owner, or the server of a shard of a new store, does not answer. Nothing was created.
    """
    cluster.directory.forget(name)
    place = cluster.directory.find(name)
    exists = exists_ok and place.placement is not None and place.placement.num_shards == placement.num_shards
    if exists and place.placement is not None:
        placement = replace(placement, servers=place.placement.servers)
    else:
        _check_answers(cluster.members, placement)
    client = cluster.members.get(place.server)
    empty = capture({}, store=name)
    request = StoreOptions(exists_ok, None, None).request(name, empty.spec, control_pb2.STORE_KIND_PLACEMENT)
    request.settings = placement.to_json()
    create_store(client, request, empty.spec)
    cluster.directory.forget(name)
    return placement, exists


def create_parts(
    cluster: ClusterServers,
    name: str,
    placement: PlacementRecord,
    create_part: Callable[[int, Client], None],
    *,
    exists_ok: bool,
) -> None:
    """Creates a store that several servers share.

    Args:
        create_part: Creates the part of a shard at its server, unless it exists.

    Raises:
        TDServeError: As of ``record_placement`` and ``create_part``. Nothing was created, unless a server was lost
            meanwhile or ``exists_ok`` was given; then the store lacks a part until it is created again with
            ``exists_ok``, or deleted. Of a store that exists some servers may be lost, as in any later call.
    """
    placement, exists = record_placement(cluster, name, placement, exists_ok=exists_ok)
    made: list[tuple[int, str]] = []

    def create(shard: int, server: int) -> None:
        create_part(shard, cluster.members.get(server))
        made.append((server, name_part(name, shard)))

    try:
        calls = {server: partial(create, shard, server) for shard, server in enumerate(placement.servers)}
        made_at, lost = cluster.members.ask_all(calls, reach_s=REACH_S if exists else cluster.timeout_s)
    except TDServeError:
        if not exists_ok:  # otherwise nobody knows which of them this call has made
            for server, part in made:
                cluster.members.get(server).delete(part)
            cluster.members.get(cluster.directory.find(name).server).delete(name)
            cluster.directory.forget(name)
        raise
    if lost and not (exists and made_at):
        raise next(iter(lost.values()))


def _check_answers(members: Members, placement: PlacementRecord) -> None:
    """Raises TransportError if the server of a shard does not answer."""

    def ask(server: int) -> None:
        members.get(server).catalog.find("-")

    _, lost = members.ask_all({server: partial(ask, server) for server in placement.servers})
    if lost:
        raise next(iter(lost.values()))


def delete_parts(members: Members, name: str, placement: PlacementRecord) -> None:
    """Deletes all parts of a store; those that are gone already do not matter.

    Raises:
        ConnectError: A server does not answer. Nothing was deleted.
    """
    _check_answers(members, placement)
    names = [(server, name_part(name, shard)) for shard, server in enumerate(placement.servers)]
    for server, part in [*names, (placement.servers[0], name_splits(name))]:
        client = members.get(server)
        if part in client:
            client.delete(part)
