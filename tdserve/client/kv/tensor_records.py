"""Records of tensors in a keyed store without a structure: one by one, or many of one dtype and shape together.

A record is its form (one byte), the dtype's number in messages, the number of dimensions, five zeros, the shape as
int64, and the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch

from tdserve.base.errors import RemoteProtocolError
from tdserve.structure.tensors.plain_tensors import is_in_memory
from tdserve.structure.tensors.torch_types import from_torch, to_torch, view_bytes
from tdserve.structure.trees.dtypes import NAMES, WIRE
from tdserve.values.value_bundles import SplitColumn

TENSOR_FORM = 2

LARGE_BYTES = 4096
"""Tensors from this size on are better passed on one by one than copied together."""

BLOCK_ELEMENTS = 32 * 1024 - 1
"""Elements that are copied at once: torch copies more of them by several threads, which wait for one another busily
where another process has the other cores. They are stacked first while they are in the cache."""

_HEAD = struct.Struct("<BBB5x")

_NUMPY_DTYPES = {
    WIRE[name]: np.dtype(name) for name in ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}
"""Dtypes that NumPy and torch have in common, by their number in messages."""

_SHARED_DTYPES = {to_torch(NAMES[number]) for number in _NUMPY_DTYPES}

_COLUMN_DTYPES = {*_SHARED_DTYPES, torch.bool, torch.bfloat16}
"""Dtypes of at most eight bytes, which torch stacks."""

Column = torch.Tensor | Sequence[torch.Tensor]
"""Tensors of one form: the rows of one tensor, or several tensors."""

Form = tuple[torch.dtype, torch.Size]


def find_form(value: Any) -> Form | None:
    """Returns the dtype and shape of a tensor that may be encoded together with others; None for any other value."""
    if type(value) is not torch.Tensor or not value.is_cpu or value.layout is not torch.strided or value.is_nested:
        return None
    dtype = value.dtype
    return (dtype, value.shape) if dtype in _COLUMN_DTYPES and is_in_memory(value) else None


def encode_column(column: Column, *, copies: bool) -> SplitColumn:
    """Returns the records of tensors of one form (``find_form``); there is at least one.

    Args:
        copies: Whether the tensors may change before the records are used. Otherwise large ones are not copied.
    """
    first, num_rows = column[0], len(column)
    head = _make_head(WIRE[from_torch(first.dtype)], first.shape)
    width = len(head) + first.nbytes
    sizes = np.full(num_rows, width)
    if first.nbytes >= LARGE_BYTES and not copies:
        pieces = zip(repeat(head), map(_view_in_c_order, column), strict=False)
        return SplitColumn(sizes, [list(chain.from_iterable(pieces))])
    flat = torch.empty(num_rows * width, dtype=torch.uint8)
    flat.view(num_rows, width)[:, : len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    if first.nbytes:
        bodies = flat.view(first.dtype).view(num_rows, -1)[:, len(head) // first.itemsize :]
        _copy_rows(column, bodies.view(num_rows, *first.shape))
    return SplitColumn(sizes, [[flat.numpy().data]])


def _view_in_c_order(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor, in C order; a copy if they are in another one."""
    plain = tensor if tensor.is_contiguous() else tensor.contiguous()
    bits = plain if plain.dtype in _SHARED_DTYPES else view_bytes(plain.detach())
    return bits.numpy(force=True).data.cast("B")


@torch.no_grad()
def _copy_rows(column: Column, places: torch.Tensor) -> None:
    """Copies tensors of at least one element to their places."""
    num_elements = places[0].numel()
    num_rows = BLOCK_ELEMENTS // num_elements
    if not num_rows:
        for place, tensor in zip(places, column, strict=True):
            pieces = zip(place.view(-1).split(BLOCK_ELEMENTS), tensor.reshape(-1).split(BLOCK_ELEMENTS), strict=True)
            for target, source in pieces:
                target.copy_(source)
        return
    for start in range(0, len(column), num_rows):
        rows = column[start : start + num_rows]
        places[start : start + len(rows)].copy_(rows if isinstance(rows, torch.Tensor) else torch.stack(list(rows)))


@lru_cache(maxsize=1024)
def _make_head(number: int, shape: torch.Size) -> bytes:
    return _HEAD.pack(TENSOR_FORM, number, len(shape)) + struct.pack(f"<{len(shape)}q", *shape)


def encode_tensor(tensor: torch.Tensor) -> bytes:
    """Returns the record of a plain tensor (``to_plain``)."""
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    number = WIRE[from_torch(plain.dtype)]
    head = _make_head(number, plain.shape)
    bits = plain if number in _NUMPY_DTYPES else view_bytes(plain)
    return head + bits.numpy().tobytes()


def decode_tensor(record: bytes) -> torch.Tensor:
    """Returns the tensor of a record. Raises RemoteProtocolError for anything else."""
    try:
        _, number, num_dims = _HEAD.unpack_from(record)
        shape = struct.unpack_from(f"<{num_dims}q", record, _HEAD.size)
        begin = _HEAD.size + 8 * num_dims
        of_numpy = _NUMPY_DTYPES.get(number)
        if of_numpy is not None and begin < len(record):  # in half the time
            return torch.from_numpy(np.frombuffer(record, of_numpy, offset=begin).reshape(shape).copy())
        dtype = to_torch(NAMES[number])
        if begin == len(record):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(record[begin:]), dtype=dtype).view(shape)
    except (struct.error, KeyError, RuntimeError, ValueError) as fault:
        raise RemoteProtocolError(expected="a tensor", received=f"{fault!r}"[:200]) from fault
