"""In which folder a store's non-tensor values lie, and moving them to one without free pages.

An environment never gives pages back. So at a start of the server, when nobody writes, one with many free pages is
copied into a folder of its own: ``objects`` becomes ``objects.1``, that ``objects.2``. The number in the generation
file says which one counts; raising it is the one step by which the new folder takes the old one's place, and readers
that still have the old one open see it there. LMDB's two files are never replaced in a folder: readers of the old
one, and the writer of the new one, would share one lock file.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tdserve.store import environments
from tdserve.store.faults import os_faults
from tdserve.store.files import sync_file
from tdserve.store.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.objects import Objects

NAME = "objects"

MIN_UNUSED_BYTES = 1 << 20
"""Free pages of fewer bytes stay: looking at an environment costs more than they do."""

MIN_UNUSED_SHARE = 0.25
"""Of a file: below it a copy would write much to give back little."""


def current(store_folder: Path, epoch: int) -> Path:
    """The folder of a store's non-tensor values, by the number in its generation file."""
    return store_folder / (f"{NAME}.{epoch}" if epoch else NAME)


def exist(store_folder: Path) -> bool:
    """Whether a store has ever had non-tensor values."""
    return any(store_folder.glob(f"{NAME}*"))


def found(store_folder: Path) -> list[Path]:
    """Every folder that values were ever in and that is still there."""
    return [path for path in store_folder.glob(f"{NAME}*") if path.name.partition(".")[0] == NAME]


def num_bytes(store_folder: Path, epoch: int) -> int:
    """Bytes that the values take on the disk, free pages among them; 0 before there are any."""
    return _file_bytes(current(store_folder, epoch))


def compact(store_folder: Path, uid: str) -> int:
    """Moves a store's non-tensor values to a folder without free pages, where that is worth it.

    To be called when no process of the server has the store open. A crash at any moment leaves the values as they were,
    in the old folder or in the new one; the next call removes the other.

    Args:
        store_folder: Of the store.
        uid: Its incarnation.

    Returns:
        Bytes given back; 0 when nothing moved.

    Raises:
        CapacityError: There is no room for the copy. The values stay where they are.
        CorruptDataError: The store's files are missing or damaged; nothing was changed.
    """
    folders = found(store_folder)
    if not any(_file_bytes(path) >= MIN_UNUSED_BYTES for path in folders) and len(folders) <= 1:
        return 0
    generations = Generations.open(store_folder / GENERATION_FILE, uid=uid, writable=True)
    try:
        epoch = generations.objects_epoch
        old, new = current(store_folder, epoch), current(store_folder, epoch + 1)
        with os_faults(store_folder):
            for path in folders:
                if path != old:
                    shutil.rmtree(path)
        if not _is_worth_it(old):
            return 0
        try:
            with Objects(old) as objects:
                objects.copy(new)
            sync_file(new)
            sync_file(store_folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        num_bytes = _file_bytes(old) - _file_bytes(new)
        generations.move_objects(epoch + 1)
        with os_faults(old):
            shutil.rmtree(old)
        return num_bytes
    finally:
        generations.close()


def _is_worth_it(folder: Path) -> bool:
    file_bytes = _file_bytes(folder)
    if file_bytes < MIN_UNUSED_BYTES:
        return False
    with Objects(folder) as objects:
        return objects.unused_bytes() >= max(MIN_UNUSED_BYTES, MIN_UNUSED_SHARE * file_bytes)


def _file_bytes(folder: Path) -> int:
    try:
        return (folder / environments.DATA_FILE).stat().st_size
    except FileNotFoundError:
        return 0
