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
from tdserve.client.moves.manifest import Checkpoint
from tdserve.client.moves.server_checkpoints import Place, checkpoint_server, list_checkpoints, restore_server


def checkpoint_cluster(
    members: Members, place: Place, *, keep: int | None, deadline: Deadline, on_progress: OnCheckpoint
) -> list[Checkpoint]:
    """Writes a checkpoint of each server at the same time; see ``ClusterClient.checkpoint``."""
    calls = {
        server: partial(
            checkpoint_server,
            members.get(server),
            find_place(place, server),
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
    found = [list_checkpoints(find_place(place, server)) for server in range(len(members) + 1)]
    num_servers = sum(bool(each) for each in found)
    if num_servers != len(members) or found[-1]:
        reason = f"{os.fspath(place)} has checkpoints of another number of servers than the {len(members)} given here"
        raise InvalidRequestError(argument="place", reason=reason)
    restored: set[str] = set()
    for server, checkpoints in enumerate(found[:-1]):
        newest = checkpoints[-1]
        chosen = None if names is None else [each.name for each in newest.stores if _is_part(each.name, names)]
        restored.update(
            restore_server(
                members.get(server),
                find_place(place, server),
                checkpoint=newest.id,
                names=chosen,
                prefix="",
                deadline=deadline,
                on_progress=on_progress,
            )
        )
    return sorted(restored)


def find_place(place: Place, server: int) -> str:
    """Returns the place of a server's checkpoints."""
    return f"{os.fspath(place)}/server-{server}"


def _is_part(name: str, wholes: Collection[str]) -> bool:
    return name.partition("#")[0] in wholes
