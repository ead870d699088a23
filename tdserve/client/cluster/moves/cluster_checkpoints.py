"""Checkpoints of several servers: one of each, below a place of all.

``server/README.md`` has a reading order of checkpoints.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import NamedTuple, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    InvalidRequestError,
    StoreExistsError,
    StoreNotFoundError,
    TDServeError,
    WrongStateError,
)
from tdserve.base.ids import make_uid
from tdserve.client.cluster.servers.directory import Directory
from tdserve.client.cluster.servers.members import Members
from tdserve.client.cluster.servers.part_errors import make_unanswered_error
from tdserve.client.cluster.servers.placement_records import record_forwards
from tdserve.client.moves.checkpoint_choice import name_another
from tdserve.client.moves.checkpoint_restore import MAX_NAMED, RestoreOptions, restore_stores, take_back
from tdserve.client.moves.checkpoint_writer import OnCheckpoint
from tdserve.client.moves.manifest import Checkpoint, get_uid, list_ids, load, remove_checkpoint
from tdserve.client.moves.server_checkpoints import (
    Place,
    check_keep,
    find_server_place,
    keep_newest_of,
    write_server,
)
from tdserve.client.session.calls.call_deadline import within
from tdserve.rules.placement import DIRECTORY, find_whole
from tdserve.store.roots.archive import Archive, open_archive

_Result = TypeVar("_Result")

MAX_ATTEMPTS = 5
"""Checkpoints that are written until one lacks no store that moves from server to server meanwhile."""


def checkpoint_cluster(
    members: Members,
    directory: Directory,
    place: Place,
    *,
    keep: int | None,
    deadline: Deadline,
    on_progress: OnCheckpoint,
) -> list[Checkpoint]:
    """Writes a checkpoint of each server at the same time; see ``ClusterClient.checkpoint``."""
    check_keep(keep)
    before = _list_names(members, deadline)
    failed: list[_CheckpointOfEach] = []
    while True:
        attempt = _CheckpointOfEach(members, place)
        made = attempt.write(deadline, on_progress)
        kept = {name for each in made for name in (*each.left_out, *(store.name for store in each.stores))}
        missing = [name for name in sorted(before - kept) if directory.has_store(name, deadline)]
        if not missing:
            break
        failed.append(attempt)
        if deadline.expired or len(failed) == MAX_ATTEMPTS:
            break
    for each in failed:  # now, since the later ones had their blocks from them
        each.take_back()
    if missing:
        state = f"{', '.join(missing[:MAX_NAMED])} moved to another server each time that one was written"
        raise WrongStateError(state=state, event="a checkpoint of the cluster; nothing was kept of it")
    for server, of_server in enumerate(made):
        keep_newest_of(find_server_place(place, server), of_server, keep)
    return made


class _CheckpointOfEach:
    """Checkpoints of all servers, written at the same time: all of them, or none stays.

    Args:
        members: The servers.
        place: Where the places of the servers are.
    """

    def __init__(self, members: Members, place: Place) -> None:
        self._members = members
        self._place = place
        self._uid = make_uid()
        self._lock = Lock()
        self._is_taken_back = False
        self._made: dict[int, Checkpoint] = {}

    def write(self, deadline: Deadline, on_progress: OnCheckpoint) -> list[Checkpoint]:
        """Writes them, and returns them by server. Errors as in ``_ask_each`` and ``write_server``; none stays then."""
        write = partial(self._write_server, deadline=deadline, on_progress=on_progress)
        calls = {server: partial(write, server) for server in range(len(self._members))}
        try:
            return _ask_each(self._members, calls, deadline)
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """Removes them, and what is written later. Their blocks go with the next ones that retention removes."""
        with self._lock:
            self._is_taken_back = True
            made = dict(self._made)
        for server, each in made.items():
            self._remove(server, each)

    def _write_server(self, server: int, *, deadline: Deadline, on_progress: OnCheckpoint) -> Checkpoint:
        client, place = self._members.get(server), find_server_place(self._place, server)
        made = write_server(client, place, uid=self._uid, deadline=deadline, on_progress=on_progress)
        with self._lock:
            self._made[server] = made
            is_late = self._is_taken_back  # the call had given this server up
        if is_late:
            self._remove(server, made)
        return made

    def _remove(self, server: int, made: Checkpoint) -> None:
        with suppress(TDServeError):  # it is not in the way: others of its moment are missing
            remove_checkpoint(open_archive(find_server_place(self._place, server)), made.id)


def _list_names(members: Members, deadline: Deadline) -> set[str]:
    calls = {server: members.get(server).catalog.list_with_moved for server in range(len(members))}
    return {name for listed, moved in _ask_each(members, calls, deadline) for name in (*listed, *moved)}


def _ask_each(members: Members, calls: Mapping[int, Callable[[], _Result]], deadline: Deadline) -> list[_Result]:
    """Returns the answers of all servers. Errors as in ``make_unanswered_error`` if one does not answer."""
    found, lost = members.ask_all(calls, reach_s=math.inf, deadline=deadline)
    if lost:
        raise make_unanswered_error(lost, f"servers {sorted(lost)}", members.membership.text, deadline)
    return [found[server] for server in sorted(found)]


def restore_cluster(members: Members, place: Place, options: RestoreOptions) -> list[str]:
    """Brings the stores of a checkpoint of all servers back, each to the server of its number; see
    ``ClusterClient.restore``."""
    names = options.list_names()
    taken = _list_names(members, options.deadline)
    ids = _find_ids(members, place, options.checkpoint)
    found = [(each, open_archive(find_server_place(place, server))) for server, each in enumerate(ids)]
    with name_another(found):
        chosen = {server: _choose(archive, each, names) for server, (each, archive) in enumerate(found)}
        _drop_doubles(chosen)
        _check_names(chosen.values(), names or (), options.prefix, taken)
        return _restore_chosen(members, chosen, partial(restore_stores, options=options, taken=taken), options.deadline)


def _restore_chosen(
    members: Members, chosen: Mapping[int, _Chosen], restore: Callable[..., dict[str, str]], deadline: Deadline
) -> list[str]:
    restored: dict[int, dict[str, str]] = {}
    try:
        for server, each in chosen.items():
            restored[server] = restore(members.get(server), each.archive, each.checkpoint, names=each.names)
        with within(deadline):
            record_forwards(members, restored)
    except BaseException:  # as with one server: nothing stays
        for server, made in restored.items():
            take_back(members.get(server), made)
        raise
    return sorted({_get_whole(name) for made in restored.values() for name in made})


class _Chosen(NamedTuple):
    """What comes back to a server.

    Attributes:
        archive: Where its checkpoints are.
        checkpoint: One of them.
        names: Names of its stores that come back.
    """

    archive: Archive
    checkpoint: Checkpoint
    names: list[str]


def _choose(archive: Archive, checkpoint_id: str, wanted: Collection[str] | None) -> _Chosen:
    """Reads a server's checkpoint. Raises CorruptDataError."""
    found = load(archive, checkpoint_id)
    stores = [each.name for each in found.stores if each.name != DIRECTORY]  # which the servers keep by themselves
    return _Chosen(archive, found, [each for each in stores if wanted is None or _get_whole(each) in wanted])


