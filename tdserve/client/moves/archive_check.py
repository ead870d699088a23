"""Checks a place of checkpoints: every manifest, and every block by its digest."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tdserve.base.errors import TDServeError
from tdserve.client.moves.manifest import Checkpoint, list_blocks, list_ids, load, make_manifest_name, read_block
from tdserve.client.moves.server_checkpoints import Place, list_server_places
from tdserve.store.roots.archive import open_archive


@dataclass(frozen=True)
class LostCheckpoint:
    """A checkpoint that cannot be restored as a whole.

    Attributes:
        id: Its id.
        manifest: Where its manifest lies, or has lain until it was removed as damaged.
        stores: Names of its stores that lack a block; the others can be restored by name. None can if its manifest is
            damaged: then it names none.
    """

    id: str
    manifest: str
    stores: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArchiveReport:
    """What a check of checkpoints has found.

    Attributes:
        damaged: A line for each manifest or block that is missing or damaged.
        lost: The checkpoints to which they belong. Those with missing blocks are whole again once a later checkpoint
            has written these, which it does if its stores have the same content.
        num_removable: How many of the damaged ones are there, and not missing: a repair removes them.
        num_checkpoints: Checkpoints, damaged or not.
        num_blocks, num_all: Blocks that were read, and all.
        nbytes: Their size.
    """

    damaged: tuple[str, ...] = ()
    lost: tuple[LostCheckpoint, ...] = ()
    num_removable: int = 0
    num_checkpoints: int = 0
    num_blocks: int = 0
    num_all: int = 0
    nbytes: int = 0


def check_archive(
    place: Place, *, repairs: bool = False, on_progress: Callable[[ArchiveReport], None] = lambda _: None
) -> ArchiveReport:
    """Reads every checkpoint of a place, of a cluster those of every server.

    Args:
        repairs: Whether damaged blocks and manifests are removed. A later checkpoint writes such a block again if its
            stores still have that content; until then no checkpoint with that block can be restored as a whole. One
            without its manifest is gone.
        on_progress: Called after each block.

    Raises:
        InvalidRequestError: The URL names no file system that this process has.
    """
    report = _check(place, ArchiveReport(), on_progress, repairs=repairs)
    for below in list_server_places(place).values():
        report = _check(below, report, on_progress, repairs=repairs)
    return report


def _check(
    place: Place, report: ArchiveReport, show: Callable[[ArchiveReport], None], *, repairs: bool
) -> ArchiveReport:
    archive, found = open_archive(place), list[Checkpoint]()
    for checkpoint_id in list_ids(archive):
        report = replace(report, num_checkpoints=report.num_checkpoints + 1)
        try:
            found.append(load(archive, checkpoint_id, removes_damaged=repairs))
        except (TDServeError, ValueError, KeyError, TypeError) as error:
            line, lost = f"checkpoint {checkpoint_id}: {error}", _make_lost(place, checkpoint_id)
            report = _add_damage(report, line, is_removable=True, lost=(*report.lost, lost))
    needed = {digest: made.id for made in found for digest in made.list_digests()}
    report = replace(report, num_all=report.num_all + len(needed))
    present, missing = list_blocks(archive), set[str]()
    for digest, checkpoint_id in sorted(needed.items()):
        try:
            content = read_block(archive, digest, removes_damaged=repairs)
            report = replace(report, nbytes=report.nbytes + len(content))
        except TDServeError as error:
            missing.add(digest)
            line = f"a block of checkpoint {checkpoint_id}, and maybe of others: {error}"
            report = _add_damage(report, line, is_removable=digest in present, lost=report.lost)
        report = replace(report, num_blocks=report.num_blocks + 1)
        show(report)
    lacking = [_make_lost(place, made.id, stores) for made in found if (stores := made.list_stores_of(missing))]
    return replace(report, lost=(*report.lost, *lacking))


def _add_damage(
    report: ArchiveReport, line: str, *, is_removable: bool, lost: tuple[LostCheckpoint, ...]
) -> ArchiveReport:
    num_removable = report.num_removable + is_removable
    return replace(report, damaged=(*report.damaged, line), num_removable=num_removable, lost=lost)


def _make_lost(place: Place, checkpoint_id: str, stores: Sequence[str] = ()) -> LostCheckpoint:
    return LostCheckpoint(checkpoint_id, f"{os.fspath(place)}/{make_manifest_name(checkpoint_id)}", tuple(stores))
