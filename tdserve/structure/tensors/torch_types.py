"""torch's dtypes by name, both ways; the names are those of ``dtypes.ITEMSIZE``."""

from __future__ import annotations

import torch

from tdserve.base.errors import NotSupportedError
from tdserve.structure.trees.dtypes import ITEMSIZE

TO_TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}
"""Name to dtype; an older torch may lack some of them."""

FROM_TORCH: dict[torch.dtype, str] = {dtype: name for name, dtype in TO_TORCH.items()}
"""Dtype to name."""


def to_torch(name: str) -> torch.dtype:
    """Returns the dtype of a name.

    Raises:
        NotSupportedError: This torch has no such dtype. Nothing was changed.
    """
    dtype = TO_TORCH.get(name)
    if dtype is None:
        raise NotSupportedError(feature=f"dtype {name}", reason=f"torch {torch.__version__} does not have it")
    return dtype


def from_torch(dtype: torch.dtype) -> str:
    """Returns the name of a dtype.

    Raises:
        NotSupportedError: tdserve does not support it (quantized and sub-byte types). Nothing was changed.
    """
    name = FROM_TORCH.get(dtype)
    if name is None:
        raise NotSupportedError(feature=f"dtype {dtype}", reason=f"tensors may have {', '.join(TO_TORCH)}")
    return name


_AS_INTEGERS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.complex32: torch.int32,
    **{dtype: torch.uint8 for name, dtype in TO_TORCH.items() if name.startswith("float8")},
}


def to_indexable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as integers of their size if torch cannot index the dtype itself; else the tensor.

    Some of these dtypes have no ``index_select``, others no ``index_put_`` (torch 2.13, CPU); only bytes matter.
    """
    dtype = _AS_INTEGERS.get(tensor.dtype)
    return tensor if dtype is None else tensor.view(dtype)


def view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor's memory as uint8 ``[nbytes]``, shared."""
    flat = tensor.reshape(-1) if tensor.dim() != 1 else tensor
    if flat.stride(0) != 1:  # torch calls any stride contiguous for at most one element
        flat = flat.as_strided(flat.shape, (1,))
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)
