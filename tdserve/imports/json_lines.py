"""Files with a JSON object in each line: numbers become tensors, as do lists of them that have one shape; lists of
numbers that vary in length ragged ones, objects nested keys, and all else, such as text and chats, non-tensor values.
So are integers, booleans and lists if a row has null or nothing there: logs have keys that come late. Of fractions null
is nan.

A file is read twice: what its columns are is known after its last line. One piece of its rows is in memory at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.imports.import_source import (
    ImportOptions,
    ImportSource,
    Key,
    make_open_error,
    make_path_error,
    make_value_array,
    nest_columns,
)
from tdserve.imports.ragged_rows import make_ragged

MAX_NAMED = 50
"""Most columns that an error lists."""

_INT64 = np.iinfo(np.int64)
_NONE = type(None)

_Read = Callable[[Sequence[Any]], Any]
"""From what a column has in some rows to an array, a ragged tensor, or an array of values."""


def open_json_lines(path: str, options: ImportOptions) -> ImportSource:
    """Opens a file of JSON lines.

    Raises:
        InvalidRequestError: It cannot be read, a line is no object, or there is no such key.
    """
    return _LineSource(path, options)


class _LineSource(ImportSource):
    """Rows of a file.

    Args:
        path: Its path.
        options: How it is read.
    """

    def __init__(self, path: str, options: ImportOptions) -> None:
        self._path = path
        seen, self.num_rows = _Column(), 0
        for _, row in _iter_rows(path):
            seen.note(row)
            self.num_rows += 1
        if not self.num_rows:
            raise make_path_error(path, "there are no rows in it")
        self.row_nbytes = max(os.path.getsize(path) // self.num_rows, 1)
        self._reads: dict[Key, _Read] = dict(seen.list_reads((), options.keys, self.num_rows))
        unused = [key for key in options.keys if not any(each[: len(key)] == key for each in self._reads)]
        if unused or not self._reads:
            missing = "/".join(unused[0]) if unused else "columns"
            names = ", ".join([*seen.children][:MAX_NAMED])
            raise InvalidRequestError(argument="key", reason=f"{path} has no {missing}: {names}")

    def iter_batches(self, max_rows: int) -> Iterator[tuple[int, dict[str, Any]]]:
        rows: list[dict[str, Any]] = []
        nbytes, max_nbytes = 0, max_rows * self.row_nbytes  # some rows may be much larger than others
        for size, row in _iter_rows(self._path):
            rows.append(row)
            nbytes += size
            if len(rows) == max_rows or nbytes >= max_nbytes:
                yield len(rows), self._read(rows)
                rows, nbytes = [], 0
        if rows:
            yield len(rows), self._read(rows)

    def _read(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return nest_columns({path: read([_pick(row, path) for row in rows]) for path, read in self._reads.items()})


class _Column:
    """What the rows of a file have at one key.

    Attributes:
        children: By key, if they are objects.
        num_rows: How many have something there, or null.
    """

    def __init__(self) -> None:
        self.children: dict[str, _Column] = {}
        self.num_rows = 0
        self._types: set[type] = set()  # of what is there
        self._elements: set[type] = set()  # of what is in lists
        self._shapes: set[tuple[int, ...]] = set()  # of lists; at most two of them
        self._num_dims: set[int] = set()  # of lists
        self._is_wide = False  # there is an integer that no tensor holds

    def note(self, item: Any) -> None:
        """Takes note of one more row."""
        self.num_rows += 1
        kind = type(item)
        self._types.add(kind)
        if kind is dict:
            for key, each in item.items():
                child = self.children.get(key)
                if child is None:
                    child = self.children[key] = _Column()
                child.note(each)
        elif kind is list:
            shape, elements = _find_shape_and_types(item)
            self._elements |= elements
            self._num_dims.add(len(shape))
            if len(self._shapes) < 2:
                self._shapes.add(shape)
            self._is_wide |= int in elements and _is_wide(item)
        elif kind is int:
            self._is_wide |= _is_wide([item])

    def list_reads(self, path: Key, keys: Sequence[Key], num_rows: int) -> Iterator[tuple[Key, _Read]]:
        """Yields what reads this column, or each one below it.

        Args:
            path: Its key.
            keys: Only these and what is below them; none: all.
            num_rows: Number of rows of the file.
        """
        if self.num_rows < num_rows:
            self._types.add(_NONE)
        if self._types in ({dict}, {dict, _NONE}):
            for key, child in self.children.items():
                yield from child.list_reads((*path, key), keys, num_rows)
        elif not keys or any(path[: len(key)] == key for key in keys):
            yield path, self._choose_read()

    def _choose_read(self) -> _Read:
        """Returns what reads this column."""
        types, has_none = self._types - {_NONE}, _NONE in self._types
        dtype = self._find_dtype(types)
        if dtype is not None:
            is_missing = has_none and dtype != np.float64  # of floats null is nan
            return make_value_array if is_missing else partial(np.array, dtype=dtype)
        dtype = self._find_dtype(self._elements - {_NONE}) if types == {list} else None
        is_missing = has_none or (_NONE in self._elements and dtype != np.float64)
        is_dense = len(self._shapes) == 1
        if dtype is None or is_missing or not (is_dense or self._num_dims == {1}):
            return make_value_array
        return partial(_read_dense, dtype, *self._shapes) if is_dense else partial(_read_ragged, dtype)

    def _find_dtype(self, types: set[type]) -> np.dtype[Any] | None:
        """Returns the dtype of numbers of these types; None if they are not numbers, or not of one kind."""
        if types == {bool}:
            return np.dtype(np.bool_)
        if types == {int}:
            return None if self._is_wide else np.dtype(np.int64)
        return np.dtype(np.float64) if types and types <= {int, float} else None


def _iter_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the objects of a file, each with the size of its line in bytes. Raises InvalidRequestError."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as fault:
                    raise make_path_error(path, f"line {number} is no JSON: {fault}") from fault
                if type(row) is not dict:
                    raise make_path_error(path, f"line {number} is no object, but has a {type(row).__name__}")
                yield len(line), row
    except OSError as fault:
        raise make_open_error(path, fault) from fault


def _find_shape_and_types(items: list[Any]) -> tuple[tuple[int, ...], set[type]]:
    """Returns the shape of a list, and the types of what is in it; of one without a shape, () and ``object``."""
    kinds = set(map(type, items))
    if list not in kinds:
        return (len(items),), kinds
    parts = [_find_shape_and_types(each) for each in items] if kinds == {list} else []
    shapes = {shape for shape, _ in parts}
    if len(shapes) != 1:
        return (), {object}
    return (len(items), *shapes.pop()), set().union(*(elements for _, elements in parts))


def _is_wide(items: list[Any]) -> bool:
    """Returns whether one of the integers in a list, at any depth, does not fit 64 bits."""
    try:  # for most lists, in a tenth of the time
        return bool(items) and not (_INT64.min <= min(items) and max(items) <= _INT64.max)
    except TypeError:  # there are lists or nulls in it
        integers = (each for each in items if type(each) is int)
        return any(map(_is_wide, (each for each in items if type(each) is list))) or _is_wide(list(integers))


def _pick(row: Any, path: Key) -> Any:
    for key in path:
        row = None if row is None else row.get(key)
    return row


def _read_dense(dtype: np.dtype[Any], shape: tuple[int, ...], values: Sequence[Any]) -> NDArray[Any]:
    return np.array(values, dtype).reshape(len(values), *shape)


def _read_ragged(dtype: np.dtype[Any], values: Sequence[Any]) -> torch.Tensor:
    return make_ragged([np.array(value, dtype) for value in values], dtype)
