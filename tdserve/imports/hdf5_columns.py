"""HDF5 files: groups become nested keys. Needs ``h5py``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tdserve.imports.import_source import (
    ColumnSource,
    ImportOptions,
    Key,
    SourceColumn,
    make_missing_package_error,
    make_path_error,
    make_value_array,
)
from tdserve.imports.ragged_rows import make_ragged

_VALUE_NBYTES = 64
"""Estimated size of a string or list."""


def open_hdf5(path: str, options: ImportOptions) -> ColumnSource:
    """Opens a file.

    Raises:
        NotSupportedError: h5py is not installed.
        InvalidRequestError: It is no such file, or has data sets that cannot be imported.
    """
    try:
        import h5py
    except ImportError:
        raise make_missing_package_error("h5py", "tdserve[hdf5]") from None
    try:
        file = h5py.File(path, "r")
    except OSError as fault:
        raise make_path_error(path, fault) from None
    try:
        found = dict(_iter_arrays(file, ()))
        wanted = [key for key in found if not options.keys or any(key[: len(k)] == k for k in options.keys)]
        columns = [_make_column(h5py, path, key, found[key]) for key in wanted or found]
    except BaseException:
        file.close()
        raise
    return ColumnSource(path, columns, options, file.close)


def _iter_arrays(group: Any, path: Key) -> Iterator[tuple[Key, Any]]:
    for name, entry in group.items():
        if hasattr(entry, "items"):
            yield from _iter_arrays(entry, (*path, name))
        elif hasattr(entry, "shape"):  # else a named type
            yield (*path, name), entry


def _make_column(h5py: Any, path: str, key: Key, array: Any) -> SourceColumn:
    dtype, name = array.dtype, "/".join(key)
    if array.shape is None:
        raise make_path_error(path, f"{name} is empty; choose others by key")
    size = math.prod(array.shape)
    if h5py.check_string_dtype(dtype) is not None:
        read = partial(_read_strings, array)
        return SourceColumn(key, array.shape, size * _VALUE_NBYTES, read, lambda: array.asstr()[()])
    inner = h5py.check_vlen_dtype(dtype)
    if inner is not None and len(array.shape) == 1 and inner.kind in "biuf":
        return SourceColumn(
            key, array.shape, size * _VALUE_NBYTES, partial(_read_lists, array), partial(_read_lists, array)
        )
    if dtype.hasobject or dtype.names or dtype.kind not in "biufc":
        raise make_path_error(path, f"{name} has the type {dtype}, for which there is no tensor; choose others by key")
    return SourceColumn(
        key, array.shape, size * dtype.itemsize, lambda start, stop: array[start:stop], lambda: array[()]
    )


def _read_strings(array: Any, start: int, stop: int) -> Any:
    found = array.asstr()[start:stop]
    return found if found.ndim == 1 else make_value_array(found.tolist())


def _read_lists(array: Any, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Reads rows that differ in length."""
    return make_ragged(list(array[start:stop]), array.dtype.metadata["vlen"])
