"""The formats of files, by the ending of a name. A new one is a function here and a line of ``WRITERS``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.exports.content_columns import RAGGED_REASON, Columns, Key
from tdserve.store.rows.format import LOST_KEYS, UNREADABLE_DTYPES
from tdserve.structure.building.array_views import to_array
from tdserve.structure.tensors.torch_types import FROM_TORCH

MEMMAP = "memmap"
"""The format of a name without an ending: a folder."""

FORMATS_BY_ENDING = {
    ".npz": "npz",
    ".npy": "npy",
    ".safetensors": "safetensors",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".pt": "pt",
    ".pth": "pt",
    ".jsonl": "jsonl",
    "": MEMMAP,
}

MAX_WIDE_BYTES, MAX_WASTE = 64 << 20, 4
"""Size of an array of texts beyond which it may be at most this many times as large as the texts."""

MAX_NAMED = 8
"""Most keys that an error lists."""

PIECE_ROWS = 4096
"""Rows that are converted and written at a time."""


def find_format(path: str | os.PathLike[str]) -> str:
    """Returns the format of a file by the ending of its name; of a folder, whatever its name, memmap.

    Raises:
        InvalidRequestError: There is none of this ending.
    """
    ending = Path(path).suffix.lower()
    if os.path.isdir(path):
        return MEMMAP
    if ending not in FORMATS_BY_ENDING:
        known = ", ".join(filter(None, FORMATS_BY_ENDING))
        reason = f"{path} ends with none of {known}, and is not the name of a folder, which has no ending"
        raise InvalidRequestError(argument="path", reason=reason)
    return FORMATS_BY_ENDING[ending]


def write_npz(path: Path, columns: Columns, num_rows: int | None) -> None:
    """Writes an archive of arrays; a nested key is written with slashes."""
    arrays = {name: _to_array(name, value) for name, value in _name(columns).items()}
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def write_npy(path: Path, columns: Columns, num_rows: int | None) -> None:
    """Writes one array, without its key."""
    if len(columns) != 1:
        names = ", ".join("/".join(key) for key in list(columns)[:MAX_NAMED]) + (
            ", ..." if len(columns) > MAX_NAMED else ""
        )
        reason = f"a .npy file has one array, not those of {names}; choose one by key (--key, keys=), or write .npz"
        raise InvalidRequestError(argument="path", reason=reason)
    ((key, value),) = columns.items()
    with open(path, "wb") as file:
        np.save(file, _to_array("/".join(key), value), allow_pickle=False)


def write_safetensors(path: Path, columns: Columns, num_rows: int | None) -> None:
    """Writes tensors; a nested key is written with slashes."""
    from safetensors.torch import save, save_file

    named = _name(columns)
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise _make_error(name, value, "safetensors")
        try:
            save({name: value.new_empty(0)})  # an older or newer release has other dtypes
        except KeyError:
            raise _make_dtype_error(name, value, "safetensors") from None
    save_file(named, path)


def write_hdf5(path: Path, columns: Columns, num_rows: int | None) -> None:
    """Writes data sets; a nested key is a group."""
    try:
        import h5py
    except ImportError:
        reason = "pip install 'tdserve[hdf5]'"
        raise NotSupportedError(feature="this format without the package h5py", reason=reason) from None
    named = _name(columns)
    with h5py.File(path, "w") as file:
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                array = _to_array(name, value)
                made = file.create_dataset(name, array.shape, array.dtype)
                for start in range(0, len(array) if array.ndim else 0, PIECE_ROWS):
                    made[start : start + PIECE_ROWS] = array[start : start + PIECE_ROWS]
                if not array.ndim:
                    made[()] = array
            elif _has_only_texts(value):
                _check_no_nul(name, value, "HDF5")
                file.create_dataset(name, data=value, dtype=h5py.string_dtype())
            else:
                raise _make_error(name, value, "HDF5")


def write_torch(path: Path, columns: Columns, num_rows: int | None) -> None:
    """Writes tensors in dicts, which ``torch.load(path, weights_only=True)`` reads."""
    for key, value in columns.items():
        if not isinstance(value, torch.Tensor) and not _is_ragged(value) and not _is_json_value(value):
            raise _make_error("/".join(key), value, "torch")
    torch.save(_nest({key: _own(value) for key, value in columns.items()}), path)


def write_jsonl(path: Path, columns: Columns, num_rows: int | None) -> None:
    """Writes an object of JSON in a line for each row; a nested key is an object, a tensor nested lists.

    NaN and infinities, which JSON lacks, are written as null: strict readers refuse what Python's ``json`` writes for
    them, and pandas and ``datasets`` read null as NaN in a column of numbers.
    """
    if num_rows is None:
        reason = "a .jsonl file has a line for each row, and there are no rows; write .pt or a folder"
        raise InvalidRequestError(argument="path", reason=reason)
    for key, value in columns.items():
        is_real = isinstance(value, torch.Tensor) and not value.is_complex()
        if not is_real and not _is_ragged(value) and not _is_json_value(value):
            raise _make_error("/".join(key), value, "JSON")
    names = list(map(_check_name, columns))
    with open(path, "w", encoding="utf-8") as file:
        for start in range(0, num_rows, PIECE_ROWS):
            pieces = [_list_values(value[start : start + PIECE_ROWS]) for value in columns.values()]
            for values in zip(*pieces, strict=True):
                file.write(_encode_line(_nest(dict(zip(names, values, strict=True)))) + "\n")


def _encode_line(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:  # looking at each number of each row beforehand would cost more than writing it
        return json.dumps(_put_null(row), ensure_ascii=False, allow_nan=False)


def _put_null(value: Any) -> Any:
    """Returns what JSON has, with None for NaN and infinities."""
    if isinstance(value, dict):
        return {key: _put_null(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_put_null(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _list_values(values: Any) -> list[Any]:
    """Returns values of JSON, one for each row."""
    if isinstance(values, torch.Tensor):
        listed: list[Any] = values.tolist()
        return listed
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in values]


def write_memmap(path: Path, columns: Columns, num_rows: int | None) -> None:
    """Writes a folder that ``TensorDict.load_memmap`` reads, and ``tdserve adopt`` serves."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    for key in columns:
        if any("/" in part or "\0" in part or part in ("", ".", "..") for part in key):
            raise InvalidRequestError(argument="key", reason=f"{key[:8]!r} cannot be the name of a file")
        if not LOST_KEYS.isdisjoint(key):
            reason = f"tensordict loses {key[:8]!r} in a folder; write .pt, or choose others by key (--key, keys=)"
            raise InvalidRequestError(argument="key", reason=reason)
    shown: Columns = {}
    for key, value in columns.items():
        if isinstance(value, torch.Tensor):
            if FROM_TORCH.get(value.dtype) in UNREADABLE_DTYPES:
                raise _make_dtype_error("/".join(key), value, "memmap")
            shown[key] = value
        elif not _is_json_value(value):
            raise _make_error("/".join(key), value, "memmap")
        else:
            shown[key] = NonTensorData(value) if num_rows is None else NonTensorStack(*value)
    TensorDict(_nest(shown), [] if num_rows is None else [num_rows]).memmap(str(path))


