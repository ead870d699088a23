"""The formats, by name. A new one is a reader in a file beside this one, and a line of ``FORMATS``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tdserve.base.errors import InvalidRequestError
from tdserve.imports.hdf5_columns import open_hdf5
from tdserve.imports.hf_table import open_hf
from tdserve.imports.import_source import ImportOptions, ImportSource
from tdserve.imports.json_lines import open_json_lines
from tdserve.imports.minari_episodes import open_minari
from tdserve.imports.npz_columns import open_npy, open_npz
from tdserve.imports.tensor_files import open_memmap, open_safetensors, open_torch


class ImportFormat(NamedTuple):
    """A format.

    Attributes:
        open: Opens a path.
        has_splits: Whether a path may name several parts, one of which is imported.
    """

    open: Callable[[str, ImportOptions], ImportSource]
    has_splits: bool = False


FORMATS = {
    "npz": ImportFormat(open_npz),
    "npy": ImportFormat(open_npy),
    "hdf5": ImportFormat(open_hdf5),
    "jsonl": ImportFormat(open_json_lines),
    "hf": ImportFormat(open_hf, has_splits=True),
    "minari": ImportFormat(open_minari),
    "safetensors": ImportFormat(open_safetensors),
    "pt": ImportFormat(open_torch),
    "memmap": ImportFormat(open_memmap),
}


def open_source(kind: str, path: str, options: ImportOptions) -> ImportSource:
    """Opens a path of a format.

    Raises:
        InvalidRequestError: There is no such format, or the path cannot be read.
        NotSupportedError: The format's package is not installed.
    """
    if kind not in FORMATS:
        raise InvalidRequestError(argument="kind", reason=f"{kind!r} is not one of {', '.join(FORMATS)}")
    if options.split and not FORMATS[kind].has_splits:
        raise InvalidRequestError(argument="split", reason=f"{kind} has none")
    return FORMATS[kind].open(path, options)
