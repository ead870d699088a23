"""Converts lazily stacked rows into a tensordict of columns that a table accepts."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack
from tensordict.utils import is_non_tensor

from tdserve.structure.trees.tree import Spec


def destack(batch: Any, row: Spec) -> TensorDict | None:
    """Converts a lazy stack of rows to the form of a table: dense except for the parts that may differ.

    A stack counts as differing as a whole if one part of its rows differs.

    Args:
        batch: The rows to write.
        row: The structure of the table's rows.

    Returns:
        The same rows; None if ``batch`` is no such stack, or cannot be converted.
    """
    parts = [path[0] for path in row.packed if len(path) == 1]
    if type(batch) is not LazyStackedTensorDict or batch.stack_dim != 0 or not parts:
        return None
    rows, keys = batch.tensordicts, {key for key, _ in row.root.entries}
    if any(set(each.keys()) != keys for each in rows):
        return None
    columns = {key: _destack_column([each.get(key) for each in rows], is_part=key in parts) for key in keys}
    if any(column is None for column in columns.values()):
        return None
    return TensorDict(columns, batch.batch_size[: 1 + len(row.batch_size)])


def _destack_column(items: list[Any], *, is_part: bool) -> Any:
    if is_part:
        return lazy_stack(items)
    if all(map(is_non_tensor, items)):
        return NonTensorStack(*items)
    try:
        return torch.stack(items)
    except (RuntimeError, TypeError):  # they differ where the table allows no difference
        return None
