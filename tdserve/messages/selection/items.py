"""The items of an index expression, each on its own: parsed from Python, described in errors, sent as messages.

``selection`` combines them and applies them to batch sizes. NumPy only; torch tensors are recognised by their
``detach``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from types import EllipsisType
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import RemoteProtocolError
from tdserve.structure.trees.nodes import MAX_DIMS
from tdserve.v1 import content_pb2

Positions = NDArray[np.int64]
Mask = NDArray[np.bool_]
Item = int | slice | Positions | Mask | EllipsisType | None
"""A ``bool`` is kept as a mask without dimensions, a range or list as positions or mask."""

FULL = slice(None)

_INT64 = np.iinfo(np.int64)


def parse_item(item: Any) -> Item:
    """Parses one item between the brackets.

    Raises:
        TypeError: It is not an index.
        ValueError: A list is not an array.
        OverflowError: An integer does not fit 64 bits. The caller turns all three into a SelectionError.
    """
    kind = type(item)
    if kind is int:
        return _to_int64(item)
    if kind is slice:
        return slice(*(None if part is None else _clamp(part) for part in (item.start, item.stop, item.step)))
    if item is None or item is ...:
        return ... if item is ... else None
    if kind is bool:
        return np.array(item)
    if isinstance(item, np.ndarray):
        return _parse_array(_to_positions(item) if item.ndim and item.dtype != np.uint8 else item)
    if isinstance(item, range):
        return np.arange(item.start, item.stop, item.step, dtype=np.int64)
    if hasattr(item, "detach"):
        return _parse_array(_read_tensor(item))
    if isinstance(item, (list, tuple)):
        found = np.asarray(item)
        return _parse_array(found.astype(np.int64) if found.dtype.kind in "iu" or found.size == 0 else found)
    if isinstance(item, np.bool_):
        raise TypeError("a NumPy bool scalar is not an index, use a Python bool")
    if hasattr(item, "__index__"):
        return _to_int64(operator.index(item))
    raise TypeError(f"a {kind.__name__} is not an index")


def _read_tensor(item: Any) -> NDArray[Any]:
    """Returns a tensor's elements.

    Where a storage was freed, torch and NumPy read other memory, or crash. No module that control imports may import
    torch, so this looks itself.
    """
    try:
        if hasattr(item, "untyped_storage") and item.numel() and not item.data_ptr():
            raise TypeError("a tensor that has no memory, or whose memory was freed, is not an index")
        held = item.detach().cpu()
        if hasattr(held, "untyped_storage") and held.numel():
            last = held.storage_offset() + sum(
                (size - 1) * step for size, step in zip(held.shape, held.stride(), strict=True)
            )
            if held.untyped_storage().nbytes() < (last + 1) * held.element_size():
                raise TypeError("a tensor whose memory was freed is not an index")
        return np.asarray(held.numpy())
    except (RuntimeError, NotImplementedError) as fault:  # of a transform of torch.func, or without content
        raise TypeError(f"a tensor that cannot be read is not an index: {fault}") from None


def _to_positions(array: NDArray[Any]) -> NDArray[Any]:
    """Returns NumPy's integers of any width as int64: unlike torch's they are positions."""
    if array.dtype.kind not in "iu":
        return array
    if array.dtype == np.uint64 and array.size:
        _to_int64(int(array.max()))
    return array.astype(np.int64, copy=False)


def _parse_array(array: NDArray[Any]) -> Item:
    """Parses an array as torch does: bool and uint8 are masks, int32 and int64 positions; nothing else is an index."""
    if array.dtype == np.bool_:
        return array
    if array.dtype == np.uint8 and array.ndim:
        return array.astype(np.bool_)
    if array.dtype in (np.int64, np.int32):
        return np.ascontiguousarray(array, np.int64) if array.ndim else int(array)
    if array.size == 0 and array.dtype == np.float64:
        return array.astype(np.int64)  # np.array([]) and torch.tensor([]).double() mean no positions
    if array.ndim == 0 and array.dtype.kind in "iu":
        return _to_int64(int(array))
    raise TypeError(f"an array of dtype {array.dtype} is not an index, use int64 or bool")


def _to_int64(value: int) -> int:
    if not _INT64.min <= value <= _INT64.max:
        raise OverflowError(f"index {value} is out of range for any dimension")
    return value


def _clamp(value: Any) -> int:
    return max(_INT64.min, min(_INT64.max, operator.index(value)))  # slices clamp, so nothing is lost


def is_full(item: Item) -> bool:
    """Returns whether the item is ``:``."""
    return isinstance(item, slice) and item == FULL


def is_mask(item: Item) -> TypeGuard[Mask]:
    """Returns whether the item is a boolean array, which covers as many dimensions as it has."""
    return isinstance(item, np.ndarray) and item.dtype == np.bool_


def count_covered(item: Item) -> int:
    """Returns how many batch dimensions the item indexes; an ellipsis counts as none."""
    if item is None or item is ...:
        return 0
    return item.ndim if is_mask(item) else 1


def expand_slice(item: slice, size: int) -> Positions:
    """Returns the positions that a slice selects of a dimension, in its order."""
    return np.arange(*item.indices(size), dtype=np.int64)


def is_same(left: Item, right: Item) -> bool:
    """Returns whether two items are the same; a mask and its positions are not."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and left == right


