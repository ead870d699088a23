"""Where a version's file lies, and what becomes of it when nobody needs the version any more."""

from __future__ import annotations

from pathlib import Path

from tdserve.server.opened_store import OpenedStore
from tdserve.store.version_names import SUFFIX, discard, retire


def path_of(entry: OpenedStore, version: int) -> Path:
    """The file of a version."""
    return entry.folder / "versions" / f"{version}{SUFFIX}"


def retire_unread(entry: OpenedStore, version: int) -> None:
    """Takes a version's file out of sight once nobody reads it: a reader may not have opened it yet."""
    if not entry.weight_versions().num_readers(version):
        retire(path_of(entry, version))


def drop(entry: OpenedStore, numbers: tuple[int, ...]) -> None:
    """Removes the files of versions."""
    for number in numbers:
        discard(path_of(entry, number))


def let_go(entry: OpenedStore, version: int) -> None:
    """Ends ``Versions.acquire``: a version that is not kept any more, and that nobody reads, makes room."""
    versions = entry.weight_versions()
    drops = versions.release(version)
    if all(record.version != version for record in versions.kept):
        retire_unread(entry, version)
    drop(entry, drops)
