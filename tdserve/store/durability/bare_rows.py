"""What the folder ``rows`` of a store lacks where it is served without the rest of the store's folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np

from tdserve.store.rows.format import EXTRA
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, HEADER_BYTES, is_header
from tdserve.store.rows.row_columns import FOLDER as COLUMNS_FOLDER
from tdserve.store.values.object_folders import has_values

_ITEM_BYTES = 8
_CHUNK_BYTES = 1 << 22
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def describe_lacking(folder: Path) -> str:
    """Returns what the tensors in a store's folder alone do not tell; "" if nothing, or if it is no store's.

    The folder may be a user's: nothing of it is mapped, and no link is followed.
    """
    counted = _count_rows(folder / GENERATION_FILE)
    if counted is None:
        return ""
    num_live, num_all = counted
    found = []
    if has_values(folder):
        found.append("its non-tensor values")
    if (folder / EXTRA).is_dir():
        found.append(f"its tensors in {EXTRA}")
    if (folder / COLUMNS_FOLDER).is_dir():
        found.append("order, priorities and settings of the table or queue")
        found.append(f"which {num_live} of its {num_all} rows have content")
    return ", ".join(found)


def _count_rows(path: Path) -> tuple[int, int] | None:
    """Returns how many rows have content, and how many there are; None without a file of generations."""
    try:
        fd = os.open(path, _FLAGS)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        num_all = (status.st_size - HEADER_BYTES) // _ITEM_BYTES - 1  # the last is the store's own
        if not stat.S_ISREG(status.st_mode) or num_all < 0 or not is_header(file.read(HEADER_BYTES)):
            return None
        num_live, num_left = 0, num_all
        while num_left > 0:
            some = np.frombuffer(file.read(min(num_left * _ITEM_BYTES, _CHUNK_BYTES)), "<i8")
            if not len(some):
                break
            num_live += int(np.count_nonzero((some > 0) & (some % 2 == 0)))
            num_left -= len(some)
    return num_live, num_all
