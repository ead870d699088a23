"""Writes leaves of rows that are still the same: compare and set, row by row.

The server compares the generations of all rows of a write and writes all of them, or none. If it writes none, this end
asks which rows have changed, and leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_tensor_collection

from tdserve.base.errors import InvalidRequestError, SelectionError
from tdserve.client.content.row_choice import choose_rows, count_rows, iter_tensors
from tdserve.client.transfers.write import ExpectedRows
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.allocation.ring import ROW_ID_MASK
from tdserve.structure.tensors.plain_tensors import to_plain
from tdserve.structure.trees.tree import Path, Spec, quote

NOT_LIVE = -1
"""In the place of the generation of a row that is not live."""

Overwrite = Callable[[Rows, Any, ExpectedRows], None]
"""Writes rows if all of them are as expected; raises SelectionError if one is not."""

ReadGenerations = Callable[[Rows], NDArray[np.int64]]
"""Returns the generation of each row, and ``NOT_LIVE`` for those that are not live."""


def to_names(generations: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns what identifies rows, as long as they are the same rows, of their generations."""
    return np.where(generations < 0, NOT_LIVE, generations & ROW_ID_MASK)


def write_same(
    rows: Rows,
    generations: NDArray[np.int64],
    values: Any,
    *,
    is_unchanged: bool,
    overwrite: Overwrite,
    read_generations: ReadGenerations,
) -> NDArray[np.bool_]:
    """Writes leaves of those rows that are still the same; returns which these are.

    Args:
        rows: Their numbers. If one occurs twice, the last one counts.
        generations: Generation of each row.
        values: Leaves by key, with a first dimension of rows.
        is_unchanged: Whether a row is another one, too, once a part of it was written.

    Raises:
        SelectionError: All of them seem to be the same, and the server refuses them nevertheless.
        Others: As raised by ``overwrite``. Nothing was written.
    """
    compared = generations if is_unchanged else to_names(generations)
    is_same = generations >= 0
    while is_same.any():
        left = _find_last(rows, is_same)
        expected = generations[left].astype("<i8" if is_unchanged else "<u4").tobytes()
        try:
            overwrite(
                rows[left], choose_rows(values, torch.from_numpy(left)), ExpectedRows(expected, has_stamps=is_unchanged)
            )
            break
        except SelectionError:
            now = read_generations(rows)
            is_still = is_same & ((now if is_unchanged else to_names(now)) == compared)
            if is_still.sum() == is_same.sum():
                raise
            is_same = is_still
    return is_same


def find_generations(read: Callable[[Rows], NDArray[np.int64]], rows: Rows) -> NDArray[np.int64]:
    """Returns the generation of each row, and ``NOT_LIVE`` for those that are not live.

    Args:
        read: Returns the generations of rows; raises SelectionError if one is not live.
    """
    if not len(rows):
        return np.zeros(0, np.int64)
    try:
        return read(rows)
    except SelectionError:
        if len(rows) == 1:
            return np.full(1, NOT_LIVE)
    half = len(rows) // 2
    return np.concatenate([find_generations(read, rows[:half]), find_generations(read, rows[half:])])


def _find_last(rows: Rows, is_same: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns the positions of the rows to write, each row once."""
    positions = np.flatnonzero(is_same)
    _, last = np.unique(rows[positions][::-1], return_index=True)
    return np.sort(positions[len(positions) - 1 - last])


def check_values(values: Any, num_rows: int, row: Spec, *, store: str) -> None:
    """Checks that values are leaves by key with a row for each row number, of which rows can be chosen.

    Args:
        values: The leaves.
        num_rows: How many rows are written.
        row: Structure of a row. A ragged leaf of it would take one tensor for all rows, whose elements are no rows.
        store: Name of the table, for errors.

    Raises:
        InvalidRequestError: They are not.
        NotSupportedError: A tensor has no elements of its own; see ``to_plain``.
    """
    if not (is_tensor_collection(values) or isinstance(values, dict)):
        reason = f"a {type(values).__name__} is neither a tensordict nor a dict of leaves"
        raise InvalidRequestError(argument="values", reason=reason)
    if is_tensor_collection(values):
        lengths = {values.batch_size[0] if values.batch_size else None}
    else:
        lengths = {count_rows(value) for value in values.values()}
    for length in lengths - {num_rows}:
        raise InvalidRequestError(argument="values", reason=f"{length} values for {num_rows} rows")
    for path, tensor in _iter_tensors(values, ()):
        if not tensor.is_nested:
            to_plain(tensor, path, store=store)
    if isinstance(values, dict):
        _check_ragged(values, row, (), num_rows)


def _iter_tensors(values: Any, above: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if is_tensor_collection(values):
        yield from iter_tensors(values, above)
    elif isinstance(values, torch.Tensor):
        yield above, values
    elif isinstance(values, dict):
        for key, value in values.items():
            yield from _iter_tensors(value, (*above, *((key,) if isinstance(key, str) else key)))


def _check_ragged(values: dict[Any, Any], row: Spec, above: Path, num_rows: int) -> None:
    ragged = {
        path: len(leaf.batch_size) + len(leaf.ragged.shape)
        for path, leaf in row.values
        if leaf.ragged is not None and leaf.ragged.dtype
    }
    for key, value in values.items():
        path = (*above, *((key,) if isinstance(key, str) else key))
        if isinstance(value, dict):
            _check_ragged(value, row, path, num_rows)
        elif path in ragged and _count_dims(value) == ragged[path]:
            reason = f"one tensor at key {quote(path)} for {num_rows} rows: give a list or nested tensor of theirs"
            raise InvalidRequestError(argument="values", reason=reason)


def _count_dims(value: Any) -> int | None:
    """Returns the dimensions of a dense tensor, an array or lists of numbers; None for anything else."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return None if isinstance(value, torch.Tensor) and value.is_nested else value.ndim
    depth = 0
    while isinstance(value, (list, tuple)) and value:
        value, depth = value[0], depth + 1
    return depth if isinstance(value, (bool, int, float, complex)) else None
