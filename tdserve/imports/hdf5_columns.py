"""HDF5 files: groups become nested keys. Needs ``h5py``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tdserve.imports.import_source import (
    CHOOSE_OTHERS,
    ColumnSource,
    ImportOptions,
    Key,
    SourceColumn,
    make_missing_package_error,
    make_open_error,
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
        raise make_open_error(path, fault) from None
    try:
        found = dict(_iter_arrays((file,), ()))
        wanted = [key for key in found if not options.keys or any(key[: len(k)] == k for k in options.keys)]
        readable = [key for key in found if not isinstance(found[key], str)]  # for an error about keys
        columns = [_make_column(h5py, path, key, found[key]) for key in wanted or readable]
    except BaseException:
        file.close()
        raise
    return ColumnSource(path, columns, options, file.close)


def _iter_arrays(groups: tuple[Any, ...], path: Key) -> Iterator[tuple[Key, Any]]:
    """Yields the arrays below the innermost group; for a broken link, a text with the reason."""
    for name in groups[-1]:
        key = (*path, name)
        try:
            entry = groups[-1][name]
        except (KeyError, OSError, RuntimeError):  # as h5py puts it: nothing is there, no such file, too many links
            yield key, f"is a link to {_describe_target(groups[-1].get(name, getlink=True))}, where nothing is"
            continue
        if entry in groups:
            yield key, f"leads back to /{'/'.join(path[: groups.index(entry)])}, the group that it is in"
        elif hasattr(entry, "items"):
            yield from _iter_arrays((*groups, entry), key)
        elif hasattr(entry, "shape"):  # else a named type
            yield key, entry


def _describe_target(link: Any) -> str:
    return f"{link.path} in {link.filename}" if hasattr(link, "filename") else str(link.path)


def _make_column(h5py: Any, path: str, key: Key, array: Any) -> SourceColumn:
    if isinstance(array, str):
        raise make_path_error(path, f"{'/'.join(key)} {array}; {CHOOSE_OTHERS}")
    dtype, name = array.dtype, "/".join(key)
    if array.shape is None:
        raise make_path_error(path, f"{name} is empty; {CHOOSE_OTHERS}")
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
        raise make_path_error(path, f"{name} has the type {dtype}, for which there is no tensor; {CHOOSE_OTHERS}")
    return SourceColumn(
        key, array.shape, size * dtype.itemsize, lambda start, stop: array[start:stop], lambda: array[()]
    )


def _read_strings(array: Any, start: int, stop: int) -> Any:
    found = array.asstr()[start:stop]
    return found if found.ndim == 1 else make_value_array(found.tolist())


def _read_lists(array: Any, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Reads rows that differ in length."""
    return make_ragged(list(array[start:stop]), array.dtype.metadata["vlen"])
