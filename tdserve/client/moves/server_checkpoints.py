"""Checkpoints of one server at a place: written, listed and brought back.

``server/README.md`` has a reading order of checkpoints.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from os import PathLike

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, TDServeError
from tdserve.base.ids import make_uid
from tdserve.base.integers import check_integer
from tdserve.client.moves.checkpoint_choice import name_another
from tdserve.client.moves.checkpoint_restore import MAX_NAMED, RestoreOptions, restore_stores
from tdserve.client.moves.checkpoint_writer import OnCheckpoint, write_checkpoint
from tdserve.client.moves.manifest import Checkpoint, keep_newest, list_ids, list_with_damage, load, load_newest
from tdserve.client.moves.move_steps import request_checkpoint_step
from tdserve.client.session.session_client import SessionClient
from tdserve.rules.placement import find_whole
from tdserve.store.roots.archive import check_outside_roots, open_archive
from tdserve.v1 import control_pb2

CHECKPOINT_TIMEOUT_S = 3600.0
"""Default timeout of a checkpoint and of its restore: those of large stores take minutes."""

Place = str | PathLike[str]

_SERVER = re.compile(r"server-(0|[1-9][0-9]*)")
"""Name of the folder of a cluster's server."""


def check_keep(keep: int | None) -> None:
    """Raises InvalidRequestError if that is no number of checkpoints that are kept; None keeps all."""
    if keep is not None:
        check_integer("keep", keep, 1)


def keep_newest_of(place: Place, made: Checkpoint, keep: int | None) -> None:
    """Removes all checkpoints of the root of one but the newest; other arguments as in ``Client.checkpoint``."""
    if keep is not None:
        keep_newest(open_archive(place), keep, server_id=made.server_id)


def checkpoint_server(
    client: SessionClient, place: Place, *, keep: int | None, deadline: Deadline, on_progress: OnCheckpoint
) -> Checkpoint:
    """Writes a checkpoint, and removes old ones; see ``Client.checkpoint``."""
    check_keep(keep)
    made = write_server(client, place, uid=make_uid(), deadline=deadline, on_progress=on_progress)
    keep_newest_of(place, made, keep)
    return made


def write_server(
    client: SessionClient, place: Place, *, uid: str, deadline: Deadline, on_progress: OnCheckpoint
) -> Checkpoint:
    """Writes a checkpoint of a server.

    Args:
        uid: What those of all servers of a cluster have in their ids that are written at the same time.
    """
    check_outside_roots(place)
    archive = open_archive(place)
    names = client.catalog.stores(timeout_s=deadline.remaining_s)
    server_id = client.catalog.get_server_stats(timeout_s=deadline.remaining_s).server_id
    made = write_checkpoint(
        client, names, archive, server_id=server_id, uid=uid, deadline=deadline, on_progress=on_progress
    )
    with suppress(TDServeError):  # it is there, whatever the server knows of it
        report_checkpoint(client, made, deadline=deadline)
    return made


def report_checkpoint(client: SessionClient, made: Checkpoint, *, deadline: Deadline) -> None:
    """Reports to a server the newest checkpoint of it, whose age its figures show from then on."""
    report = control_pb2.CheckpointReport(id=made.id, age_s=max(time.time() - made.created_s, 0.0))
    request_checkpoint_step(client, deadline=deadline, report=report)


def find_newest_of(place: Place, server_id: str) -> Checkpoint | None:
    """Returns the newest checkpoint of a server that a place has and that can be read; None if there is none."""
    return load_newest(open_archive(place), server_id)


def restore_server(client: SessionClient, place: Place, options: RestoreOptions) -> list[str]:
    """Brings stores of a checkpoint back; see ``Client.restore``."""
    archive = open_archive(place)
    names = options.list_names()
    checkpoint_id = find_id(place, options.checkpoint)
    with name_another([(checkpoint_id, archive)]):
        found = load(archive, checkpoint_id)
        parts = [each.name for each in found.stores if find_whole(each.name) in (names or ())]
        restored = restore_stores(
            client,
            archive,
            found,
            options,
            names=None if names is None else [*names, *parts],
            taken=set(client.catalog.stores(timeout_s=options.deadline.remaining_s)),
        )
    return sorted(restored)


def find_id(place: Place, checkpoint: str | None) -> str:
    """Returns the id of a checkpoint of a place: the newest if none is given.

    Raises:
        InvalidRequestError: The place has no such checkpoint, or none at all.
    """
    ids = list_ids(open_archive(place))
    if not ids:
        first = next((each for each in list_server_places(place).values() if list_ids(open_archive(each))), "")
        of_cluster = f"; {first} has: connect to all servers to restore {place}" if first else ""
        raise InvalidRequestError(argument="place", reason=f"{place} has no checkpoint{of_cluster}")
    if checkpoint is not None and checkpoint not in ids:
        reason = f"{place} has no checkpoint {checkpoint!r}; it has {', '.join(ids[-MAX_NAMED:])}"
        raise InvalidRequestError(argument="checkpoint", reason=reason)
    return checkpoint or ids[-1]


def find_server_place(place: Place, server: int) -> str:
    """Returns the place of the checkpoints of a cluster's server."""
    return f"{os.fspath(place)}/server-{server}"


def list_server_places(place: Place) -> dict[int, str]:
    """Returns the places of servers that are there below that of a cluster, by the numbers of the servers."""
    found = map(_SERVER.fullmatch, open_archive(place).list_folders())
    return {server: find_server_place(place, server) for server in sorted(int(each[1]) for each in found if each)}


def check_exists(place: Place) -> None:
    """Raises InvalidRequestError if nothing at all is at a place, which is probably misspelt."""
    if not open_archive(place).exists():
        reason = f"there is no {os.fspath(place)}, so that no checkpoint was ever written to it; check its name"
        raise InvalidRequestError(argument="place", reason=reason)


def list_checkpoints(place: Place) -> list[Checkpoint]:
    """Returns the checkpoints of a place, the oldest first; of a cluster, those below ``place/server-0`` and so on.

    One whose manifest is damaged, or that lacks blocks or has them in another size, has that as its ``damage``, and
    cannot be restored; ``tdserve check PLACE`` finds damage of the blocks' content too. A place that is not there yet
    has none, as before the first checkpoint.

    Args:
        place: Path of a folder, or a URL of fsspec.
    """
    return list_with_damage(open_archive(place))