WRITERS: Mapping[str, Callable[[Path, Columns, int | None], None]] = {
    "npz": write_npz,
    "npy": write_npy,
    "safetensors": write_safetensors,
    "hdf5": write_hdf5,
    "pt": write_torch,
    "jsonl": write_jsonl,
    MEMMAP: write_memmap,
}


def _name(columns: Columns) -> dict[str, Any]:
    """Returns columns by names with slashes.

    Raises:
        InvalidRequestError: A key has a slash itself, or is empty.
    """
    return {"/".join(_check_name(key)): value for key, value in columns.items()}


def _check_name(key: Key) -> Key:
    """Raises InvalidRequestError if a key could not be written with slashes: ``tdserve put`` would nest it."""
    if any("/" in part or "\0" in part or part in ("", ".", "..") for part in key):
        reason = f"{key[:8]!r} cannot be written with slashes; choose others by key (--key, keys=)"
        raise InvalidRequestError(argument="key", reason=reason)
    return key


def _nest(columns: Columns) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in columns.items():
        branch = tree
        for part in key[:-1]:
            branch = branch.setdefault(part, {})
        branch[key[-1]] = value
    return tree


def _to_array(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return to_array(value)
    if _has_only_texts(value):
        return _to_text_array(name, value)
    raise _make_error(name, value, "NumPy")


def _to_text_array(name: str, value: str | list[str]) -> Any:
    """Returns texts as NumPy has them: all as wide as the longest, and without trailing NULs."""
    texts = [value] if isinstance(value, str) else value
    _check_no_nul(name, texts, "NumPy")
    wide, needed = 4 * len(texts) * max(map(len, texts), default=0), 4 * sum(map(len, texts))
    if wide > MAX_WIDE_BYTES and wide > MAX_WASTE * needed:
        reason = f"its longest text would make the array {wide} bytes; write .pt or a folder, or choose others by key"
        raise NotSupportedError(feature=f"the key {name!r} in a file of NumPy", reason=reason)
    return np.array(value)


def _check_no_nul(name: str, value: str | list[str], what: str) -> None:
    if any("\0" in text for text in ([value] if isinstance(value, str) else value)):
        reason = "a text of it has a NUL; write .pt or a folder, or choose others by key (--key, keys=)"
        raise NotSupportedError(feature=f"the key {name!r} in a file of {what}", reason=reason)


def _own(value: Any) -> Any:
    """Returns a tensor that shares its storage with no other, which would be saved with it."""
    if isinstance(value, list):
        return [_own(each) if isinstance(each, torch.Tensor) and not each.numel() else each for each in value]
    is_part = isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes
    is_empty = isinstance(value, torch.Tensor) and not value.numel()  # its address may be that of another leaf
    return value.clone() if is_part or is_empty else value


def _has_only_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def _is_ragged(value: Any) -> bool:
    """Returns whether these are rows that differ in shape."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, torch.Tensor) for each in value)


def _is_json_value(value: Any) -> bool:
    """Returns whether a value consists of what JSON has."""
    if isinstance(value, list):
        return all(map(_is_json_value, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json_value, value.values()))
    return value is None or type(value) in (bool, int, float, str)


def _make_error(name: str, value: Any, what: str) -> NotSupportedError:
    if _is_ragged(value):
        return NotSupportedError(feature=f"the key {name!r} in a file of {what}", reason=RAGGED_REASON)
    held = next((each for each in value if not isinstance(each, str)), value) if isinstance(value, list) else value
    reason = f"it is of type {type(held).__name__}; choose others by key (--key, keys=)"
    return NotSupportedError(feature=f"the key {name!r} in a file of {what}", reason=reason)


def _make_dtype_error(name: str, value: torch.Tensor, what: str) -> NotSupportedError:
    dtype = str(value.dtype).removeprefix("torch.")
    reason = f"it is of {dtype}, which that format lacks; write .pt, or choose others by key (--key, keys=)"
    return NotSupportedError(feature=f"the key {name!r} in a file of {what}", reason=reason)
