"""The files of versions: their paths, and their removal when nobody needs the version any more."""

from __future__ import annotations

from pathlib import Path

from tdserve.server.opened_store import OpenedStore
from tdserve.store.version_names import SUFFIX, discard, retire


def make_path(entry: OpenedStore, version: int) -> Path:
    """Returns the path of a version's file."""
    return entry.folder / "versions" / f"{version}{SUFFIX}"


def retire_unread(entry: OpenedStore, version: int) -> None:
    """Retires a version's file if nobody reads the version: a reader may not have opened the file yet."""
    if not entry.get_versions().num_readers(version):
        retire(make_path(entry, version))


def drop(entry: OpenedStore, numbers: tuple[int, ...]) -> None:
    """Deletes the files of versions."""
    for number in numbers:
        discard(make_path(entry, number))


def let_go(entry: OpenedStore, version: int) -> None:
    """Ends ``Versions.acquire``. The file of a version that is neither kept nor read is retired or deleted."""
    versions = entry.get_versions()
    drops = versions.release(version)
    if all(record.version != version for record in versions.kept):
        retire_unread(entry, version)
    drop(entry, drops)
