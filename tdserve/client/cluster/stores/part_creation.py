"""Creation and deletion of stores that several servers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ConnectError,
    DeadlineExceededError,
    StoreExistsError,
    StoreNotFoundError,
    TransportError,
)
from tdserve.client.client import Client
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.servers.members import Members
from tdserve.client.cluster.servers.placement_records import (
    create_record,
    delete_copy,
    delete_record,
    find_here,
    record_copy,
)
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.session.store_changes import delete_store
from tdserve.rules.lost_servers import REACH_S
from tdserve.rules.placement import PlacementRecord, name_part, name_splits

UNDO_TIMEOUT_S = 2.0
"""Time to remove what was created of a store whose creation has failed, also if its own time is over."""


def record_placement(cluster: ClusterServers, name: str, placement: PlacementRecord, *, exists_ok: bool) -> str:
    """Makes the owner of a name record that several servers share the store; returns the record's incarnation.

    This is its creation: a client that finds the record waits for parts that do not exist yet. Of a store that exists
    only the record, or a copy, is compared.

    Raises:
        StoreExistsError: There is a store of this name, or another record with ``exists_ok``.
        ConnectError: The owner does not answer.
    """
    server = cluster.directory.find(name).server
    with cluster.directory.begin_creation(name, server):
        uid = create_record(cluster.members.get(server), name, placement, exists_ok=exists_ok)
    cluster.directory.forget(name)
    return uid


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
        StoreExistsError: There is such a store, and ``exists_ok`` was not given, or it has more or fewer shards.
        TransportError: The owner of the name, or the server of a shard of a new store, does not answer.
        TDServeError: As in ``record_placement`` and ``create_part``. Nothing was created, unless a server was lost
            meanwhile or ``exists_ok`` was given; then the store lacks a part until it is created again with
            ``exists_ok``, or deleted. Of a store that exists some servers may be lost, as in any later call.
    """
    cluster.directory.forget(name)
    known = cluster.directory.find(name).placement
    exists = known is not None
    if known is not None:
        if not exists_ok:
            raise StoreExistsError(name=name)
        if known.num_shards != placement.num_shards:
            reason = f"it has {known.num_shards} shards, asked are {placement.num_shards}"
            raise StoreExistsError(name=name, reason=reason)
        # Its parts may have moved.
        placement = replace(
            placement, servers=known.servers, owner=known.owner, copy_at=known.copy_at, revision=known.revision
        )
    else:
        check_answers(cluster.members, name, placement)
        placement = replace(placement, owner=cluster.directory.find(name).server)
    uid = record_placement(cluster, name, placement, exists_ok=exists_ok)
    cluster.get_lost_parts(name).forget()
    made: list[tuple[int, str]] = []
    copies = placement.list_copies()

    def create(shard: int, server: int) -> None:
        if server in copies:
            record_copy(cluster.members, name, server, copies[server])
        create_part(shard, cluster.members.get(server))
        made.append((server, name_part(name, shard)))

    try:
        calls = {server: partial(create, shard, server) for shard, server in enumerate(placement.servers)}
        made_at, lost = cluster.members.ask_all(calls, reach_s=REACH_S if exists else math.inf)
    except Exception:  # also of wrong arguments
        if not exists_ok:  # otherwise it is unknown which of them this call has made
            with within(Deadline.after(UNDO_TIMEOUT_S)):
                _take_back(cluster, name, uid, made, copies)
        raise
    if lost and not (exists and made_at):
        raise min(lost.values(), key=lambda each: isinstance(each, ConnectError))  # by which nothing was sent
    owner = placement.owner
    if placement.is_copy and owner in made_at and name not in cluster.members.get(owner):  # its disk was lost
        create_record(cluster.members.get(owner), name, replace(placement, copy_at=None))


def _take_back(
    cluster: ClusterServers, name: str, uid: str, made: Iterable[tuple[int, str]], copies: Iterable[int]
) -> None:
    """Deletes what was made of a store, as far as the servers answer; nothing if another client has deleted it and made
    its own.

    Args:
        uid: Incarnation of the record that was made.
    """
    found = dict[tuple[int, str], str]()
    for server, part in made:
        with suppress(TransportError, DeadlineExceededError):
            known = find_here(cluster.members.get(server), part)
            if isinstance(known, StoreDescription):
                found[server, part] = known.uid
    owner = None
    with suppress(TransportError, DeadlineExceededError):
        owner = cluster.members.get(cluster.directory.find(name).server)
        record = find_here(owner, name)  # after the parts: what was found of them is of no later record
        if record is not None and (not isinstance(record, StoreDescription) or record.uid != uid):
            return
    for (server, part), part_uid in found.items():
        with suppress(TransportError, DeadlineExceededError, StoreNotFoundError):
            delete_store(cluster.members.get(server), part, uid=part_uid)
    for server in copies:
        with suppress(TransportError, DeadlineExceededError):  # a copy without its record is removed when it is found
            delete_copy(cluster.members, name, server)
    if owner is not None:
        with suppress(TransportError, DeadlineExceededError, StoreNotFoundError):
            delete_record(owner, name, uid=uid)
    cluster.directory.forget(name)


def check_answers(members: Members, name: str, placement: PlacementRecord) -> None:
    """Raises ConnectError if the server of a shard does not answer, or the one that has the record."""
    owner = () if placement.owner is None else (placement.owner,)
    role = f"one of those of {name!r}"
    _, lost = members.ask_all(
        {server: partial(members.check_answers, server, role) for server in {*placement.servers, *owner}}
    )
    for error in lost.values():
        raise error


def delete_parts(members: Members, name: str, placement: PlacementRecord) -> None:
    """Deletes all parts of a store, and the copies of its record; those that are gone already do not matter.

    Raises:
        ConnectError: A server does not answer. Nothing was deleted.
    """
    check_answers(members, name, placement)
    names = [(server, name_part(name, shard)) for shard, server in enumerate(placement.servers)]
    for server, part in [*names, (placement.servers[0], name_splits(name))]:
        client = members.get(server)
        if part in client:
            client.delete(part)
    for server in placement.list_copies():
        delete_copy(members, name, server)
