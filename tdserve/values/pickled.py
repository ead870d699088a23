"""Python objects as pickles: the only module of tdserve that pickles and unpickles users' objects.

Unpickling runs code that the bytes choose. So it happens only where a user passed ``allow_pickle=True``, and never in a
server, which keeps these bytes without looking inside.

torch pickles the whole storage of a tensor, also for a view of a part: a row of a table would take the table along. So
a view is pickled as a tensor of its own elements.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from typing import Any

from tdserve.base.errors import NotSupportedError

_PROTOCOL = 5
"""Pickle protocol: the newest that every Python from 3.8 on reads."""


def dump(value: Any, *, key: str = "") -> bytes:
    """Returns the pickle of a value.

    Raises:
        NotSupportedError: Names ``key``; the object refuses. Nothing was changed.
    """
    try:
        written = io.BytesIO()
        _Pickler(written, protocol=_PROTOCOL).dump(value)
        return written.getvalue()
    except Exception as error:  # noqa: BLE001 - an object's own __reduce__ may raise anything
        raise _make_pickling_error(f"pickling a {_name(value)} at key {key!r}", error) from None


def load(content: bytes | memoryview, *, key: str = "") -> Any:
    """Returns the value of a pickle. Runs whatever code the pickle names.

    Raises:
        NotSupportedError: Names ``key``; this process lacks a class or a module, or the bytes are damaged.
    """
    try:
        return pickle.loads(content)  # noqa: S301 - the user asked for it
    except Exception as error:  # noqa: BLE001 - what a pickle runs may raise anything
        raise _make_pickling_error(f"unpickling the value at key {key!r}", error) from None


class _Pickler(pickle.Pickler):
    """Pickles views without the rest of their storage. A tensor that a value has twice is one tensor afterwards."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")  # a caller that gives a tensor has it; others need not wait for it
        kind = type(obj)
        if torch is None or not issubclass(kind, torch.Tensor) or kind.__reduce_ex__ is not torch.Tensor.__reduce_ex__:
            return NotImplemented  # a parameter pickles its data, which comes here by itself
        if obj.is_nested or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        try:
            num_held = obj.untyped_storage().nbytes() // obj.element_size()
        except (NotImplementedError, RuntimeError):  # it wraps other tensors
            return NotImplemented
        return _copy_view(obj).__reduce_ex__(_PROTOCOL) if num_held > _count_own(obj) else NotImplemented


def _count_own(tensor: Any) -> int:
    """Returns how many elements a tensor has in memory: those that it repeats, or that overlap, count once."""
    dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    span = 1 + sum((size - 1) * stride for size, stride in dims)
    return 0 if not tensor.numel() else min(math.prod(size for size, _ in dims), span)


def _copy_view(tensor: Any) -> Any:
    """Returns a tensor of the same elements in memory of their own; repeated ones are still repeated."""
    whole = tensor.detach()
    single = whole[tuple(slice(None) if stride else slice(1) for stride in tensor.stride())] if tensor.dim() else whole
    copied = single.clone().expand(tensor.shape).requires_grad_(tensor.requires_grad)
    copied.__dict__.update(tensor.__dict__)
    return copied


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _make_pickling_error(feature: str, error: Exception) -> NotSupportedError:
    return NotSupportedError(feature=feature, reason=f"{type(error).__name__}: {error}"[:300])