def describe(item: object) -> str:
    """Returns the item as a user would type it, shortened, for errors."""
    if isinstance(item, np.ndarray):
        return f"<{item.dtype} array {list(item.shape)}>" if item.size > 16 else str(item.tolist())
    if isinstance(item, slice):
        ends = ["" if part is None else str(part) for part in (item.start, item.stop, item.step)]
        return ":".join(ends if ends[2] else ends[:2])
    if isinstance(item, Iterable) and not isinstance(item, (str, bytes, list, tuple, range)):
        return f"<{type(item).__name__}>"
    if isinstance(item, (list, tuple)) and any(hasattr(each, "detach") for each in item):
        return f"({', '.join(map(describe, item))})"  # torch crashes where it shows one in freed memory
    return "..." if item is ... else repr(item)


def encode_item(item: Item) -> content_pb2.IndexItem:
    """Returns the item as a message; arrays are copied."""
    if isinstance(item, np.ndarray):
        if item.dtype == np.bool_:
            return content_pb2.IndexItem(mask=content_pb2.BoolArray(shape=item.shape, data=np.packbits(item).tobytes()))
        data = item.astype("<i8", copy=False).tobytes()
        return content_pb2.IndexItem(positions=content_pb2.IntArray(shape=item.shape, data=data))
    if isinstance(item, slice):
        return content_pb2.IndexItem(slice=content_pb2.Slice(start=item.start, stop=item.stop, step=item.step))
    if item is None:
        return content_pb2.IndexItem(newaxis=True)
    if item is ...:
        return content_pb2.IndexItem(ellipsis=True)
    return content_pb2.IndexItem(at=item)


def decode_item(item: content_pb2.IndexItem) -> Item:
    """Returns the item that a peer sent; positions are a read-only view of the message's bytes.

    Raises:
        RemoteProtocolError: The item is empty, or an array's size contradicts its bytes.
    """
    kind = item.WhichOneof("kind")
    if kind == "at":
        return item.at
    if kind == "slice":
        part = item.slice
        start, stop, step = (getattr(part, end) if part.HasField(end) else None for end in ("start", "stop", "step"))
        return slice(start, stop, step)
    if kind == "positions":
        return _decode_positions(item.positions)
    if kind == "mask":
        return _decode_mask(item.mask)
    if kind == "newaxis" and item.newaxis:
        return None
    if kind == "ellipsis" and item.ellipsis:
        return ...
    raise RemoteProtocolError(expected="an index item", received=f"{kind} without a value")


