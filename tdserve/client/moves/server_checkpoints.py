"""Checkpoints of one server at a place: written, listed and brought back."""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike

from tdserve.base.deadline import Deadline
from tdserve.base.errors import CorruptDataError
from tdserve.base.integers import check_integer
from tdserve.client.moves.checkpoint_restore import OnRestore, restore_stores
from tdserve.client.moves.checkpoint_writer import OnCheckpoint, write_checkpoint
from tdserve.client.moves.manifest import Checkpoint, keep_newest, list_ids, load
from tdserve.client.session.session_client import SessionClient
from tdserve.store.archive import open_archive

CHECKPOINT_TIMEOUT_S = 3600.0
"""Default timeout of a checkpoint and of its restore: those of large stores take minutes."""

Place = str | PathLike[str]


def checkpoint_server(
    client: SessionClient, place: Place, *, keep: int | None, deadline: Deadline, on_progress: OnCheckpoint
) -> Checkpoint:
    """Writes a checkpoint; see ``Client.checkpoint``."""
    if keep is not None:
        check_integer("keep", keep, 1)
    archive = open_archive(place)
    names = client.catalog.stores()
    made = write_checkpoint(client, names, archive, deadline=deadline, on_progress=on_progress)
    if keep is not None:
        keep_newest(archive, keep)
    return made


def restore_server(
    client: SessionClient,
    place: Place,
    *,
    checkpoint: str | None,
    names: Collection[str] | None,
    prefix: str,
    deadline: Deadline,
    on_progress: OnRestore,
) -> list[str]:
    """Brings stores of a checkpoint back; see ``Client.restore``."""
    archive = open_archive(place)
    return restore_stores(
        client,
        archive,
        load(archive, checkpoint or find_newest(place)),
        names=names,
        prefix=prefix,
        taken=set(client.catalog.stores()),
        deadline=deadline,
        on_progress=on_progress,
    )


def find_newest(place: Place) -> str:
    """Returns the id of the newest checkpoint of a place. Raises CorruptDataError if there is none."""
    ids = list_ids(open_archive(place))
    if not ids:
        raise CorruptDataError(path=str(place), expected="a checkpoint", actual="none")
    return ids[-1]


def list_checkpoints(place: Place) -> list[Checkpoint]:
    """Returns the checkpoints of a place, the oldest first; of a cluster, those below ``place/server-0`` and so on.

    Args:
        place: Path of a folder, or a URL of fsspec.

    Raises:
        CorruptDataError: The manifest of one is damaged.
    """
    archive = open_archive(place)
    return [load(archive, each) for each in list_ids(archive)]
