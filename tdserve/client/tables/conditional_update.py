"""Writes leaves of rows that are still the same: compare and set, row by row.

The server compares the generations of all rows of a write and writes all of them, or none. If it writes none, this end
asks which rows have changed, and leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_tensor_collection

from tdserve.base.errors import InvalidRequestError, SelectionError
from tdserve.client.transfers.write import ExpectedRows
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.ring import ROW_ID_MASK

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
        generations: Of each.
        values: Leaves by key, with a first dimension of rows.
        is_unchanged: Whether a row is another one, too, once a part of it was written.

    Raises:
        SelectionError: All of them seem to be the same, and the server refuses them nevertheless.
        Others: As raised by ``overwrite``. Nothing was written.
    """
    compared = generations if is_unchanged else to_names(generations)
    is_same = generations >= 0
    while is_same.any():
        left = _find_last(rows, compared, is_same)
        expected = generations[left].astype("<i8" if is_unchanged else "<u4").tobytes()
        try:
            overwrite(rows[left], _choose(values, left), ExpectedRows(expected, has_stamps=is_unchanged))
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


def _find_last(rows: Rows, compared: NDArray[np.int64], is_same: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns the positions of the rows to write, each row once."""
    positions = np.flatnonzero(is_same)
    _, last = np.unique(rows[positions][::-1], return_index=True)
    return np.sort(positions[len(positions) - 1 - last])


def _choose(values: Any, positions: NDArray[np.int64]) -> Any:
    if is_tensor_collection(values):
        return values[torch.from_numpy(positions)]
    return {key: _choose_of_leaf(value, positions) for key, value in values.items()}


def _choose_of_leaf(value: Any, positions: NDArray[np.int64]) -> Any:
    if isinstance(value, torch.Tensor):
        return value[torch.from_numpy(positions).to(value.device)]
    if isinstance(value, np.ndarray):
        return value[positions]
    return _choose(value, positions) if isinstance(value, dict) else [value[number] for number in positions]


def check_values(values: Any, num_rows: int) -> None:
    """Raises InvalidRequestError unless values are leaves by key with a row for each row number."""
    if not (is_tensor_collection(values) or isinstance(values, dict)):
        reason = f"a {type(values).__name__} is neither a tensordict nor a dict of leaves"
        raise InvalidRequestError(argument="values", reason=reason)
    if is_tensor_collection(values):
        lengths = {values.batch_size[0] if values.batch_size else None}
    else:
        lengths = {_measure(value) for value in values.values()}
    for length in lengths - {num_rows}:
        raise InvalidRequestError(argument="values", reason=f"{length} values for {num_rows} rows")


def _measure(value: Any) -> int | None:
    if isinstance(value, dict):
        lengths = {_measure(each) for each in value.values()}
        return lengths.pop() if len(lengths) == 1 else None
    shape = np.shape(value) if not hasattr(value, "shape") else value.shape
    return int(shape[0]) if len(shape) else None
