"""Views of memory without a tensor of its own: each has its own version counter.

In torch views of one tensor share their counter, so that an in-place change of one leaf would make a backward fail that
needs another. They share their storage too, and ``torch.save`` refuses tensors of several dtypes over one storage:
:func:`view_memory` makes tensors with storages of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.structure.torch_private import nothing_noted


def make_independent_views(make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Makes views that behave as if each were a tensor of its own over its memory.

    Args:
        make: Makes views of tensors that require no grad.
    """
    if nothing_noted is None:
        return [view.data for view in make()]
    with nothing_noted():
        return make()


def view_memory(
    memory: NDArray[np.uint8],
    dtype: torch.dtype,
    size: Sequence[int],
    offset: int,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """Returns a tensor over a part of memory, whose storage is that part alone; it keeps the memory alive. Without
    elements it has a storage of its own.

    It takes no longer than a view of a tensor.

    Args:
        offset, strides: In bytes; None for a contiguous tensor.
    """
    if 0 in size:  # its place is that of the next leaf, for which torch.save would take it
        return torch.empty(tuple(size), dtype=dtype, device="cpu")
    plain = _TO_NUMPY.get(dtype)
    if plain is not None:
        return torch.from_numpy(np.ndarray(size, plain, memory, offset, strides))
    return torch.from_numpy(np.ndarray(size, _INTEGERS[dtype.itemsize], memory, offset, strides)).view(dtype)


_SHARED_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)

_TO_NUMPY: Mapping[torch.dtype, np.dtype[Any]] = {getattr(torch, name): np.dtype(name) for name in _SHARED_NAMES}
"""The dtypes that NumPy has too."""

_INTEGERS: Mapping[int, np.dtype[Any]] = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}
