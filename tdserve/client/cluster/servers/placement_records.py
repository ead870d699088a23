"""Records of where stores are: of those that several servers share, and of those that are not at their owner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial

from tdserve.base.errors import (
    ConnectError,
    StoreExistsError,
    StoreMovedError,
    StoreNotFoundError,
    TDServeError,
    TransportError,
)
from tdserve.base.ids import make_uid
from tdserve.client.client import Client
from tdserve.client.cluster.servers.members import Members
from tdserve.client.moves.move_steps import request_step
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.session.store_changes import create_store, delete_store
from tdserve.client.session.store_options import StoreOptions
from tdserve.rules.placement import DIRECTORY, PlacementRecord, choose_owner, find_whole
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2


def find_here(
    client: Client, name: str, *, timeout_s: float | None = None
) -> StoreDescription | StoreMovedError | None:
    """Returns what a server knows of a name, or that the store is at another server; None if it knows nothing.

    Args:
        timeout_s: For the end of a seal, too; 0 does not wait for it.

    Raises:
        StoreMovedError: The store is sealed, and perhaps about to move.
    """
    try:
        return client.catalog.find(name, timeout_s=timeout_s)
    except StoreMovedError as error:
        if error.server is None:
            raise
        return error


def create_record(client: Client, name: str, record: PlacementRecord, *, exists_ok: bool = False) -> str:
    """Makes a server record where a store is; returns the record's incarnation.

    Raises:
        StoreExistsError: It has a store of this name, or another record.
        StoreMovedError: It has a record that the store has moved.
    """
    empty = capture({}, store=name)
    request = StoreOptions(exists_ok, None, None).make_message(name, empty.spec, control_pb2.STORE_KIND_PLACEMENT)
    request.settings = record.to_json()
    return create_store(client, request, empty.spec)[0].uid


def record_copy(members: Members, name: str, server: int, copy: PlacementRecord) -> None:
    """Gives the server of a part a copy of the record of the whole store, unless it has this one. An owner of the name
    that knows at which server the record is keeps that, since a copy goes when the part does."""
    client = members.get(server)
    found = find_here(client, name)
    if found is None:
        create_record(client, name, copy, exists_ok=True)
    elif isinstance(found, StoreDescription) and found.settings != copy.to_json():
        request_step(client, name, place=copy.to_json())


def delete_record(client: Client, name: str, *, uid: str = "") -> None:
    """Deletes the record of a shared store, or a copy of it, at a server.

    Args:
        uid: Its incarnation; "" for any.

    Raises:
        StoreNotFoundError: There is none, or another incarnation.
    """
    delete_store(client, name, uid=uid, deletes_record=True)


def delete_copy(members: Members, name: str, server: int) -> None:
    """Deletes a server's copy of the record of a shared store, if it has one."""
    copy = _find_copy(members.get(server), name)
    if copy is not None:
        with suppress(StoreNotFoundError):  # it has gone meanwhile
            delete_record(members.get(server), name, uid=copy.uid)


def _find_copy(client: Client, name: str) -> StoreDescription | None:
    found = find_here(client, name)
    if not isinstance(found, StoreDescription) or found.kind != "placement":
        return None
    return found if PlacementRecord.from_json(found.settings).is_copy else None


def record_forwards(members: Members, stores: Mapping[int, Iterable[str]]) -> dict[int, TransportError]:
    """Makes the owners of names know which server has the store, where that is another one. An owner that knows
    anything of a name already keeps that.

    Args:
        stores: Names of stores by their server.

    Returns:
        The failures of servers that did not answer.

    Raises:
        PermissionDeniedError: The token does not grant such records.
    """
    forwards: dict[int, dict[str, int]] = {}
    for server, names in stores.items():
        for name in names:
            owner = choose_owner(name, len(members))
            if owner != server and find_whole(name) is None:
                forwards.setdefault(owner, {})[name] = server

    def record(owner: int) -> None:
        for name, server in forwards[owner].items():
            with suppress(StoreExistsError, StoreMovedError):
                if _find_copy(members.get(server), name) is None:
                    create_record(members.get(owner), name, PlacementRecord.make_forward(server, make_uid()))

    return members.ask_all({owner: partial(record, owner) for owner in forwards})[1]


class ForwardCheck:
    """Knows whether the owners of names know of all stores that are elsewhere, such as those that were made before a
    server joined. Otherwise a name could be created a second time while the server that has the store is away.

    Each server records for how many servers that was made sure of; the first client that creates a store while all
    servers answer does it. Threads: safe.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._is_complete = len(members) == 1

    def check_creation(self, name: str) -> None:
        """Makes sure that the owner of a name that it does not know may create a store.

        Raises:
            ConnectError: A server does not answer, and it may have a store of this name. Nothing was created.
        """
        if self._is_complete:
            return
        num_servers = len(self._members)
        alive = self._members.list_alive(range(num_servers))
        sizes, _ = self._members.ask_all({server: partial(self._read_size, server) for server in alive})
        known = {*sizes.values()}
        if known == {num_servers}:
            self._is_complete = True
        elif len(sizes) == num_servers:
            with suppress(
                TDServeError
            ):  # a token that does not grant it, or a server was lost: the next client does it
                self._is_complete = self._complete()
        elif any(known) and min(known) < num_servers:
            silent = min(set(range(num_servers)) - sizes.keys())
            reason = (
                f"server {silent} does not answer and may hold {name!r} from before there were {num_servers} servers; "
                "create it once while all servers answer"
            )
            raise ConnectError(address=self._members.describe_address(silent), reason=reason)

    def _read_size(self, server: int) -> int:
        """Returns for how many servers the records of one are complete; 0: for none."""
        found = self._members.get(server).catalog.find(DIRECTORY)
        return 0 if found is None else PlacementRecord.from_json(found.settings).num_shards

    def _complete(self) -> bool:
        """Makes the owners know of all stores; returns whether all servers took part."""
        servers = range(len(self._members))
        names, lost = self._members.ask_all({server: self._members.get(server).catalog.stores for server in servers})
        if lost:
            return False
        known = {server: {*names[server]} for server in servers}
        elsewhere = {
            server: [name for name in names[server] if name not in known[choose_owner(name, len(servers))]]
            for server in servers
        }
        if record_forwards(self._members, elsewhere):
            return False
        return not self._members.ask_all({server: partial(self._note_size, server) for server in servers})[1]

    def _note_size(self, server: int) -> None:
        client = self._members.get(server)
        if self._read_size(server) not in (0, len(self._members)):
            delete_record(client, DIRECTORY)
        note = PlacementRecord("directory", tuple(range(len(self._members))))
        create_record(client, DIRECTORY, note, exists_ok=True)