def _drop_doubles(chosen: Mapping[int, _Chosen]) -> None:
    """Leaves the latest of each store that several servers' checkpoints have, since it moved between their moments. The
    record of a shared store, and its copies, belong to several servers."""
    latest = {
        store.name: server
        for server in sorted(chosen, key=lambda server: chosen[server].checkpoint.created_s)
        for store in chosen[server].checkpoint.stores
    }
    for server, each in chosen.items():
        shared = {store.name for store in each.checkpoint.stores if store.kind == "placement"}
        each.names[:] = [name for name in each.names if name in shared or latest[name] == server]


def _check_names(chosen: Collection[_Chosen], wanted: Collection[str], prefix: str, taken: Collection[str]) -> None:
    """Raises StoreNotFoundError or StoreExistsError before anything is restored; ``taken`` are the names of all
    servers' stores."""
    there = {name for each in chosen for name in each.names}
    missing = sorted({*wanted} - there - {_get_whole(each) for each in there})
    if missing:
        raise StoreNotFoundError(name=missing[0])
    for each in chosen:
        for name in each.names:
            if prefix + name in taken:
                raise StoreExistsError(name=prefix + name)


def _find_ids(members: Members, place: Place, checkpoint: str | None) -> list[str]:
    """Returns the ids of the checkpoints of each server that were written at the same time: of the newest such, if none
    is given; and the newest of each if no two were, as when each server writes its own."""
    ids = [list_ids(open_archive(find_server_place(place, server))) for server in range(len(members) + 1)]
    if not any(ids):
        reason = f"there are no checkpoints of servers at {os.fspath(place)}"
        raise InvalidRequestError(argument="place", reason=reason)
    if ids[-1]:
        reason = f"{os.fspath(place)} has checkpoints of more servers than the {len(members)} given here"
        raise InvalidRequestError(argument="place", reason=reason)
    while not ids[-1]:  # of servers that have joined since
        ids.pop()
    if not all(ids):
        raise InvalidRequestError(argument="place", reason=f"{os.fspath(place)} has none of server {ids.index([])}")
    by_uid = [{get_uid(each): each for each in of_server} for of_server in ids]
    common = [uid for uid in by_uid[0] if all(uid in each for each in by_uid)]
    if checkpoint is not None:
        uid = get_uid(checkpoint)
        if uid not in common or checkpoint not in {each[uid] for each in by_uid}:
            known = ", ".join(by_uid[0][each] for each in common[-MAX_NAMED:]) or "none of all servers"
            reason = f"{os.fspath(place)} has no checkpoint {checkpoint!r} of all servers; it has {known}"
            raise InvalidRequestError(argument="checkpoint", reason=reason)
        return [each[uid] for each in by_uid]
    return [each[common[-1]] for each in by_uid] if common else [each[-1] for each in ids]


def _get_whole(name: str) -> str:
    return find_whole(name) or name
