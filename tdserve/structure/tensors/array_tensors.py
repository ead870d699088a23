"""Arrays of NumPy as tensors, which share their memory where torch can."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.errors import NotSupportedError
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees.dtypes import WIDER
from tdserve.structure.trees.matching import quote
from tdserve.structure.trees.nodes import Path

_REMEDIES = {
    "M": "give its .view('int64')",
    "m": "give its .view('int64')",
    "V": "give each of its fields under a key of its own",
    "f": "give its .astype('float64')",
    "c": "give its .astype('complex128')",
}
"""What to give instead of arrays that torch has no dtype for, by the kind of their dtype."""


def read_array(array: NDArray[Any], path: Path = (), *, store: str = "", dtype: str = "") -> torch.Tensor:
    """Returns a tensor of an array's elements, which shares its memory where torch can.

    Args:
        array: The array.
        path, store: For errors.
        dtype: Dtype of the leaf that it is for, if that is known. An array cannot have each of them: float32 that was
            read from a bfloat16 leaf becomes bfloat16 again, and other float32 too if that changes no value.

    Raises:
        NotSupportedError: torch has no such dtype.
    """
    tensor = _read_array(array, path, store)
    wider = WIDER.get(dtype)
    if wider is None or tensor.dtype != to_torch(wider):
        return tensor
    narrow = tensor.to(to_torch(dtype))
    is_same = (narrow.to(tensor.dtype) == tensor) | (tensor != tensor)  # NaN stays NaN
    return narrow if is_same.all() else tensor


def _read_array(array: NDArray[Any], path: Path, store: str) -> torch.Tensor:
    try:
        if array.flags.writeable and not isinstance(array, np.ma.MaskedArray):
            return torch.from_numpy(array)
    except (TypeError, ValueError):  # another dtype, byte order, or strides
        pass
    if isinstance(array, np.ma.MaskedArray):
        raise make_refusal("a masked array", path, store, "give its .filled(value)")
    try:
        # By its text it is one dtype for both C types of this size, of which torch has one.
        native = np.dtype(array.dtype.str).newbyteorder("=")
        return torch.from_numpy(np.array(array, dtype=native, order="C", subok=False).view(native))
    except TypeError:
        reason = _REMEDIES.get(array.dtype.kind, "torch has no such dtype")
        what = "an array" if array.ndim else "a scalar"
        raise make_refusal(f"{what} of dtype {array.dtype}", path, store, reason) from None


def make_refusal(what: str, path: Path, store: str, reason: str) -> NotSupportedError:
    """Returns the error for content that no tensor can show, with its key."""
    where = f" at key {quote(path)}" if path else ""
    return NotSupportedError(feature=f"{what}{where}" + (f" of store {store!r}" if store else ""), reason=reason)
