"""Selections applied to torch tensors: the leaves of a tensordict, which have more dimensions than its batch.

This is separate from ``selection`` because the control process must not import torch, and from ``dimension_names``
because data workers need not import tensordict, which takes as long again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tdserve.messages.selection.items import Item
from tdserve.messages.selection.selection import Selection

TorchIndex = tuple[int | bool | slice | torch.Tensor | None, ...]


def to_torch_index(selection: Selection, batch_size: Sequence[int]) -> TorchIndex:
    """Returns an index for any leaf of a tensordict of ``batch_size``: ``leaf[index]`` reads, ``leaf[index] = value``
    writes.

    It never reaches beyond the batch dimensions, has no ellipsis and no negative step, and its tensors are on the CPU.
    If it is ``()`` or has only integers, slices and ``None``, the result is a view of the leaf.

    Args:
        selection: Canonical or not.
        batch_size: Batch size of the tensordict of the leaf; the leaf's shape starts with it.

    Raises:
        SelectionError: The selection does not fit the batch size.
    """
    canonical = selection.canonicalise(batch_size).replace_negative_steps(batch_size)
    return tuple(map(to_torch_item, canonical.items))


def to_torch_item(item: Item) -> int | bool | slice | torch.Tensor | None:
    """Returns one item of a canonical selection, as torch indexes."""
    if isinstance(item, np.ndarray):
        if item.ndim == 0:
            return bool(item)
        # torch warns about read-only arrays, such as those from messages, and does not support negative strides.
        is_fit = item.flags.writeable and item.flags.c_contiguous and min(item.strides) >= 0
        return torch.from_numpy(item if is_fit else item.copy())
    return None if item is ... else item  # canonical selections have no ellipsis
