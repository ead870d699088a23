"""Selections applied to torch tensors: the leaves of a tensordict, which have more dimensions than its batch.

Apart from ``selection`` because the control process must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tdserve.selection import Selection
from tdserve.selection_items import Item

TorchIndex = tuple[int | bool | slice | torch.Tensor | None, ...]


def to_torch_index(selection: Selection, batch_size: Sequence[int]) -> TorchIndex:
    """An index for any leaf of a tensordict of ``batch_size``: ``leaf[index]`` reads, ``leaf[index] = value`` writes.

    It never reaches past the batch dimensions, has no ellipsis and no negative step, and its tensors lie on the CPU.
    When it is ``()`` or has only integers, slices and ``None``, what is read is a view of the leaf.

    Args:
        selection: Canonical or not.
        batch_size: Of the tensordict whose leaf is indexed; the leaf's shape starts with it.

    Raises:
        SelectionError: The selection does not fit the batch size.
    """
    canonical = selection.canonical(batch_size).without_negative_steps(batch_size)
    return tuple(map(_to_torch, canonical.items))


def result_names(
    names: Sequence[str | None] | None, batch_size: Sequence[int], selection: Selection
) -> tuple[str | None, ...] | None:
    """Names of the dimensions of what is selected, by tensordict's own rules; ``None`` when there are no names.

    Args:
        names: One per batch dimension, or ``None``.
        batch_size: Of the tensordict.
        selection: Fits the batch size.
    """
    if names is None or all(name is None for name in names):
        return None
    canonical = selection.canonical(batch_size)
    # A negative step names its dimension as a positive one does, and tensordict knows only the latter.
    index = tuple(_to_torch(_upwards(item)) for item in canonical.items)
    given: Any = list(names)  # tensordict's annotation forgets that a dimension may be unnamed
    empty = TensorDict({}, batch_size=list(batch_size), names=given)
    found = tuple((empty[index] if index else empty).names)
    return None if all(name is None for name in found) else found


def _to_torch(item: Item) -> int | bool | slice | torch.Tensor | None:
    if isinstance(item, np.ndarray):
        if item.ndim == 0:
            return bool(item)
        # torch warns of arrays it must not write to, as those from messages are, and knows no negative strides.
        is_fit = item.flags.writeable and item.flags.c_contiguous and min(item.strides) >= 0
        return torch.from_numpy(item if is_fit else item.copy())
    return None if item is ... else item  # canonical selections have no ellipsis


def _upwards(item: Item) -> Item:
    if isinstance(item, slice) and item.step is not None and item.step < 0:
        return slice(None, None, -item.step)
    return item
