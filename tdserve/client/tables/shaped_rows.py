"""Rows that were asked for by numbers in any shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection
from tensordict.utils import is_non_tensor

from tdserve.base.errors import InvalidRequestError, SelectionError
from tdserve.structure.trees.tree import Path, quote


def check_row_index(index: Any, *, store: str) -> None:
    """Raises SelectionError for an index of tensordicts that selects no rows of a table: None, one bool, a tuple."""
    dtype = getattr(index, "dtype", None)
    is_flag = isinstance(index, bool) or (dtype in (torch.bool, np.bool_) and index.ndim == 0)
    if index is None or is_flag or isinstance(index, tuple):
        remedy = "give row numbers, a slice, or a mask with a flag for each live row, and index what is read further"
        raise SelectionError(selection=repr(index), reason=f"table {store!r} has one dimension of rows: {remedy}")


def shape_rows(rows: Any, shape: tuple[int, ...] | None, *, store: str, is_array: bool = False) -> Any:
    """Returns rows in the shape of their numbers.

    Args:
        rows: A tensordict in one dimension.
        shape: Shape of the numbers; None: the rows were not chosen by numbers.
        store: Name of the table, for errors.
        is_array: Whether they become arrays.

    Raises:
        InvalidRequestError: The numbers have several dimensions, and rows differ in size or structure.
    """
    if shape == ():
        return rows[0]
    if shape is None or len(shape) == 1:
        return rows
    if is_array and isinstance(rows, LazyStackedTensorDict) and len(rows):
        rows = LazyStackedTensorDict.maybe_dense_stack(rows.unbind(0))  # what was asked for may be alike
    ragged = _find_ragged(rows, (), is_array=is_array) if len(rows) else None
    if ragged is not None:
        raise make_ragged_error(ragged, len(shape), store)
    return rows.reshape(*shape)


def make_ragged_error(path: Path, num_dims: int, store: str) -> InvalidRequestError:
    """Returns the error for rows that differ, and are to be one tensor or have numbers in several dimensions."""
    if num_dims < 2:
        what = f"rows of key {quote(path)} of table {store!r} differ in size"
        reason = f"{what}: give pad=, or [{'.'.join(path)!r}] for one tensordict per row"
        return InvalidRequestError(argument="key", reason=reason)
    what = f"key {quote(path)} differs in size or structure from row to row" if path else "rows differ in structure"
    reason = f"{num_dims} dimensions of row numbers of table {store!r}, whose {what}: give one dimension of numbers"
    return InvalidRequestError(argument="index", reason=f"{reason}, or get_at() with pad= where only sizes differ")


def _find_ragged(rows: Any, path: Path, *, is_array: bool) -> Path | None:
    """Returns the key of the first part that cannot have several batch dimensions: a nested tensor, or a lazy stack
    that is to become arrays."""
    if isinstance(rows, LazyStackedTensorDict):
        return path if is_array else None
    for key, entry in rows.items():
        if isinstance(entry, torch.Tensor) and entry.is_nested:
            return (*path, key)
        if is_tensor_collection(entry) and not is_non_tensor(entry):
            found = _find_ragged(entry, (*path, key), is_array=is_array)
            if found is not None:
                return found
    return None
