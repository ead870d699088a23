"""Memory of this process that shows the content of files: a write of such content into the same files reads what it has
just written, and neither torch nor NumPy sees that the two overlap."""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path as FilePath

import torch

from tdserve.store.disk.mapped import Mapping
from tdserve.store.rows.adopted import Adopted

shown_mappings: dict[int, int] = {}
"""End of each mapping that was handed out, by its first address. Threads: dicts are changed and copied atomically."""


def note_shown(mapping: Mapping) -> None:
    """Notes that a user has got a mapping of a store's file, as long as it lives."""
    begin = ctypes.addressof(mapping)
    shown_mappings[begin] = begin + ctypes.sizeof(mapping)
    weakref.finalize(mapping, shown_mappings.pop, begin, None).atexit = False


def is_view_of_store(tensor: torch.Tensor, folder: FilePath) -> bool:
    """Returns whether a tensor in memory may show what is in the files of a store.

    It is true of every mapping that was handed out, of whichever store: a copy more does no harm.

    Args:
        folder: The store's folder.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return False
    if shown_mappings:
        address = tensor.data_ptr()
        if any(begin <= address < end for begin, end in shown_mappings.copy().items()):
            return True
    file = tensor.untyped_storage().filename  # torch's own mappings have one, as those of MemoryMappedTensor
    if file is None:
        return False
    adopted = Adopted.load(folder)
    files = FilePath(os.path.realpath(file))
    return any(files.is_relative_to(os.path.realpath(base)) for base in (folder, *([adopted.path] if adopted else ())))
