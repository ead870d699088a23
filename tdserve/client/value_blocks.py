"""Non-tensor values on their way: between what a tensordict holds and the ValueBlock of a message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from tdserve.errors import CapacityError, RemoteProtocolError
from tdserve.spec.tree import Path, Spec, ValueLeaf
from tdserve.v1 import control_pb2
from tdserve.values import decode_bytes, encode_bytes

MAX_VALUES_BYTES = 192 * 1024 * 1024
"""Non-tensor values ride in one message, which must stay below gRPC's and the workers' limit of 256 MiB."""


def encode_values(spec: Spec, values: dict[Path, Any], *, store: str) -> bytes:
    """The serialised ValueBlock of a spec's value leaves; ``b""`` when there are none."""
    if not spec.values:
        return b""
    block = control_pb2.ValueBlock()
    nbytes = 0
    for path, leaf in spec.values:
        column = block.columns.add(per_row=leaf.per_row)
        for value in _elements(values[path], leaf):
            content = encode_bytes(value, key=".".join(path))
            nbytes += len(content)
            column.values.append(content)
    if nbytes > MAX_VALUES_BYTES:
        raise CapacityError(
            what=f"the non-tensor values of one write to {store!r}", asked=nbytes, free=MAX_VALUES_BYTES
        )
    return block.SerializeToString()


def _elements(value: Any, leaf: ValueLeaf) -> Sequence[Any]:
    """One value per element of the batch, in C order; a single one when all share it."""
    if not leaf.per_row:
        return [value]
    elements = [value]
    for _ in leaf.batch_size:
        elements = [element for row in elements for element in row]
    return elements


def decode_values(spec: Spec, content: bytes) -> tuple[Spec, dict[Path, Any]]:
    """The values of a read, and the spec as they are: a leaf may have got values of single rows since it was stored.

    Raises:
        RemoteProtocolError: The block does not fit the spec.
    """
    if not spec.values:
        return spec, {}
    try:
        block = control_pb2.ValueBlock.FromString(content)
    except DecodeError:
        raise RemoteProtocolError(expected="values", received=f"{len(content)} bytes that are none") from None
    if len(block.columns) != len(spec.values):
        raise RemoteProtocolError(expected=f"{len(spec.values)} columns of values", received=f"{len(block.columns)}")
    values: dict[Path, Any] = {}
    is_per_row: dict[Path, bool] = {}
    for (path, leaf), column in zip(spec.values, block.columns, strict=True):
        per_row = column.per_row and bool(leaf.batch_size)
        decoded = [decode_bytes(value) for value in column.values]
        values[path] = _nest(decoded, leaf.batch_size) if per_row else decoded[0]
        is_per_row[path] = per_row
    return spec.with_per_row(is_per_row), values


def _nest(elements: list[Any], batch_size: tuple[int, ...]) -> list[Any]:
    for dim in range(len(batch_size) - 1, 0, -1):
        size = batch_size[dim]
        elements = [elements[row * size : (row + 1) * size] for row in range(math.prod(batch_size[:dim]))]
    return elements
