"""Checkpoints of several servers: one of each, below a place of all."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ConnectError, InvalidRequestError
from tdserve.client.cluster.members import Members
from tdserve.client.moves.checkpoint_restore import OnRestore
from tdserve.client.moves.checkpoint_writer import OnCheckpoint
from tdserve.client.moves.manifest import Checkpoint, load_newest
from tdserve.client.moves.server_checkpoints import Place, checkpoint_server, find_server_place, restore_server
from tdserve.store.archive import open_archive


def checkpoint_cluster(
    members: Members, place: Place, *, keep: int | None, deadline: Deadline, on_progress: OnCheckpoint
) -> list[Checkpoint]:
    """Writes a checkpoint of each server at the same time; see ``ClusterClient.checkpoint``."""
    calls = {
        server: partial(
            checkpoint_server,
            members.get(server),
            find_server_place(place, server),
            keep=keep,
            deadline=deadline,
            on_progress=on_progress,
        )
        for server in range(len(members))
    }
    made, lost = members.ask_all(calls, reach_s=deadline.remaining_s or 0.0)
    if lost:
        raise ConnectError(address=members.membership.text, reason=f"servers {sorted(lost)} do not answer")
    return [made[server] for server in range(len(members))]


def restore_cluster(
    members: Members,
    place: Place,
    *,
    names: Collection[str] | None,
    deadline: Deadline,
    on_progress: OnRestore,
) -> list[str]:
    """Brings the stores of the newest checkpoints back, each to the server of its number; see
    ``ClusterClient.restore``."""
    found = [load_newest(open_archive(find_server_place(place, server))) for server in range(len(members) + 1)]
    newest_of = [each for each in found[:-1] if each is not None]
    if len(newest_of) != len(members) or found[-1] is not None:
        reason = f"{os.fspath(place)} has checkpoints of another number of servers than the {len(members)} given here"
        raise InvalidRequestError(argument="place", reason=reason)
    restored: set[str] = set()
    for server, newest in enumerate(newest_of):
        chosen = None if names is None else [each.name for each in newest.stores if _is_part(each.name, names)]
        restored.update(
            restore_server(
                members.get(server),
                find_server_place(place, server),
                checkpoint=newest.id,
                names=chosen,
                prefix="",
                deadline=deadline,
                on_progress=on_progress,
            )
        )
    return sorted(restored)


def _is_part(name: str, wholes: Collection[str]) -> bool:
    return name.partition("#")[0] in wholes
