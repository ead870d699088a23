"""Checks a place of checkpoints: every manifest, and every block by its digest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from tdserve.base.errors import TDServeError
from tdserve.client.moves.manifest import list_ids, load, read_block
from tdserve.client.moves.server_checkpoints import Place, find_server_place
from tdserve.store.archive import Archive, open_archive


@dataclass(frozen=True)
class ArchiveReport:
    """What a check of checkpoints has found.

    Attributes:
        damaged: A line for each manifest or block that is missing or damaged.
        num_checkpoints: Checkpoints, damaged or not.
        num_blocks, num_all: Blocks that were read, and all.
        nbytes: Their size.
    """

    damaged: tuple[str, ...] = ()
    num_checkpoints: int = 0
    num_blocks: int = 0
    num_all: int = 0
    nbytes: int = 0


def check_archive(
    place: Place, *, repairs: bool = False, on_progress: Callable[[ArchiveReport], None] = lambda _: None
) -> ArchiveReport:
    """Reads every checkpoint of a place, of a cluster those of every server.

    Args:
        repairs: Whether damaged blocks and manifests are removed, so that the next checkpoint that needs the blocks
            writes them again. Earlier checkpoints with such a block cannot be restored before that, and those with such
            a manifest never.
        on_progress: Called after each block.

    Raises:
        InvalidRequestError: The URL names no file system that this process has.
    """
    report = _check(open_archive(place), ArchiveReport(), on_progress, repairs=repairs)
    for server in count():
        archive = open_archive(find_server_place(place, server))
        if not list_ids(archive):
            return report
        report = _check(archive, report, on_progress, repairs=repairs)
    raise AssertionError


def _check(
    archive: Archive, report: ArchiveReport, show: Callable[[ArchiveReport], None], *, repairs: bool
) -> ArchiveReport:
    needed: dict[str, str] = {}
    for checkpoint_id in list_ids(archive):
        report = replace(report, num_checkpoints=report.num_checkpoints + 1)
        try:
            needed |= dict.fromkeys(load(archive, checkpoint_id, removes_damaged=repairs).list_digests(), checkpoint_id)
        except (TDServeError, ValueError, KeyError, TypeError) as error:
            report = replace(report, damaged=(*report.damaged, f"checkpoint {checkpoint_id}: {error}"))
    report = replace(report, num_all=report.num_all + len(needed))
    for digest, checkpoint_id in sorted(needed.items()):
        try:
            content = read_block(archive, digest, removes_damaged=repairs)
            report = replace(report, nbytes=report.nbytes + len(content))
        except TDServeError as error:
            line = f"a block of checkpoint {checkpoint_id}, and maybe of others: {error}"
            report = replace(report, damaged=(*report.damaged, line))
        report = replace(report, num_blocks=report.num_blocks + 1)
        show(report)
    return report