def _decode_positions(array: content_pb2.IntArray) -> Positions:
    if array.file:  # the server's own file, whose size it has checked; it does not change while it exists
        shape = _check_shape(array.shape, array.nbytes_ahead, 64)
        return np.asarray(np.memmap(array.file, "<i8", "r", array.offset, shape))
    data = array.data
    shape = _check_shape(array.shape, len(data), 64)
    return np.frombuffer(data, "<i8").reshape(shape).astype(np.int64, copy=False)


def _decode_mask(array: content_pb2.BoolArray) -> Mask:
    data = array.data
    shape = _check_shape(array.shape, len(data), 1)
    bits = np.frombuffer(data, np.uint8)
    if len(bits) and int(bits[-1]) & (0xFF >> (math.prod(shape) - 1) % 8 + 1):
        raise RemoteProtocolError(expected="zeros behind the last bit of a mask", received=f"{int(bits[-1]):#x}")
    return np.unpackbits(bits, count=math.prod(shape)).view(np.bool_).reshape(shape)


def _check_shape(sizes: Iterable[int], nbytes: int, num_bits: int) -> tuple[int, ...]:
    """Returns the shape of an array of elements of ``num_bits``. Raises RemoteProtocolError unless it has
    ``nbytes``."""
    shape = tuple(sizes)
    has_room = len(shape) <= MAX_DIMS and all(0 <= size < 1 << 40 for size in shape)
    if not has_room or -(-math.prod(shape) * num_bits // 8) != nbytes:
        raise RemoteProtocolError(expected=f"an array of shape {list(shape)[:8]}", received=f"{nbytes} bytes")
    return shape


def split_index(index: Any, num_dims: int, num_all: int | None = None) -> tuple[Any, Any]:
    """Splits an index in two: the part for the first dimensions, and the rest for the result of that.

    Args:
        num_dims: Number of the first dimensions.
        num_all: Number of all dimensions; None if it is unknown: then an ellipsis counts for one of the first.

    Returns:
        The second is None if nothing is left. If arrays, masks and new dimensions have to be applied together, the
        first selects everything that they might select.
    """
    if num_dims == 0:
        return ((), None) if index is Ellipsis or (isinstance(index, tuple) and not index) else ((), index)
    items = _expand_items(index if isinstance(index, tuple) else (index,), num_all)
    if items is None or sum(map(_count_covered, items)) <= num_dims:
        return index, None
    first, rest = items[:num_dims], items[num_dims:]
    if all(isinstance(item, (int, slice, np.integer)) and not isinstance(item, bool) for item in first):
        return first, (*(FULL for item in first if isinstance(item, slice)), *rest)
    positions = _read_positions(first[0]) if num_dims == 1 else None
    if positions is None:
        return ..., items
    return (positions.reshape(-1),), (np.arange(positions.size).reshape(positions.shape), *rest)


def _expand_items(items: tuple[Any, ...], num_all: int | None) -> tuple[Any, ...] | None:
    """Returns the items without an ellipsis, and without trailing items that select everything; None if that is
    unknown."""
    at = next((number for number, item in enumerate(items) if item is ...), None)
    if at is not None:
        if num_all is None:
            return None
        num_left = num_all - sum(map(_count_covered, items))
        items = (*items[:at], *(FULL,) * max(num_left, 0), *items[at + 1 :])
    while items and isinstance(items[-1], slice) and items[-1] == FULL:
        items = items[:-1]
    return items


def _count_covered(item: Any) -> int:
    """Like ``count_covered``, for an item that is not parsed yet."""
    if item is None or item is ... or isinstance(item, (bool, np.bool_)):
        return 0
    is_mask = str(getattr(item, "dtype", "")).removeprefix("torch.") in ("bool", "uint8")
    return int(item.ndim) if is_mask else 1


def _read_positions(item: Any) -> Positions | None:
    """Returns the positions along one dimension that an array or list selects; None for anything else."""
    try:
        found = parse_item(item)
    except (TypeError, ValueError, OverflowError):
        return None
    if not isinstance(found, np.ndarray):
        return None
    if found.dtype == np.bool_:
        return found.nonzero()[0].astype(np.int64, copy=False) if found.ndim == 1 else None
    return found.astype(np.int64, copy=False)
