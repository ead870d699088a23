"""The folders of a store's non-tensor values, and their compaction into one without free pages.

An environment never returns pages to the disk. So at a start of the server, when no process writes, an environment with
many free pages is copied into a new folder: ``objects`` becomes ``objects.1``, that ``objects.2``. The number in the
generation file shows which folder counts. Raising it is the one step that replaces the old folder, and readers that
still have the old one open see it there. LMDB's two files are never replaced within a folder: readers of the old
environment and the writer of the new one would share one lock file.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tdserve.store.database import environments
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.files import sync_file
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.values.pinned_values import PinnedValues

NAME = "objects"

MIN_UNUSED_BYTES = 1 << 20
"""Fewer free bytes than this are left as they are: opening an environment costs more."""

MIN_UNUSED_SHARE = 0.25
"""Least free share of a file: below it a copy would write much and free little."""


def get_folder(store_folder: Path, epoch: int) -> Path:
    """Returns the folder of a store's non-tensor values, by the number in its generation file."""
    return store_folder / (f"{NAME}.{epoch}" if epoch else NAME)


def is_of_values(path: bytes) -> bool:
    """Returns whether a path below a store's folder is in one of these folders."""
    return path.partition(b"/")[0].partition(b".")[0] == NAME.encode()


def has_values(store_folder: Path) -> bool:
    """Returns whether a store has ever had non-tensor values."""
    return any(store_folder.glob(f"{NAME}*"))


def list_folders(store_folder: Path) -> list[Path]:
    """Returns every folder that ever had the values and still exists."""
    return [path for path in store_folder.glob(f"{NAME}*") if path.name.partition(".")[0] == NAME]


def count_bytes(store_folder: Path, epoch: int) -> int:
    """Returns the size of the values on disk, free pages included; 0 before there are any."""
    return _count_file_bytes(get_folder(store_folder, epoch))


def compact(store_folder: Path, uid: str) -> int:
    """Moves a store's non-tensor values to a folder without free pages, if that is worth it.

    Call it when no process of the server has the store open. A crash at any moment leaves the values unchanged, in the
    old folder or in the new one; the next call removes the other.

    Args:
        store_folder: Folder of the store.
        uid: Incarnation of the store.

    Returns:
        Freed bytes; 0 if nothing moved.

    Raises:
        CapacityError: There is no room for the copy. The values stay where they are.
        CorruptDataError: The store's files are missing or damaged; nothing was changed.
    """
    folders = list_folders(store_folder)
    if not any(_count_file_bytes(path) >= MIN_UNUSED_BYTES for path in folders) and len(folders) <= 1:
        return 0
    generations = Generations.open(store_folder / GENERATION_FILE, uid=uid, writable=True)
    try:
        epoch = generations.objects_epoch
        old, new = get_folder(store_folder, epoch), get_folder(store_folder, epoch + 1)
        with convert_os_errors(store_folder):
            for path in folders:
                if path != old:
                    shutil.rmtree(path)
        if _count_file_bytes(old) < MIN_UNUSED_BYTES:
            return 0
        try:
            with PinnedValues(old) as values:
                if values.count_unused_bytes() < max(MIN_UNUSED_BYTES, MIN_UNUSED_SHARE * _count_file_bytes(old)):
                    return 0
                values.copy(new)
            sync_file(new)
            sync_file(store_folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        num_bytes = _count_file_bytes(old) - _count_file_bytes(new)
        generations.move_objects(epoch + 1)
        with convert_os_errors(old):
            shutil.rmtree(old)
        return num_bytes
    finally:
        generations.close()


def _count_file_bytes(folder: Path) -> int:
    try:
        return (folder / environments.DATA_FILE).stat().st_size
    except FileNotFoundError:
        return 0
