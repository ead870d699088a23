"""Data sets of Hugging Face's ``datasets``: columns of numbers become tensors, lists that vary ragged ones, and text,
chats and other nested values non-tensor values. Needs ``datasets``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tdserve.base.errors import InvalidRequestError
from tdserve.imports.import_source import (
    CHOOSE_OTHERS,
    ImportOptions,
    ImportSource,
    Key,
    make_missing_package_error,
    make_path_error,
    make_value_array,
    nest_columns,
)

_BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
"""Formats of single files, by suffix."""

_Read = Callable[[Any], Any]
"""From the rows of a column, an Arrow array, to an array, a ragged tensor, or an array of values."""


def open_hf(path: str, options: ImportOptions) -> ImportSource:
    """Opens a folder of ``save_to_disk``, a file, or a data set of the Hub.

    Raises:
        NotSupportedError: ``datasets`` is not installed.
        InvalidRequestError: There is no such data set, or it has columns that cannot be imported.
    """
    try:
        import datasets
        import pyarrow as pa
    except ImportError:
        raise make_missing_package_error("datasets", "tdserve[hf]") from None
    try:
        found = _load(datasets, path)
    except Exception as fault:
        raise make_path_error(path, fault) from fault
    if isinstance(found, datasets.DatasetDict):
        names = list(found)
        split = options.split or (names[0] if len(names) == 1 else "")
        if split not in names:
            raise InvalidRequestError(argument="split", reason=f"{path} has {', '.join(names)}; choose one of them")
        found = found[split]
    elif options.split:
        raise InvalidRequestError(argument="split", reason=f"{path} has none")
    return _TableSource(pa, path, found.with_format("arrow"), options)


def _load(datasets: Any, path: str) -> Any:
    if any((Path(path) / name).exists() for name in ("state.json", "dataset_dict.json")):
        return datasets.load_from_disk(path)
    builder = _BUILDERS.get(Path(path).suffix)
    if builder is not None:
        return datasets.load_dataset(builder, data_files=path)
    return datasets.load_dataset(path)


class _TableSource(ImportSource):
    """Rows of a data set.

    Args:
        pa: The module pyarrow.
        path: Path of the data set, for errors.
        table: The data set; its slices are Arrow tables.
        options: How it is read.
    """

    def __init__(self, pa: Any, path: str, table: Any, options: ImportOptions) -> None:
        self._table = table
        self.num_rows = table.num_rows
        self.row_nbytes = max(table.data.nbytes // max(table.data.num_rows, 1), 1)
        types = _TypeReader(pa, path)
        self._columns: dict[str, dict[Key, _Read]] = {}
        unused = list(options.keys)
        for field in table[:0].schema:
            chosen = [key for key in options.keys if key[:1] == (field.name,)]
            if options.keys and not chosen:
                continue
            unused = [key for key in unused if key not in chosen]
            found = types.read_field(field.name, field.type)
            wanted = {p: read for p, read in found.items() if not chosen or any(p[: len(k)] == k for k in chosen)}
            unused += [key for key in chosen if not any(p[: len(key)] == key for p in wanted)]
            self._columns[field.name] = wanted
        if unused or not self._columns:
            missing = "/".join(unused[0]) if unused else "columns"
            raise InvalidRequestError(
                argument="key", reason=f"{path} has no {missing}: {', '.join(table.column_names[:50])}"
            )

    def iter_batches(self, max_rows: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for start in range(0, self.num_rows, max_rows):
            rows = self._table[start : min(start + max_rows, self.num_rows)]
            columns = {}
            for name, reads in self._columns.items():
                array = rows[name].combine_chunks()
                # Of no chunk, or of one that is extended, the result differs between versions.
                array = array.chunk(0) if hasattr(array, "chunk") else array
                columns.update({path: read(array) for path, read in reads.items()})
            yield rows.num_rows, nest_columns(columns)


class _TypeReader:
    """Finds out how the columns of a type are read.

    Args:
        pa: The module pyarrow.
        path: Path of the data set, for errors.
    """

    def __init__(self, pa: Any, path: str) -> None:
        self._pa = pa
        self._path = path

    def read_field(self, name: str, kind: Any) -> dict[Key, _Read]:
        """Returns what reads a column: several leaves if it is nested.

        Raises:
            InvalidRequestError: There is neither a tensor nor a value for its type.
        """
        types = self._pa.types
        if types.is_struct(kind):
            found: dict[Key, _Read] = {}
            for number in range(kind.num_fields):
                part = kind.field(number)
                for path, read in self.read_field(part.name, part.type).items():
                    below: Key = (name, *path)
                    found[below] = _OfField(number, read)
            return found
        if getattr(kind, "storage_type", None) is not None and hasattr(kind, "shape"):  # Array2D, Array3D, ...
            if None in kind.shape:
                raise self._make_error(name, kind, "its first dimension varies")
            return {(name,): lambda array: _read_extension(array, name, self._path)}
        if _is_number(types, kind):
            return {(name,): lambda array: _read_numbers(array, name, self._path)}
        if types.is_fixed_size_list(kind) and self._find_dense(kind) is not None:
            return {(name,): lambda array: _read_fixed(array, name, self._path)}
        if (types.is_list(kind) or types.is_large_list(kind)) and _is_number(types, kind.value_type):
            return {(name,): lambda array: _read_lists(array, name, self._path)}
        if not self._is_value(kind):
            raise self._make_error(name, kind, "there is neither a tensor nor a value of that type")
        return {(name,): lambda array: make_value_array(array.to_pylist())}

    def _find_dense(self, kind: Any) -> Any:
        while self._pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        return kind if _is_number(self._pa.types, kind) else None

    def _is_value(self, kind: Any) -> bool:
        types = self._pa.types
        if types.is_struct(kind):
            return all(self._is_value(kind.field(number).type) for number in range(kind.num_fields))
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            return self._is_value(kind.value_type)
        is_text = types.is_string(kind) or types.is_large_string(kind)
        is_bytes = types.is_binary(kind) or types.is_large_binary(kind)
        return is_text or is_bytes or types.is_null(kind) or _is_number(types, kind)

    def _make_error(self, name: str, kind: Any, reason: str) -> InvalidRequestError:
        return make_path_error(self._path, f"column {name} is {kind}: {reason}; {CHOOSE_OTHERS}")


class _OfField:
    """Reads a field of nested rows.

    Args:
        number: Its number.
        read: Reads the rows of the field.
    """

    def __init__(self, number: int, read: _Read) -> None:
        self._number = number
        self._read = read

    def __call__(self, array: Any) -> Any:
        return self._read(array.flatten()[self._number])  # flatten hands nulls of the rows on to their fields


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def _read_numbers(array: Any, name: str, path: str) -> Any:
    if array.null_count and not str(array.type).endswith(("float", "double")):  # of floats they become nan
        raise make_path_error(path, f"column {name} has rows without a number; {CHOOSE_OTHERS}")
    return array.to_numpy(zero_copy_only=False)


def _read_fixed(array: Any, name: str, path: str) -> Any:
    shape = [len(array)]
    while hasattr(array.type, "list_size"):
        if array.null_count:
            raise make_path_error(path, f"column {name} has rows without a list; {CHOOSE_OTHERS}")
        shape.append(array.type.list_size)
        array = array.flatten()
    return _read_numbers(array, name, path).reshape(shape)


def _read_extension(array: Any, name: str, path: str) -> Any:
    if array.null_count:
        raise make_path_error(path, f"column {name} has rows without an array; {CHOOSE_OTHERS}")
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _read_lists(array: Any, name: str, path: str) -> torch.Tensor:
    if array.null_count:
        raise make_path_error(path, f"column {name} has rows without a list; {CHOOSE_OTHERS}")
    values = np.array(_read_numbers(array.flatten(), name, path))
    sizes = np.diff(array.offsets.to_numpy(zero_copy_only=False)).tolist()
    return torch.nested.nested_tensor(list(torch.split(torch.from_numpy(values), sizes)), layout=torch.jagged)
