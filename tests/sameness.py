"""Equality in type, structure and value: everything that can be seen of a tensordict from outside."""

from __future__ import annotations

import datetime as dt
import struct
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensorclass
from tensordict.nn import TensorDictParams


def assert_same(found: Any, expected: Any) -> None:
    """Fails with the first difference in type, structure, dtype, bits, names, batch size, device, locks or
    requires_grad."""
    text = difference(found, expected)
    assert text is None, text


def same_value(left: Any, right: Any) -> bool:
    """Returns whether values are equal in type and content, down to the bits of floats and the order of dict keys."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, dict):
        return same_value(list(left.items()), list(right.items()))
    if isinstance(left, (set, frozenset)):  # nan does not equal itself
        return len(left) == len(right) and all(any(same_value(one, other) for other in right) for one in left)
    if type(left) is complex:
        return same_value([left.real, left.imag], [right.real, right.imag])
    if isinstance(left, (dt.datetime, dt.time)):
        return repr(left) == repr(right)
    if type(left) is float:
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, np.ndarray) or (isinstance(left, np.generic) and not isinstance(left, (str, bytes))):
        return (left.dtype.str, left.shape, left.tobytes()) == (right.dtype.str, right.shape, right.tobytes())
    if isinstance(left, (str, bytes)):  # NumPy's own comparison ignores trailing zeros
        return left[:] == right[:] and len(left) == len(right)
    return bool(left == right)


def difference(left: Any, right: Any, where: str = "root") -> str | None:
    """Returns the first difference between two tensordicts, tensors or instances; None if there is none."""
    for side in (left, right):
        if isinstance(side, LazyStackedTensorDict):
            _ = side.tensordicts  # at the first look it becomes a plain one
    if type(left) is not type(right):
        return f"{where}: {type(left)} against {type(right)}"
    if isinstance(left, torch.Tensor) and not isinstance(left, TensorDictBase):
        return _tensors(left, right, where)
    if isinstance(left, NonTensorData):
        return _outside(left, right, where) or _values(left.data, right.data, where)
    if isinstance(
        left, NonTensorStack
    ):  # tensordict itself may change the dimension along which its values are stacked
        return _outside(left, right, where) or _values(left.tolist(), right.tolist(), where)
    found = _outside(left, right, where) or _locked(left, right, where)
    if found:
        return found
    if isinstance(left, TensorDictParams):
        return _params(left, right, where)
    if is_tensorclass(left):
        mine, theirs = _set_fields(left), _set_fields(right)
        return _values(mine, theirs, f"{where} beside") or difference(left._tensordict, right._tensordict, where)
    if isinstance(left, LazyStackedTensorDict):
        return _stacks(left, right, where)
    if list(left.keys()) != list(right.keys()):
        return f"{where}: {list(left.keys())} against {list(right.keys())}"
    found_below = (difference(_entry(left, key), _entry(right, key), f"{where}.{key!r}") for key in list(left.keys()))
    return next((text for text in found_below if text), None)


def _set_fields(instance: Any) -> dict[str, Any]:
    """Returns the non-tensor fields that are not None: whether others are kept depends on tensordict's version."""
    return {name: value for name, value in (instance._non_tensordict or {}).items() if value is not None}


def _outside(left: Any, right: Any, where: str) -> str | None:
    outside = [(list(side.batch_size), list(side.names), side.device) for side in (left, right)]
    return None if outside[0] == outside[1] else f"{where}: {outside[0]} against {outside[1]}"


def _locked(left: Any, right: Any, where: str) -> str | None:
    locks = (left.is_locked, right.is_locked)
    return None if locks[0] == locks[1] else f"{where}: locked {locks[0]} against {locks[1]}"


def _values(left: Any, right: Any, where: str) -> str | None:
    return None if same_value(left, right) else f"{where}: {left!r} against {right!r}"


def _stacks(left: Any, right: Any, where: str) -> str | None:
    shapes = [(side.stack_dim, len(side.tensordicts)) for side in (left, right)]
    if shapes[0] != shapes[1]:
        return f"{where}: stack dimension and rows {shapes}"
    rows = enumerate(zip(left.tensordicts, right.tensordicts, strict=True))
    return next((text for number, pair in rows if (text := difference(*pair, f"{where}[{number}]"))), None)


def _params(left: Any, right: Any, where: str) -> str | None:
    outside = [
        (side.no_convert, side._lock_content, side.training, list(side._parameters), list(side._buffers))
        for side in (left, right)
    ]
    if outside[0] != outside[1]:
        return f"{where}: {outside[0]} against {outside[1]}"
    return difference(left._param_td, right._param_td, f"{where}.params")


def _tensors(left: torch.Tensor, right: torch.Tensor, where: str) -> str | None:
    outside = [
        (side.dtype, side.layout, side.device, side.requires_grad, side.is_nested, _buffer(side))
        for side in (left, right)
    ]
    if outside[0] != outside[1]:
        return f"{where}: {outside[0]} against {outside[1]}"
    if left.is_nested:
        parts = [side.detach().unbind() for side in (left, right)]
        if len(parts[0]) != len(parts[1]):
            return f"{where}: {len(parts[0])} against {len(parts[1])} components"
        pairs = enumerate(zip(parts[0], parts[1], strict=True))
        texts = (_tensors(mine, theirs, f"{where}[{number}]") for number, (mine, theirs) in pairs)
        return next((text for text in texts if text), None)
    is_equal = left.shape == right.shape and (left.is_meta or _bits(left).equal(_bits(right)))
    return None if is_equal else f"{where}: {left} against {right}"


def _buffer(tensor: torch.Tensor) -> bool | None:
    """Returns whether a buffer is persistent; None for anything else."""
    return bool(getattr(tensor, "persistent", True)) if getattr(tensor, "_is_buffer", False) else None


def _entry(td: Any, key: str) -> Any:
    return (td if isinstance(td, TensorDict) else getattr(td, "_tensordict", td)).get(key)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)
