"""Chooses some rows of what a caller gives for several: a batch, a leaf of it, values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_non_tensor, is_tensor_collection

from tdserve.structure.tensordicts.entries import get_entry
from tdserve.structure.tensors.pieces import make_nested
from tdserve.structure.tensors.torch_types import from_torch
from tdserve.structure.trees.tree import Path

Where = torch.Tensor | slice
"""Positions of rows, or a slice of them."""


def choose_rows(values: Any, where: Where) -> Any:
    """Returns some rows of values that have a first dimension of rows.

    Neither torch nor tensordict selects among the components of a strided nested tensor, and torch alone not among
    those of a jagged one.

    Args:
        values: A tensordict, also one with nested tensors, a lazy stack, a stack of values, a tensor, also a nested
            one, an array, a list or tuple, or a dict of these.
        where: Which of them.
    """
    if isinstance(values, dict):
        return {key: choose_rows(value, where) for key, value in values.items()}
    if is_tensor_collection(values):
        return _choose_of_collection(values, where)
    if isinstance(values, torch.Tensor):
        return _choose_of_nested(values, where) if values.is_nested else values[where]
    if isinstance(values, np.ndarray):
        return values[where if isinstance(where, slice) else where.numpy()]
    listed = list(values)
    return listed[where] if isinstance(where, slice) else [listed[number] for number in where.tolist()]


def count_rows(values: Any) -> int | None:
    """Returns the size of the first dimension of values, as in ``choose_rows``; None if they have none, or leaves of a
    dict differ in it."""
    if isinstance(values, dict):
        counts = {count_rows(value) for value in values.values()}
        return counts.pop() if len(counts) == 1 else None
    if isinstance(values, (list, tuple)):
        return len(values)
    if isinstance(values, torch.Tensor) and values.is_nested:
        return values.size(0)
    shape: Sequence[int] = getattr(values, "shape", ())
    return int(shape[0]) if len(shape) else None


def _choose_of_collection(rows: Any, where: Where) -> Any:
    strided = {path: tensor for path, tensor in iter_tensors(rows) if _is_strided(tensor)}
    if not strided:
        return rows[where]
    found = rows.exclude(*strided)[where]
    for path, tensor in strided.items():
        found.set(path, _choose_of_nested(tensor, where))
    return found


def _choose_of_nested(tensor: torch.Tensor, where: Where) -> torch.Tensor:
    if not _is_strided(tensor):
        found: torch.Tensor = TensorDict({"rows": tensor}, [tensor.size(0)])[where].get("rows")
        return found
    return make_nested(choose_rows(tensor.detach().unbind(), where), from_torch(tensor.dtype))


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.is_nested and tensor.layout is torch.strided


def iter_tensors(td: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yields the tensors of a tensordict; not those of lazy stacks, whose rows are tensordicts of their own."""
    if is_non_tensor(td) or isinstance(td, LazyStackedTensorDict):
        return
    for key in td.keys():  # noqa: SIM118 (a tensordict iterates over its rows)
        entry = get_entry(td, (key,))
        if is_tensor_collection(entry):
            yield from iter_tensors(entry, (*path, key))
        elif isinstance(entry, torch.Tensor):
            yield (*path, key), entry
