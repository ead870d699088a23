"""The files of versions: their paths, and their removal when no reader needs the version any more.

What a store leaves under way ends after it, and finds the next store of its name at the same path. So nothing of a
store that is gone touches a file with a number: the next store counts from 1 too.
"""

from __future__ import annotations

from pathlib import Path

from tdserve.rules.weights import UnfinishedVersion
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.store.weights.version_names import SUFFIX, discard, give_number, make_unfinished_name, retire


def make_path(store: OpenedStore, version: int) -> Path:
    """Returns the path of a version's file."""
    return store.folder / "versions" / f"{version}{SUFFIX}"


def make_unfinished_path(store: OpenedStore, publishing: UnfinishedVersion) -> Path:
    """Returns the path of the file of a version that has no number yet."""
    return make_unfinished_name(store.folder / "versions", publishing.name)


def finish(store: OpenedStore, publishing: UnfinishedVersion, number: int) -> None:
    """Gives the whole file of a version the name that readers look for. Raises CorruptDataError if there is none."""
    give_number(make_unfinished_path(store, publishing), make_path(store, number))


def abandon(store: OpenedStore, publishing: UnfinishedVersion) -> None:
    """Deletes the file of a version that gets no number. Its name is of this version alone, and so is what a worker has
    made under it after the store was gone."""
    discard(make_unfinished_path(store, publishing))


def retire_unread(store: OpenedStore, version: int) -> None:
    """Retires a version's file if no session reads the version: a reader may not have opened the file yet."""
    if not store.waiters.is_gone and not store.get_versions().count_readers(version):
        retire(make_path(store, version))


def drop(store: OpenedStore, numbers: tuple[int, ...]) -> None:
    """Deletes the files of versions."""
    for number in () if store.waiters.is_gone else numbers:
        discard(make_path(store, number))


def release_version(store: OpenedStore, version: int) -> None:
    """Ends ``Versions.acquire``. The file of a version that is neither kept nor read is retired or deleted."""
    versions = store.get_versions()
    drops = versions.release(version)
    if all(record.version != version for record in versions.kept):
        retire_unread(store, version)
    drop(store, drops)
