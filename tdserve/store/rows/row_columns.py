"""Files of one entry per row beside a store's generations, for control's rules. Plain numbers."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tdserve.base.errors import CorruptDataError, LocalProtocolError
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.mapped import map_new, map_shared

FOLDER = "columns"


def open_column(
    store_folder: str | os.PathLike[str], name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Maps a column for writing; creates its file, of zeros and with its space reserved, if there is none.

    Written values survive the process at once, and a loss of power once the kernel has written them back.

    Args:
        store_folder: Folder of the store.
        name: Name of the column; a file name of letters, digits and ``-``.
        dtype: Little-endian numbers.
        shape: ``[num_rows, ...]``, at least one element.

    Raises:
        CapacityError: The disk is full. No file remains.
        CorruptDataError: The file has another size.
    """
    if not name.replace("-", "").replace("_", "").isalnum() or not prod(shape):
        raise LocalProtocolError(reason=f"column {name!r} of shape {shape}")
    folder = Path(store_folder) / FOLDER
    path = folder / f"{name}.memmap"
    nbytes = prod(shape) * dtype.itemsize
    with convert_os_errors(path, asked=nbytes):
        folder.mkdir(exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            is_new = not os.fstat(fd).st_size
            if is_new:
                _reserve(fd, nbytes, path)
            found = os.fstat(fd).st_size
            if found != nbytes:
                raise CorruptDataError(path=str(path), expected=f"{nbytes} bytes", actual=f"{found} bytes")
            mapping = map_new(fd, nbytes, path=path) if is_new else map_shared(fd, nbytes, writable=True, path=path)
        finally:
            os.close(fd)
    column: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=mapping)
    return column


def _reserve(fd: int, nbytes: int, path: Path) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        path.unlink()
        raise
