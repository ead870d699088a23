"""Files and folders of tensors: safetensors, ``torch.save`` (weights only) and tensordict's memory-mapped folders.

Nothing is unpickled but what torch allows for weights. Of a file that can be mapped, rows are read as they are needed.
"""

from __future__ import annotations

import inspect
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tdserve.exports.content_columns import list_columns
from tdserve.imports.import_source import (
    CHOOSE_OTHERS,
    ColumnSource,
    ImportOptions,
    Key,
    SourceColumn,
    make_open_error,
    make_path_error,
    make_value_array,
    split_key,
)
from tdserve.imports.ragged_rows import make_nested_rows

_VALUE_NBYTES = 64
"""Estimated size of a value that is no tensor."""

_OTHER_OBJECTS = (
    "torch.load(weights_only=True) does not read it: it is damaged, or has other objects than tensors, dicts and plain "
    "values, which would be unpickled; if you trust it, load it yourself and torch.save a dict of its tensors"
)

_NO_ARCHIVE = (
    "it is no zip file as torch.save writes it, but a plain pickle, torch's format before 1.6, or something else, and "
    "nothing is unpickled; if you trust it, load it by what wrote it and torch.save a dict of its tensors"
)


def open_safetensors(path: str, options: ImportOptions) -> ColumnSource:
    """Opens a file; a slash in a name makes a nested key.

    Raises:
        InvalidRequestError: It is no such file.
    """
    from safetensors import SafetensorError, safe_open

    _check_readable(path)
    try:
        file: Any = safe_open(path, "pt")
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (SafetensorError, OSError, ValueError) as fault:
        raise make_path_error(path, f"it is no file of safetensors: {fault}") from None
    return ColumnSource(path, [_make_slice_column(file, name, found[name]) for name in found], options)


def open_torch(path: str, options: ImportOptions) -> ColumnSource:
    """Opens what ``torch.save`` has written of tensors in dicts, such as a ``state_dict``.

    Raises:
        InvalidRequestError: It is no such file, or has objects of other classes, which would be unpickled.
    """
    _check_readable(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # noqa: BLE001 (torch raises of many classes, with many lines about options of its own)
        raise make_path_error(path, _OTHER_OBJECTS if zipfile.is_zipfile(path) else _NO_ARCHIVE) from None
    if not isinstance(found, Mapping):
        raise make_path_error(path, f"it has a {type(found).__name__}, not a dict of tensors")
    return _make_source(path, list(_iter_entries(found, ())), options)


def open_memmap(path: str, options: ImportOptions) -> ColumnSource:
    """Opens a folder that ``TensorDict.memmap`` has written.

    Raises:
        InvalidRequestError: It is no such folder, or has pickled values.
    """
    from tensordict import TensorDict

    folder = Path(path)
    if not folder.exists():
        raise make_path_error(path, "there is no such file or folder")
    if not (folder / "meta.json").is_file():
        raise make_path_error(path, "it is no folder of TensorDict.memmap: it has no meta.json")
    pickled = next((file for file in folder.rglob("*") if file.suffix in (".pickle", ".pkl")), None)
    if pickled is not None:
        raise make_path_error(path, f"{pickled.relative_to(folder)} is pickled, and would have to be unpickled")
    refuses: Any = (
        {"allow_pickle": False} if "allow_pickle" in inspect.signature(TensorDict.load_memmap).parameters else {}
    )
    try:
        content = TensorDict.load_memmap(folder, **refuses)
        found = list_columns(content, (), path)
    except (OSError, ValueError, TypeError, RuntimeError, LookupError, json.JSONDecodeError) as fault:
        raise make_path_error(path, f"tensordict does not load it: {fault}") from None
    if options.has_rows is None and not content.batch_size:
        options = options._replace(has_rows=False)
    return _make_source(path, list(found.items()), options)


def _check_readable(path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as fault:
        raise make_open_error(path, fault) from None


def _iter_entries(found: Mapping[Any, Any], path: Key) -> Iterator[tuple[Key, Any]]:
    for name, entry in found.items():
        if isinstance(entry, Mapping):
            yield from _iter_entries(entry, (*path, str(name)))
        else:
            yield (*path, str(name)), entry


def _make_source(path: str, found: Sequence[tuple[Key, Any]], options: ImportOptions) -> ColumnSource:
    wanted = [each for each in found if not options.keys or any(each[0][: len(k)] == k for k in options.keys)]
    return ColumnSource(path, [_make_column(path, key, entry) for key, entry in wanted or found], options)


def _make_column(path: str, key: Key, entry: Any) -> SourceColumn:
    if isinstance(entry, torch.Tensor) and not entry.is_nested and entry.layout == torch.strided:
        return SourceColumn(
            key,
            tuple(entry.shape),
            entry.nbytes,
            lambda start, stop: entry[start:stop],
            entry.clone,
        )
    if isinstance(entry, torch.Tensor):
        raise make_path_error(path, f"{'/'.join(key)} is a nested or sparse tensor; {CHOOSE_OTHERS}")
    if isinstance(entry, list) and entry and all(isinstance(each, torch.Tensor) for each in entry):
        nbytes = sum(each.nbytes for each in entry)
        read = partial(_slice_ragged, entry)
        return SourceColumn(key, (len(entry),), nbytes, read, partial(make_nested_rows, entry))
    if isinstance(entry, list):
        size = (len(entry),)
        return SourceColumn(
            key, size, _VALUE_NBYTES * len(entry), partial(_slice_values, entry), partial(make_value_array, entry)
        )
    return SourceColumn(key, (), _VALUE_NBYTES, lambda start, stop: entry, lambda: entry)


def _slice_ragged(rows: list[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    return make_nested_rows(rows[start:stop])


def _slice_values(values: list[Any], start: int, stop: int) -> Any:
    return make_value_array(values[start:stop])


def _make_slice_column(file: Any, name: str, part: Any) -> SourceColumn:
    shape = tuple(part.get_shape())
    itemsize = file.get_tensor(name).element_size() if not shape or 0 in shape else part[:1].element_size()
    nbytes = itemsize * int(torch.Size(shape).numel())
    return SourceColumn(
        split_key(name), shape, nbytes, lambda start, stop: part[start:stop], lambda: file.get_tensor(name)
    )
